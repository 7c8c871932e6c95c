"""How many partitions topics have: asked for once, remembered in the home for when no broker can be asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from threading import Lock
from typing import Final

from holdfast.atomic import read_whole, write_atomically
from holdfast.seams import FileSystem

LAYOUT_FILE: Final = "topics.json"


class TopicLayout:
    """Shared by all spools of a home that this process has open."""

    def __init__(self, fs: FileSystem, home: str, say: Callable[[str], None] = lambda line: None) -> None:
        self._fs = fs
        self._path = f"{home}/{LAYOUT_FILE}"
        self._say = say
        self._lock = Lock()
        self._counts = self._read()

    def _read(self) -> dict[str, int]:
        if not self._fs.exists(self._path):
            return {}
        try:
            known = json.loads(read_whole(self._fs, self._path))
            return {str(topic): int(count) for topic, count in known.items() if int(count) > 0}
        except (ValueError, TypeError, AttributeError, OSError) as error:
            # Nothing depends on it but what is stored before a broker has been asked.
            self._say(f"{self._path} cannot be read, and is begun anew: {error}")
            return {}

    def known(self, topic: str) -> int | None:
        return self._counts.get(topic)

    def topics(self) -> list[str]:
        with self._lock:
            return list(self._counts)

    def learn(self, topic: str, count: int) -> None:
        with self._lock:
            if self._counts.get(topic) == count:
                return
            self._counts[topic] = count
            try:
                write_atomically(self._fs, self._path, json.dumps(self._counts).encode())
            except OSError as error:
                self._say(f"{self._path} could not be written: {error}")

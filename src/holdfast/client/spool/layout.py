"""How many partitions topics have: asked for once, remembered in the home for when no broker can be asked.

A home may serve producers of several clusters: each knows the topics that were asked about at its own address.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from threading import Lock
from typing import Any, Final

from holdfast.atomic import read_whole, write_atomically
from holdfast.seams import FileSystem

LAYOUT_FILE: Final = "topics.json"


class TopicLayout:
    """Shared by all spools of a home that this process has open."""

    def __init__(
        self,
        fs: FileSystem,
        home: str,
        bootstrap_servers: str,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._fs = fs
        self._path = f"{home}/{LAYOUT_FILE}"
        self._address = f"@{bootstrap_servers}"
        """No topic can have such a name. What stands outside of all addresses was written by an earlier version."""
        self._say = say
        self._lock = Lock()
        found = self._read()
        self._counts = _counts_in(found) | _counts_in(found.get(self._address))

    def _read(self) -> dict[str, Any]:
        if not self._fs.exists(self._path):
            return {}
        try:
            known = json.loads(read_whole(self._fs, self._path))
            if not isinstance(known, dict):
                raise TypeError("an object is expected")
            return known
        except (ValueError, TypeError, OSError) as error:
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
                found = self._read() | {self._address: self._counts}
                write_atomically(self._fs, self._path, json.dumps(found).encode())
            except OSError as error:
                self._say(f"{self._path} could not be written: {error}")


def _counts_in(found: Any) -> dict[str, int]:
    if not isinstance(found, dict):
        return {}
    return {topic: count for topic, count in found.items() if isinstance(count, int) and count > 0}

"""How long members of groups have been silent, counted over starts of the broker.

Every start gives every member a whole session: a broker that is killed more often than a session lasts would keep a
dead member, and the partitions nobody reads, for ever. So a small file notes who has not been heard of, and the next
start gives these what is left of their sessions. Somebody who is heard of is not in the next note.

Only who was silent since the start is noted, every ten seconds while there is anybody: nothing is written where all
are alive, nor once their sessions are over. Whoever is in the note has ten seconds at least, which clients need to find
the broker again: under kills closer than that nobody is missed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from typing import Final

from holdfast.atomic import read_whole, write_atomically
from holdfast.broker.node.directories import REFUSED_ERRNOS
from holdfast.broker.node.metadata_log import MetadataLog
from holdfast.seams import FileSystem

SILENCES_FILE: Final = "holdfast.silences"
NOTED_EVERY_MS: Final = 10_000
NOTED_MAX: Final = 10_000
"""Members in one note: a megabyte or so. Others begin anew."""

Member = tuple[str, str]
"""A group, and one of its members."""


class Silences:
    def __init__(self, fs: FileSystem, metadata: MetadataLog) -> None:
        self._fs = fs
        self._metadata = metadata
        self._ms: dict[Member, int] = {}

    @property
    def _path(self) -> str:
        return f"{self._metadata.hosted.directory.path}/{SILENCES_FILE}"

    def read(self) -> None:
        """A note that is missing, or that nobody can read, costs dead members a whole session more."""
        try:
            noted = json.loads(read_whole(self._fs, self._path))
            self._ms = {(str(group), str(member)): int(ms) for group, member, ms in noted}
        except (OSError, ValueError, TypeError):
            self._ms = {}

    def session_ms(self, group_id: str, member_id: str, timeout_ms: int) -> int:
        """What a member that is found at a start has left of its session."""
        left_ms = timeout_ms - self._ms.get((group_id, member_id), 0)
        return min(timeout_ms, max(left_ms, NOTED_EVERY_MS))

    def note(self, silent: Iterable[Member]) -> bool:
        """Another ten seconds have passed in which these were silent; whether there is anybody."""
        before, self._ms = (
            self._ms,
            {member: self._ms.get(member, 0) + NOTED_EVERY_MS for member in islice(silent, NOTED_MAX)},
        )
        if self._ms or before:
            data = json.dumps([[*member, ms] for member, ms in self._ms.items()]).encode()
            try:
                write_atomically(self._fs, self._path, data)
            except OSError as error:
                if error.errno not in REFUSED_ERRNOS:
                    self._metadata.hosted.directory.take_offline(error)
        return bool(self._ms)

"""Whether directories and files in use are still where their names lead.

A file that is removed, or whose directory is mounted over, takes writes and flushes as before, and what it
acknowledged is gone with the process. So once a second every log directory, and the active segments that were flushed
since the last look, are held against their paths; a directory that is gone, or where one of them is, has failed.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final

from holdfast.broker.node.directories import LogDirectory
from holdfast.broker.node.hosted import HostedPartition

LOOKED_AT_MAX: Final = 256
"""Partitions looked at in one round: about a millisecond. The others come in the rounds after it."""


class Presence:
    def __init__(self, directories: Sequence[LogDirectory]) -> None:
        self._directories = directories
        self._due: dict[HostedPartition, None] = {}

    def watch(self, partition: HostedPartition) -> None:
        self._due[partition] = None

    def look(self) -> None:
        for directory in self._directories:
            if not directory.offline:
                try:
                    directory.require_in_place()
                except OSError as error:
                    directory.refuses(error)
        for partition in list(self._due)[:LOOKED_AT_MAX]:
            del self._due[partition]
            if partition.offline or partition.is_deleted:
                continue
            try:
                self._require(partition)
            except OSError as error:
                if partition.directory.refuses(error):
                    self._due[partition] = None

    def _require(self, partition: HostedPartition) -> None:
        file = partition.log.active.file
        if not file.is_at_path():
            raise OSError(
                errno.ENOENT,
                "was removed or replaced while in use; what it took since then is lost unless it is put back",
                file.path,
            )

"""What becomes of a disk's errors: a directory refuses writes for a while, or it is offline until restart.

A directory that lacks room or descriptors stays in service: nothing was promised to whoever wanted to write. After
any other error nobody can say what is durable there: the directory is offline, and everybody who waits for it is
told. Without the directory of the metadata log the broker cannot go on.

`Presence` looks whether directories and files in use are still where their names lead. A file that is removed, or
whose directory is mounted over, takes writes and flushes as before, and what it acknowledged is gone with the
process. So once a second every log directory, and the active segments that were flushed since the last look, are
held against their paths; a directory that is gone, or where one of them is, has failed.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from traceback import format_exception
from typing import Final

from holdfast.broker.node.directories import NO_DESCRIPTOR_ERRNOS, LogDirectory
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.metadata_log import MetadataLog
from holdfast.broker.node.troubles import Kind, Troubles
from holdfast.errors import LogDirectoryOffline
from holdfast.saying import Level, Line, Say
from holdfast.seams import FileSystem

NAMED_MAX: Final = 20
"""Partitions that a line names; of more it gives the number."""
QUIET_MS: Final = 10_000
"""A directory that has refused nothing for so long is tried, and takes writes again or refuses once more."""


def defect_reporter(say: Say) -> Callable[[str, Exception], None]:
    """Something raised what it should not have: the operator gets its place, so that somebody can mend it."""

    def report(where: str, error: Exception) -> None:
        trace = "".join(format_exception(error))
        say(Line(f"defect in {where}: {trace}", Level.ERROR, kind=f"defect in {where}"))

    return report


@dataclass(eq=False, repr=False)
class Failures:
    _fs: FileSystem
    _troubles: Troubles
    _metadata: MetadataLog
    _hosted_in: Callable[[LogDirectory], list[HostedPartition]]
    _say: Say
    fatal: str | None = field(default=None, init=False)
    """Why this broker cannot go on, once that is so."""
    is_left_clean: bool = field(default=True, init=False)
    """Not if a stop lacked the room to write what the next start would have trusted."""
    presence: Presence = field(init=False)
    on_fatal: Callable[[], None] = field(default_factory=lambda: lambda: None, init=False)

    # Refused

    def refused(self, directory: LogDirectory, error: OSError) -> None:
        """A directory refuses writes for want of room or descriptors."""
        if error.errno in NO_DESCRIPTOR_ERRNOS:
            kind, what_to_do = Kind.NO_DESCRIPTORS, "Let this process open more files (ulimit -n)"
        else:
            kind, what_to_do = Kind.NO_ROOM, "Make room, or have topics keep less"
        self._troubles.begin(
            kind,
            directory.path,
            f"log directory {directory.path} refuses writes: {error}; {self._free(directory)}. Clients are told "
            f"KAFKA_STORAGE_ERROR and try again; nothing that was acknowledged is lost. {what_to_do}",
        )

    def retry_refused(
        self,
        directories: Sequence[LogDirectory],
        now_ms: int,
        try_to_write: Callable[[LogDirectory], bool],
    ) -> None:
        """Find out which directories take writes again, once they have refused nothing for a while.

        `try_to_write` writes something small, and has `refused` called if the disk refuses that.
        """
        for kind in (Kind.NO_ROOM, Kind.NO_DESCRIPTORS):
            for trouble in self._troubles.lasting(kind):
                directory = next(each for each in directories if each.path == trouble.subject)
                if now_ms - trouble.last_ms >= QUIET_MS and try_to_write(directory):
                    text = f"log directory {directory.path} takes writes again ({self._free(directory)})"
                    self._troubles.end(kind, directory.path, text)

    def _free(self, directory: LogDirectory) -> str:
        try:
            return f"{self._fs.free_bytes(directory.path):,} bytes are free"
        except OSError:
            return "how much is free cannot be asked"

    def stuck(self, partitions: Sequence[HostedPartition]) -> None:
        """Tell of flushes that do not return: whoever waits for them waits, and nothing is lost or refused yet."""
        slow = {partition.directory for partition in partitions}
        for directory in slow:
            names = _listed([partition for partition in partitions if partition.directory is directory])
            self._troubles.begin(
                Kind.FLUSH_STUCK,
                directory.path,
                f"the disk of {directory.path} does not answer: flushes have been under way for seconds in {names}. "
                "Producers with acks=all wait, and are told REQUEST_TIMED_OUT when their patience ends",
            )
        for trouble in self._troubles.lasting(Kind.FLUSH_STUCK):
            if trouble.subject not in {directory.path for directory in slow}:
                text = f"the disk of {trouble.subject} answers again"
                self._troubles.end(Kind.FLUSH_STUCK, trouble.subject, text)

    # Failed

    def failed(self, directory: LogDirectory, error: OSError) -> None:
        """Out of service until restart: what is parked there has an unknown outcome and is told so."""
        if directory.offline:
            return
        directory.fail(error)
        if directory.meta is not None:
            self._metadata.image.offline_directories.add(directory.id)
        offline = self._hosted_in(directory)
        for subject in (directory.path, *(hosted.name for hosted in offline)):
            self._troubles.forget(subject)
        self._troubles.begin(
            Kind.DIRECTORY_OFFLINE,
            directory.path,
            f"log directory {directory.path} is offline until restart, with {_listed(offline)}: {error}",
        )
        failure = LogDirectoryOffline(f"{directory.path} is offline: {error}")
        for hosted in offline:
            hosted.fail(failure)
        if self._metadata.is_open and self._metadata.hosted.directory is directory:
            self.fatal = f"the metadata log is in {directory.path}, which failed: {error}"
            self._say(Line(f"{self.fatal}; this broker cannot go on and must be restarted", Level.ERROR))
            self.on_fatal()


def _listed(partitions: Sequence[HostedPartition]) -> str:
    names = ", ".join(partition.name for partition in partitions[:NAMED_MAX])
    more = len(partitions) - NAMED_MAX
    return f"{len(partitions)} partitions ({names}{f' and {more} more' if more > 0 else ''})"


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

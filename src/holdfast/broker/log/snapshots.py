"""The `*.snapshot` files of one log, as opening it reads, replaces and removes them."""

from __future__ import annotations

from collections.abc import Container

from holdfast.atomic import flush_file, read_whole
from holdfast.broker.log.producer_snapshot import decode_snapshot, encode_snapshot
from holdfast.broker.log.producer_state import ProducerStateMap
from holdfast.broker.log.segment import SNAPSHOT_SUFFIX, offset_name
from holdfast.errors import CorruptLog
from holdfast.saying import Say, warn
from holdfast.seams import FileSystem


class Snapshots:
    def __init__(self, fs: FileSystem, directory: str, say: Say) -> None:
        self._fs = fs
        self._directory = directory
        self._say = say

    def path(self, offset: int) -> str:
        return f"{self._directory}/{offset_name(offset)}{SNAPSHOT_SUFFIX}"

    def load(self, offset: int) -> ProducerStateMap | None:
        """The state as of `offset`, if there is a file of it that is sound."""
        path = self.path(offset)
        try:
            entries = decode_snapshot(read_whole(self._fs, path), path)
        except FileNotFoundError:
            return None
        except CorruptLog as error:
            self._say(warn(f"{error}; producer state is rebuilt from the log"))
            return None
        return ProducerStateMap.from_snapshot(entries, self._directory)

    def is_durable(self, offset: int) -> bool:
        """Whether the state as of `offset` is on disk, whole; now, if not before."""
        path = self.path(offset)
        try:
            decode_snapshot(read_whole(self._fs, path), path)
        except (FileNotFoundError, CorruptLog):
            return False
        flush_file(self._fs, path)
        self._fs.flush_directory(self._directory)
        return True

    def write(self, offset: int, producers: ProducerStateMap) -> None:
        """Keep the state as of `offset`, durable but for its name: the batches it came from may be deleted one day."""
        file = self._fs.open(self.path(offset), "create")
        data = encode_snapshot(producers.to_snapshot())
        file.pwritev([data], 0)
        file.truncate(len(data))
        file.flush()
        file.close()

    def replace(self, offset: int, producers: ProducerStateMap) -> None:
        """Write a lost one anew. Without room for it, the next start replays once more."""
        try:
            self.write(offset, producers)
            self._fs.flush_directory(self._directory)
        except OSError as error:
            self._say(
                warn(f"{self._directory}: the state of producers at {offset} could not be written: {error}")
            )

    def remove_unused(self, used: Container[int], end_offset: int) -> None:
        """Remove what earlier stops wrote at their ends, once there is one of this end."""
        found = self._offsets()
        if end_offset not in found:
            return
        try:
            for offset in found:
                if offset != end_offset and offset not in used:
                    self._fs.remove(self.path(offset))
        except OSError as error:
            self._say(warn(f"{self._directory}: an old state of producers could not be removed: {error}"))

    def remove_above(self, offset: int) -> None:
        """Remove what may be of batches that were not flushed and are lost: their offsets are given again."""
        for found in self._offsets():
            if found > offset:
                self._fs.remove(self.path(found))

    def _offsets(self) -> list[int]:
        """The offsets there are states of producers of."""
        names = [name for name in self._fs.list(self._directory) if name.endswith(SNAPSHOT_SUFFIX)]
        stems = (name.removesuffix(SNAPSHOT_SUFFIX) for name in names)
        return [int(stem) for stem in stems if stem.isdigit() and offset_name(int(stem)) == stem]

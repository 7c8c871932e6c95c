"""Committed offsets found again in the log: nothing is decoded but what is left of it in the end.

A log of committed offsets is mostly the same few keys over and over. While it is replayed, keys and values stay bytes
in dictionaries, and follow the rules of `OffsetStore`; `finish` decodes the last value of each key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from holdfast.broker.groups.model import CommittedOffset
from holdfast.seams import Buffer
from holdfast.wire.coordinator_records import OffsetCommitKey, OffsetCommitValue, decode_group_record

_KINDS: Final = (b"\0\0", b"\0\1")
"""How keys of committed offsets begin: as they are written, and as they were long ago."""
_WRITTEN: Final = _KINDS[1]

LatestValues = dict[bytes, tuple[int, bytes]]
"""Key without its kind, to how many committed offsets came before and the value."""


class StoredOffset(NamedTuple):
    group_id: str
    topic: str
    partition: int
    committed: CommittedOffset
    producer_id: int | None
    """Whose transaction it is pending in, if it is."""


class OffsetReplay:
    def __init__(self) -> None:
        self._committed: LatestValues = {}
        self._pending: dict[int, LatestValues] = {}
        self._order = 0

    @staticmethod
    def is_about(key: Buffer) -> bool:
        return key[:2] in _KINDS

    def record(self, key: Buffer, value: Buffer | None, producer_id: int | None) -> None:
        what = bytes(key[2:])
        if value is None:
            self._committed.pop(what, None)
            for pending in self._pending.values():
                pending.pop(what, None)
            return
        self._order += 1
        place = self._committed if producer_id is None else self._pending.setdefault(producer_id, {})
        place[what] = (self._order, bytes(value))

    def end_transaction(self, producer_id: int, is_commit: bool) -> None:
        for what, found in self._pending.pop(producer_id, {}).items():
            if is_commit and self._committed.get(what, (0,))[0] < found[0]:
                self._committed[what] = found

    def finish(self) -> Iterator[StoredOffset]:
        """Everything that is left; a value of a version that is not known here says nothing."""
        yield from self._decoded(self._committed, None)
        for producer_id, pending in self._pending.items():
            yield from self._decoded(pending, producer_id)

    def _decoded(self, found: LatestValues, producer_id: int | None) -> Iterator[StoredOffset]:
        for what, (order, data) in found.items():
            key, value = decode_group_record(_WRITTEN + what, data)
            if isinstance(key, OffsetCommitKey) and isinstance(value, OffsetCommitValue):
                committed = CommittedOffset(
                    value.offset,
                    value.leader_epoch,
                    value.metadata,
                    value.commit_timestamp,
                    value.expire_timestamp,
                    value.topic_id,
                    order,
                )
                yield StoredOffset(key.group, key.topic, key.partition, committed, producer_id)

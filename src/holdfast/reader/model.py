"""The words of the reader: what is read, what is told about it. Cheap to import, and plain enough to be pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias
from uuid import UUID

Isolation: TypeAlias = Literal["read_committed", "read_uncommitted"]
OffsetSpec: TypeAlias = Literal["earliest", "latest", "last-stable"] | int
"""A place in every log, or a time in milliseconds: the first record at or after it."""


class TopicPartition(NamedTuple):
    topic: str
    partition: int


class PartitionInfo(NamedTuple):
    leader: int
    """The id of the broker that leads, -1 while none does."""
    leader_epoch: int


class TopicInfo(NamedTuple):
    name: str
    topic_id: UUID
    partitions: dict[int, PartitionInfo]


class PartitionRange(NamedTuple):
    """Offsets of one partition, from `start` up to and without `end`."""

    topic: str
    topic_id: UUID
    """Read by this id: a topic of the same name created later is another one."""
    partition: int
    start: int
    end: int
    leader_epoch: int = -1
    """The epoch of what was read before `start`, -1 if unknown."""


class OffsetAnswer(NamedTuple):
    offset: int
    """-1 when a time was asked for and no record is that young."""
    leader_epoch: int
    timestamp_ms: int
    """Of the record at the offset, when a time was asked for; else -1."""


@dataclass
class RangeReport:
    """What became of every offset of a range, filled while it is read.

    Of the offsets passed so far, each is counted once: `records + control + aborted + missing == position - start`.
    """

    range: PartitionRange
    position: int = 0
    """The next offset to read."""
    records: int = 0
    control: int = 0
    """Markers that end transactions."""
    aborted: int = 0
    """Records of aborted transactions; only read_committed leaves them out."""
    missing: int = 0
    """Offsets in no batch: compacted away, or never given to a record."""
    bytes: int = 0
    """Size of the batches as they came, compressed or not."""
    set_aside: list[tuple[str, int, int]] | None = None
    """A list put here gets each batch without rows: `control` or `aborted`, its first and its last offset."""

    def __post_init__(self) -> None:
        self.position = max(self.position, self.range.start)

    @property
    def is_complete(self) -> bool:
        return self.position >= self.range.end

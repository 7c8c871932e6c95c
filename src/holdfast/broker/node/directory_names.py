"""Names of partitions' directories, in Kafka's forms.

    topic-N                 a partition
    topic-N.<id>-delete     a deleted one that is to be removed; ours has the topic's id
    topic-N.<id>-stray      one that belongs to no topic of this cluster, kept for whoever wants to look

A name has at most 255 bytes, so with an id and a mark a long topic's name is cut, as Kafka cuts it. Cut names end with
a checksum of the whole one: the checkpoints know partitions by their whole names, and two topics must not share one.
Earlier versions left `topic-N-stray`; such directories are nobody's and stay as they are.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from zlib import crc32

NAME_BYTES_MAX: Final = 255
DELETE_MARK: Final = "-delete"
STRAY_MARK: Final = "-stray"


class Marked(NamedTuple):
    """The parts of a name with a mark."""

    topic: str
    """The topic's name, perhaps cut."""
    partition: int
    unique_id: str


def marked_name(topic: str, index: int, unique_id: str, mark: str) -> str:
    rest = f"-{index}.{unique_id}{mark}"
    room = NAME_BYTES_MAX - len(rest)
    if len(topic) > room:
        checksum = f"{crc32(topic.encode()):08x}"
        topic = topic[: room - len(checksum)] + checksum
    return topic + rest


def parse_marked(name: str, mark: str) -> Marked | None:
    stem, _, unique_id = name.removesuffix(mark).rpartition(".")
    parsed = parse_name(stem) if name.endswith(mark) else None
    return Marked(*parsed, unique_id) if parsed is not None else None


def parse_name(name: str) -> tuple[str, int] | None:
    """Topic and index of a partition's directory; None when this is no such name."""
    topic, _, index = name.rpartition("-")
    is_number = index.isdecimal() and str(int(index)) == index
    return (topic, int(index)) if topic and is_number else None

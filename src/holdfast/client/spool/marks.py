"""`hf-id`, the header that names a message of a spool for ever: `spool:opening:topic:partition:sequence`.

The sequence counts the spool's messages for the partition, from 0 without gaps; with a `u` in front of it, those of the
topic that were stored before anybody knew its partitions. The opening, eight hexadecimal digits, is drawn anew when a
process opens the spool: a spool that is put back from an older copy uses its sequences again, and no opening. What an
earlier version has stored keeps the id that it gave: `spool:partition:sequence`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

ID_HEADER: Final = "hf-id"
SPOOL_DIGITS: Final = 16
SEQUENCE_MAX: Final = 2**48 - 1
SEQUENCE_DIGITS_MAX: Final = 15


class Marks(dict[tuple[int, str, int | None, int | None], bytes]):
    """By opening, topic, partition and line: the id of a message there, in which the sequence is left open."""

    def __init__(self, spool_id: str) -> None:
        super().__init__()
        self._spool_id = spool_id

    def __missing__(self, where: tuple[int, str, int | None, int | None]) -> bytes:
        opening, topic, partition, line = where
        assert partition is not None, "a message has its partition before it is sent"
        is_undecided = line is not None
        name = topic.replace("%", "%%")
        place = f"{opening:08x}:{name}:{partition}" if opening or is_undecided else f"{partition}"
        mark = self[where] = f"{self._spool_id}:{place}:{'u' if is_undecided else ''}%d".encode()
        return mark


class MarkedId(NamedTuple):
    spool: str
    opening: str
    """Empty when an earlier version gave the id."""
    topic: str | None
    """None when an earlier version gave the id."""
    partition: int
    is_undecided: bool
    """Whether the sequence counts the topic's messages that were stored before anybody knew its partitions."""
    sequence: int


def parse_mark(value: bytes | None) -> MarkedId | None:
    """The parts of an `hf-id`; None when it is not one."""
    parts = (value or b"").split(b":")
    if len(parts) == 3:
        parts[1:1] = [b"", b""]
    if len(parts) != 5:
        return None
    spool, opening, topic, partition, sequence = parts
    number = sequence.removeprefix(b"u")
    if len(spool) != SPOOL_DIGITS or not (partition.isdigit() and number.isdigit()):
        return None
    try:
        int(spool, 16)
        if topic:
            int(opening, 16)
        found = MarkedId(
            spool.decode(),
            opening.decode(),
            topic.decode() or None,
            int(partition),
            number != sequence,
            int(number),
        )
    except ValueError:
        return None
    return found if found.sequence <= SEQUENCE_MAX else None

"""What must hold of our clients after a storm, as functions of what was seen. Each raises `Violation` with the rule.

- `check_spooled`: what producers were told is stored arrived, in order, and once, by `hf-id` or by itself.
- `check_never_ahead`: no position of a group was ever seen beyond work that is not finished.
- `check_copied`: a topic that was written in transactions holds every message of another once, in order.
- `check_rows`: so does a table, whatever the order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from holdfast.testing.checkers_base import Violation


class Arrived(NamedTuple):
    """A message of a spool in its topic: `hf-id` and value, which is `producer:number`."""

    spool: str
    partition: int
    sequence: int
    value: str


class Row(NamedTuple):
    partition: int
    offset: int
    value: str


class Finished(NamedTuple):
    """The work on a message was over at a moment, as noted at a place."""

    at: int
    partition: int
    offset: int


def deduplicated(partition: int, messages: Sequence[Arrived]) -> list[str]:
    """What a reader keeps that remembers one number per spool. Sequences have no gaps: one that is missing is lost."""
    following: Counter[str] = Counter()
    kept: list[str] = []
    for place, message in enumerate(messages):
        if message.partition != partition:
            raise Violation("partition", f"{message} is in partition {partition}")
        expected = following[message.spool]
        if message.sequence > expected:
            raise Violation(
                "order", f"message {place} of partition {partition} is {message}, before {expected}"
            )
        if message.sequence == expected:
            following[message.spool] += 1
            kept.append(message.value)
    return kept


def check_spooled(
    stored: Mapping[str, int], arrived: Mapping[int, Sequence[Arrived]], *, exactly_once: bool
) -> None:
    """`stored` is how many messages each producer was told are stored; it numbered them from 0."""
    everything: set[str] = set()
    for partition, messages in arrived.items():
        values = deduplicated(partition, messages)
        if exactly_once and len(values) < len(messages):
            twice = len(messages) - len(values)
            raise Violation("twice", f"partition {partition} holds {twice} messages of a spool again")
        last: dict[str, int] = {}
        for value in values:
            name, _, number = value.partition(":")
            if int(number) <= last.get(name, -1):
                raise Violation("order", f"partition {partition}: {value} comes behind {name}:{last[name]}")
            last[name] = int(number)
        if again := everything & set(values):
            raise Violation("twice", f"{min(again)} and {len(again) - 1} more are in two partitions")
        everything |= set(values)
    for name, count in stored.items():
        missing = [number for number in range(count) if f"{name}:{number}" not in everything]
        if missing:
            raise Violation(
                "lost", f"{name}:{missing[0]} and {len(missing) - 1} more were stored and never arrived"
            )


def check_never_ahead(
    finished: Iterable[Finished], seen: Iterable[tuple[int, Mapping[int, int]]], starts: int = 0
) -> None:
    """`seen` are the positions of a group as of the moments their answers came."""
    work = sorted(finished)
    done: dict[int, set[int]] = {}
    below: dict[int, int] = {}
    """Everything of a partition below this is finished."""
    taken = 0
    for answered_at, positions in seen:
        while taken < len(work) and work[taken].at <= answered_at:
            _, partition, offset = work[taken]
            done.setdefault(partition, set()).add(offset)
            taken += 1
        for partition, position in positions.items():
            finished_below = below.get(partition, starts)
            mine = done.setdefault(partition, set())
            while finished_below in mine:
                finished_below += 1
            below[partition] = finished_below
            if position > finished_below:
                raise Violation(
                    "ahead",
                    f"answered at {answered_at}: partition {partition} is committed up to {position}, and "
                    f"{finished_below} is not finished",
                )


def check_copied(source: Mapping[int, Sequence[str]], target: Mapping[int, Sequence[str]]) -> None:
    for partition, values in source.items():
        copies = target.get(partition, ())
        _once("copied", f"partition {partition}", Counter(values), Counter(copies))
        if list(copies) != list(values):
            at = next(
                place for place, pair in enumerate(zip(values, copies, strict=True)) if pair[0] != pair[1]
            )
            raise Violation(
                "order", f"partition {partition}: {copies[at]!r} stands where {values[at]!r} belongs"
            )


def check_rows(written: Mapping[int, Mapping[int, str]], rows: Iterable[Row]) -> None:
    """`written` is what was acknowledged, by partition and offset."""
    wanted = Counter(
        Row(partition, offset, value) for partition, some in written.items() for offset, value in some.items()
    )
    _once("stored", "the table", wanted, Counter(rows))


def _once(
    done: str, where: str, wanted: Counter[Row] | Counter[str], found: Counter[Row] | Counter[str]
) -> None:
    for each, count in found.items():
        if each not in wanted:
            raise Violation("invented", f"{where}: {each!r} was never written")
        if count > wanted[each]:  # type: ignore[index]
            raise Violation("twice", f"{where}: {each!r} was {done} {count} times")
    missing = [each for each in wanted if each not in found]
    if missing:
        raise Violation("lost", f"{where}: {missing[0]!r} and {len(missing) - 1} more were not {done}")

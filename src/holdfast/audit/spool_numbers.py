"""The numbers of spools as they stand in topics: which were seen, in which ranges, how often, in which order.

`hf-id` is `spool:opening:topic:partition:sequence`, or without opening and topic (`client/spool/marks.py`). One line of
numbers is a spool's messages for one partition of a topic, or those that were stored before anybody knew its
partitions; it is kept as ranges, so that memory is what the gaps take, however many records there are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.lineage import as_ranges
from holdfast.audit.sinks.headers import last_header
from holdfast.client.messages import ID_HEADER
from holdfast.client.spool.format import UNDECIDED

_ID: Final = (
    r"^(?P<spool>[0-9a-f]{16}):(?:[0-9a-f]{8}:[^:]+:)?"
    r"(?P<partition>[0-9]{1,9}):(?P<kind>u?)(?P<sequence>[0-9]{1,18})$"
)
_UNDECIDED_CODE: Final = 0xFFFFFFFF

Numbers = npt.NDArray[np.int64]
Range = tuple[int, int]


class Line(NamedTuple):
    """What is counted in one line: a spool's messages for one partition."""

    spool: str
    topic: str
    partition: int
    """-1 for messages that were stored before anybody knew the topic's partitions: they are in any of them."""

    def __str__(self) -> str:
        if self.partition == UNDECIDED:
            return f"spool {self.spool}, {self.topic} (stored before its partitions were known)"
        return f"spool {self.spool}, {self.topic}-{self.partition}"

    def id_of(self, number: int) -> str:
        """How a message of it is named in what people read."""
        kind = "u" if self.partition == UNDECIDED else f"{self.partition}"
        return f"{self.spool}:{kind}:{number}"


@dataclass
class Sequences:
    """The numbers of one line that were seen, as ranges: memory is what the gaps take."""

    ranges: list[Range] = field(default_factory=list)
    """First and last, ascending, no two of them touching."""
    seen: int = 0
    backwards: int = 0
    """Numbers that came new behind a greater one: a reader that keeps the greatest takes them for repeated."""
    backwards_at: int = -1
    """Offset of the first of them."""

    @property
    def highest(self) -> int:
        return self.ranges[-1][1] if self.ranges else -1

    @property
    def lowest(self) -> int:
        return self.ranges[0][0] if self.ranges else 0

    @property
    def distinct(self) -> int:
        return count_of(self.ranges)

    @property
    def repeated(self) -> int:
        return self.seen - self.distinct

    def add(self, numbers: Numbers, offsets: Numbers, *, is_ordered: bool = True) -> None:
        """Numbers in the order of their records; `is_ordered` where that order means something."""
        if not is_ordered:
            self._merge(as_ranges(np.unique(numbers)))
            self.seen += len(numbers)
            return
        before = self.distinct
        highest = np.maximum.accumulate(np.concatenate(([self.highest], numbers)))[:-1]
        behind = numbers <= highest
        known = self._known(numbers) if behind.any() else np.zeros(len(numbers), np.bool_)
        self._merge(as_ranges(np.unique(numbers)))
        self.seen += len(numbers)
        fresh = self.distinct - before
        out_of_order = int(behind.sum()) - (len(numbers) - fresh)
        if out_of_order > 0:
            self.backwards += out_of_order
            if self.backwards_at < 0:
                first_time = np.zeros(len(numbers), np.bool_)
                first_time[np.unique(numbers, return_index=True)[1]] = True
                self.backwards_at = int(offsets[np.flatnonzero(behind & ~known & first_time)[0]])

    def _known(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        if not self.ranges:
            return np.zeros(len(numbers), np.bool_)
        firsts, lasts = (np.array(side, np.int64) for side in zip(*self.ranges, strict=True))
        at = np.searchsorted(firsts, numbers, side="right") - 1
        return (at >= 0) & (numbers <= lasts[np.maximum(at, 0)])

    def _merge(self, runs: Sequence[Range]) -> None:
        ranges = self.ranges
        if ranges and len(runs) == 1 and ranges[-1][0] <= runs[0][0] <= ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], runs[0][1]))
            return
        self.ranges = merged([*ranges, *runs])

    def gaps(self, first: int, behind: int) -> list[Range]:
        """What is missing of the numbers from `first` up to and without `behind`."""
        return without([(first, behind - 1)] if first < behind else [], self.ranges)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The same numbers in as few ranges as there can be."""
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def without(ranges: Iterable[Range], taken: Sequence[Range]) -> list[Range]:
    """What is left of ranges when the numbers of others are taken out."""
    left: list[Range] = []
    taken = merged(taken)
    starts = [first for first, _ in taken]
    for first, last in ranges:
        at = max(0, bisect_right(starts, first) - 1)
        for cut_first, cut_last in taken[at:]:
            if cut_last < first:
                continue
            if cut_first > last:
                break
            if cut_first > first:
                left.append((first, cut_first - 1))
            first = cut_last + 1
        if first <= last:
            left.append((first, last))
    return left


def count_of(ranges: Iterable[Range]) -> int:
    return sum(last - first + 1 for first, last in ranges)


class SpoolLines:
    """Takes the records of topics, batch by batch, and knows every line's numbers."""

    def __init__(self) -> None:
        self.lines: dict[Line, Sequences] = {}
        self.unnumbered: dict[str, int] = {}
        """By topic: records without a number."""
        self.strange: dict[str, int] = {}
        """By topic: records whose header is no number of a spool."""

    def take(self, batch: pa.RecordBatch) -> None:
        """Records of one partition, in the order of their offsets, with headers."""
        if not batch.num_rows:
            return
        topic = batch.column("topic")[0].as_py()
        ids = last_header(batch.column("headers"), ID_HEADER)
        if ids.null_count:
            self.unnumbered[topic] = self.unnumbered.get(topic, 0) + ids.null_count
            if ids.null_count == len(ids):
                return
        parsed = pc.extract_regex(_as_text(ids), _ID)
        strange = len(ids) - ids.null_count - (len(parsed) - parsed.null_count)
        if strange:
            self.strange[topic] = self.strange.get(topic, 0) + strange
        valid = parsed.is_valid()
        parsed, offsets = parsed.filter(valid), batch.column("offset").filter(valid).to_numpy()
        if len(parsed):
            self._take(topic, batch.column("partition")[0].as_py(), parsed, offsets)

    def _take(self, topic: str, partition: int, parsed: pa.StructArray, offsets: Numbers) -> None:
        spools = pc.dictionary_encode(pc.struct_field(parsed, "spool"))
        names = spools.dictionary.to_pylist()
        partitions = pc.struct_field(parsed, "partition").cast(pa.int64()).to_numpy()
        numbers = pc.struct_field(parsed, "sequence").cast(pa.int64()).to_numpy()
        is_undecided = pc.equal(pc.struct_field(parsed, "kind"), "u").to_numpy(zero_copy_only=False)
        partitions = np.where(is_undecided, _UNDECIDED_CODE, partitions)
        mixed = (spools.indices.to_numpy().astype(np.int64) << 32) | partitions
        order = np.argsort(mixed, kind="stable")
        cuts = np.flatnonzero(np.diff(mixed[order])) + 1
        for begin, end in pairwise([0, *cuts.tolist(), len(order)]):
            chosen = order[begin:end]
            code = int(mixed[chosen[0]])
            number = code & _UNDECIDED_CODE
            line = Line(names[code >> 32], topic, UNDECIDED if number == _UNDECIDED_CODE else number)
            # A copy may deal the records of one line out to other partitions: there, order means nothing.
            is_ordered = line.partition == partition
            self.lines.setdefault(line, Sequences()).add(
                numbers[chosen], offsets[chosen], is_ordered=is_ordered
            )


def _as_text(ids: pa.Array) -> pa.Array:
    try:
        return ids.cast(pa.large_string())
    except pa.ArrowInvalid:
        texts = [None if each is None else each.decode("ascii", "replace") for each in ids.to_pylist()]
        return pa.array(texts, pa.large_string())

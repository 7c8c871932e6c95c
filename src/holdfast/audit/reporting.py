"""From what was compared to a report: accounts, the plot over time, keys and places of what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from holdfast.audit.compare import CODE, FATES, NO_FATE, Holding, Judgement
from holdfast.audit.model import (
    BUCKETS_MAX,
    KEYS_MAX,
    Examined,
    Fate,
    Finding,
    PartitionAccount,
    SinkAccount,
    Timeline,
)
from holdfast.audit.source import NO_TICK, RECORD, TICK_MS, LogEnds, PartitionWalk, SourceWalk, keys_at
from holdfast.audit.words import place_text
from holdfast.pipeline.positions import Place

if TYPE_CHECKING:
    from holdfast.audit.sinks.base import SinkReader
    from holdfast.reader.cluster import Cluster

NAMED_MAX: Final = 20
"""Findings whose keys are read back from the source: a fetch for each key."""
FOUND_MAX: Final = 5
"""Findings whose rows are looked for in the sinks, which may mean reading a topic or a table again."""
STEPS_MS: Final = (100, 200, 500, 1000, 2000, 5000, 10_000, 15_000, 30_000)
MINUTES: Final = (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440)

Fates = npt.NDArray[np.uint8]


def partition_accounts(
    walk: SourceWalk, fates: Mapping[Place, Fates], logs: Mapping[Place, LogEnds]
) -> tuple[PartitionAccount, ...]:
    accounts = []
    for place, part in sorted(walk.partitions.items()):
        counted = np.bincount(fates[place], minlength=NO_FATE + 1)
        by_fate = Counter({str(fate): int(counted[CODE[fate]]) for fate in FATES})
        by_fate[Fate.PENDING] += max(logs[place].end - part.end, 0)
        ends = (part.kinds(), +by_fate, logs[place].start, logs[place].end)
        digest = f"{part.digest(part.start, part.end):016x}"
        accounts.append(PartitionAccount(place, part.start, part.end, *ends, digest))
    return tuple(accounts)


def sink_account(
    reader: SinkReader, holding: Holding | None, judgements: Sequence[Judgement], examined: Examined
) -> SinkAccount:
    rows = sum(each.windows for each in examined.windows if each.sink == reader.name)
    fates: Counter[str] = Counter()
    if holding is not None:
        rows = holding.rows - holding.rows_erased
        inside, erased = (
            sum(int(counts.sum(dtype=np.int64)) for counts in of.values())
            for of in (holding.counts, holding.erased)
        )
        fates[Fate.DEAD_LETTER if reader.kind == "dead_letter" else Fate.OUTPUT] = inside - erased
        fates[Fate.ERASED] = erased
    fates[Fate.LOST] = sum(int(each.lost.sum()) for each in judgements)
    for each in examined.findings:
        if each.sink == reader.name and each.fate is not Fate.LOST:
            fates[each.fate] += each.count or 1
    positions = {place_text(place): at.offset for place, at in sorted(reader.positions().at.items())}
    kept = {fate: count for fate, count in fates.items() if count}
    return SinkAccount(reader.name, reader.kind, rows, len(reader.entries()), positions, kept, reader.takes)


def timeline(walk: SourceWalk, fates: Mapping[Place, Fates]) -> Timeline:
    """Records by time and fate."""
    if walk.base_ms is None:
        return Timeline()
    chosen = {
        place: (fates[place] != NO_FATE) & (part.ticks != NO_TICK) for place, part in walk.partitions.items()
    }
    bounds = [
        (int(part.ticks[chosen[place]].min()), int(part.ticks[chosen[place]].max()))
        for place, part in walk.partitions.items()
        if chosen[place].any()
    ]
    if not bounds:
        return Timeline()
    first = walk.base_ms + min(low for low, _ in bounds) * TICK_MS
    last = walk.base_ms + max(high for _, high in bounds) * TICK_MS
    bucket_ms = _bucket_ms(last - first)
    origin = first - first % bucket_ms
    size = (last - origin) // bucket_ms + 1
    table = np.zeros((NO_FATE + 1, size), np.int64)
    for place, part in walk.partitions.items():
        mask = chosen[place]
        at = (walk.base_ms - origin + part.ticks[mask].astype(np.int64) * TICK_MS) // bucket_ms
        codes = fates[place][mask].astype(np.int64)
        table += np.bincount(codes * size + at, minlength=table.size).reshape(table.shape)
    counts = {str(fate): tuple(table[CODE[fate]].tolist()) for fate in FATES if table[CODE[fate]].any()}
    return Timeline(bucket_ms, tuple(origin + number * bucket_ms for number in range(size)), counts)


def _bucket_ms(length_ms: int) -> int:
    """The shortest round length of time that makes few enough points."""
    for step in (*STEPS_MS, *(minutes * 60_000 for minutes in MINUTES)):
        if length_ms // step + 2 <= BUCKETS_MAX:
            return step
    days = length_ms // (1440 * 60_000 * (BUCKETS_MAX - 2)) + 1
    return int(days * 1440 * 60_000)


def named(
    findings: Sequence[Finding], cluster: Cluster, walk: SourceWalk, readers: Mapping[str, SinkReader]
) -> tuple[Finding, ...]:
    """The findings, each once, losses first; the first of them with keys, and with where their rows are."""
    done: list[Finding] = []
    looked_for = 0
    for number, each in enumerate(sorted(dict.fromkeys(findings), key=lambda each: FATES.index(each.fate))):
        if number >= NAMED_MAX or each.place is None or each.place not in walk.partitions:
            done.append(each)
            continue
        offsets = _first_records(each, walk.partitions[each.place])
        keys = each.keys or tuple(keys_at(cluster, each.place, offsets))
        detail = each.detail
        is_there = each.fate in (Fate.DUPLICATED, Fate.EXTRA) and each.sink in readers and each.ranges
        if is_there and looked_for < FOUND_MAX:
            looked_for += 1
            found = readers[each.sink].find(each.place, each.ranges[0][0])
            if found:
                detail = f"{detail}; {each.ranges[0][0]} is in " + ", ".join(found[:4])
        done.append(replace(each, keys=keys[:KEYS_MAX], detail=detail.removeprefix("; ")))
    return tuple(done)


def _first_records(finding: Finding, part: PartitionWalk) -> list[int]:
    """Records at the beginning of the finding's ranges; none where the ranges only say among which it is."""
    if sum(last - first + 1 for first, last in finding.ranges) > finding.count:
        return []
    offsets = (
        offset
        for first, last in finding.ranges[:KEYS_MAX]
        for offset in range(max(first, part.start), min(last, first + KEYS_MAX, part.end - 1) + 1)
        if part.codes[offset - part.start] == RECORD
    )
    return list(islice(offsets, KEYS_MAX))

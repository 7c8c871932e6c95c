"""Which segments of a step's state become one: size-tiered, as in a log-structured merge tree.

A batch adds a segment. Eight of a tier become one of the next, so a row is rewritten a few times in its life and not in
each batch; a large batch starts in a higher tier, and is not rewritten with the small ones that come after it. Where
keys repeat, segments stop growing at the size of all that is alive, and tiers alone would keep eight copies of it: once
the others together have more than twice the largest, all become one. Batches that touch one key in a hundred rewrite
less than three per cent of the state each on average; one in two hundred rewrites all of it.

Which it is, is decided by what stands in the manifest alone, so a batch that is repeated merges alike. Merging itself
is the step's business, since it knows what two rows of one key come to: `merged` runs its SQL over them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from holdfast.pipeline.state.segments import Segment, StepState, alive, not_seen

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from holdfast.pipeline.state.operator import OperatorContext

FAN_IN: Final = 8
"""Segments of one tier that become one of the next."""
EXCESS_MAX: Final = 2
"""How many times the largest segment all others may come to, once it is `SETTLED` tiers above the lowest."""
SETTLED: Final = 2
TINY_BYTES: Final = 64 * 1024
"""The size up to which a new segment is of tier 0; each further tier is eight times as large."""
TINY_MAX: Final = 16
"""Segments of that size cost more to open than to read, whatever their tiers."""
FILE_BYTES: Final = 64 * 1024 * 1024
"""About what one task writes when segments are merged."""


def tier_of(segment: Segment) -> int:
    """By how often its rows were merged, or by its size, whichever is more."""
    tier, size = segment.tier, TINY_BYTES * FAN_IN**segment.tier
    while segment.bytes > size:
        tier, size = tier + 1, size * FAN_IN
    return tier


def segments_to_merge(segments: Sequence[Segment]) -> list[Segment] | None:
    """Those that should become one now, oldest first; mostly none."""
    if len(segments) < 2:
        return None
    tiers = Counter(tier_of(segment) for segment in segments)
    largest = max(segments, key=lambda segment: segment.bytes)
    others = sum(segment.bytes for segment in segments) - largest.bytes
    if tier_of(largest) >= min(tiers) + SETTLED and others > EXCESS_MAX * largest.bytes:
        return list(segments)
    full = [tier for tier, count in tiers.items() if count >= FAN_IN]
    if full:
        # A merge that fills the next tier takes that one along: what it holds would be rewritten by the next batch.
        last = min(full)
        while tiers[last + 1] >= FAN_IN - 1:
            last += 1
        return [segment for segment in segments if min(full) <= tier_of(segment) <= last]
    tiny = [segment for segment in segments if segment.bytes <= TINY_BYTES]
    return tiny if len(tiny) > TINY_MAX else None


def merged_tier(merging: Sequence[Segment]) -> int:
    """Of what they become: the next tier where one was full, else the one of the largest."""
    tiers = Counter(tier_of(segment) for segment in merging)
    top = max(tiers)
    lower = sum(count for tier, count in tiers.items() if tier < top)
    return top + 1 if tiers[top] + (lower >= FAN_IN) >= FAN_IN else top


def with_merged(
    segments: Sequence[Segment], merging: Sequence[Segment], result: Segment | None
) -> tuple[Segment, ...]:
    """The segments with `result` in the place of those it was made from."""
    gone = set(merging)
    first = next(number for number, segment in enumerate(segments) if segment in gone)
    before = [segment for segment in segments[:first] if segment not in gone]
    after = [segment for segment in segments[first:] if segment not in gone]
    return (*before, *([result] if result else []), *after)


def write_segment(context: OperatorContext, step: str, rows: DataFrame, tier: int = 0) -> Segment | None:
    """Write these rows, which have `_until`, as a segment of the step's state; None when there are none."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as f

    directory = context.store.segment_dir(context.label, step)
    written = Observation()
    counted = rows.observe(written, f.count(f.lit(1)).alias("rows"))
    counted.write.option("compression", "lz4_raw").parquet(directory)
    segment = context.store.adopt(directory, tier)
    seen = 0 if segment is None else segment.rows
    if seen != written.get["rows"]:
        raise not_seen(
            f"tasks wrote {written.get['rows']} rows of state to {directory}, and {seen} are there"
        )
    return segment


def merged(
    context: OperatorContext,
    step: str,
    schema: StructType | str,
    query: str,
    *,
    dead_to_ms: int | None = None,
) -> StepState:
    """The state with the segments that are due made one by `query`, SQL over `{rows}` that keeps `_until`.

    Rows whose `_until` is at or before `dead_to_ms` are left out, and segments of nothing else are dropped unread. The
    state as it was, where nothing is due.
    """
    state = replace(context.state, segments=alive(context.state.segments, dead_to_ms))
    merging = segments_to_merge(state.segments)
    if merging is None:
        return state
    rows = context.store.frame(context.spark, merging, schema, until_above=dead_to_ms)
    if rows is None:
        return replace(state, segments=with_merged(state.segments, merging, None))
    files = 1 + sum(segment.bytes for segment in merging) // FILE_BYTES
    result = context.spark.sql(query, rows=rows).coalesce(files)
    segment = write_segment(context, step, result, merged_tier(merging))
    return replace(state, segments=with_merged(state.segments, merging, segment))

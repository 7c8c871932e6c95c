"""Two topics that should hold the same: a mirror, a copy job, a migration.

Keys (or any other expression on the record, with the value where asked) are compared as multisets, so records may lie
in other partitions and at other offsets. What stands at the end of a partition and is not in the copy yet may be on its
way: it is pending, and the verdict inconclusive, unless the copy is said to be finished.

In order: for each key, the values in the one topic must follow each other as in the other. Values are told apart by 128
bits of their BLAKE2, and by 64 where their order is compared.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.evaluating import Evaluator, Kind, canonical, shown
from holdfast.audit.foreign_tables import TopicTable, is_bytes
from holdfast.audit.heaps import Heap, Numbers, together
from holdfast.audit.matched import Question, audit_matched
from holdfast.audit.matching import Call, Expression, Field, Match, Pair, parse_condition, parse_expression
from holdfast.audit.model import Fate, Finding, Report
from holdfast.reader import Cluster, PartitionRange, TopicPartition, ranges_of

ORDER_COLUMNS = ("place", "offset", "content")
EXAMPLES_MAX = 5


def audit_topics(
    source: str,
    copy: str,
    settings: Mapping[str, str],
    *,
    key: str = "key",
    with_values: bool = False,
    in_order: bool = False,
    is_finished: bool = False,
    where: str | None = None,
    copy_settings: Mapping[str, str] | None = None,
) -> Report:
    """Whether `copy` holds what `source` does; `copy_settings` reach its cluster, where that is another one."""
    expression = parse_expression(key)
    pairs = [Pair(str(expression), (), expression, expression)]
    if with_values:
        content: Expression = Call("digest", (Field("value"),))
        pairs.append(Pair("value", (), content, content))
    conditions = () if where is None else parse_condition(where)
    theirs = dict(copy_settings or settings)
    with Cluster(settings) as cluster:
        ranges = ranges_of(cluster, source)
    table = TopicTable(copy, Match(tuple(pairs)), theirs, conditions)
    report = audit_matched(
        Question(
            subject=f"{source} and {copy}",
            mode="topics",
            settings=settings,
            scopes={TopicPartition(source, each.partition): (each.start, each.end) for each in ranges},
            begins="the log's start",
            ends="the log's end when the audit began",
            table=table,
            conditions=conditions,
            has_tail=not is_finished,
            is_all_wanted=True,
        )
    )
    if in_order:
        report = _with_order(report, settings, ranges, table, expression)
    return report


# ---------------------------------------------------------------------------- order


@dataclass
class _Disorder:
    keys: int = 0
    examples: tuple[str, ...] = ()
    first: tuple[int, int] | None = None
    """Place and offset in the source."""
    compared: int = 0


def _with_order(
    report: Report,
    settings: Mapping[str, str],
    ranges: list[PartitionRange],
    table: TopicTable,
    expression: Expression,
) -> Report:
    clock_s = time.monotonic()
    kind = Kind.BYTES if is_bytes(expression) else Kind.TEXT
    with tempfile.TemporaryDirectory(prefix="holdfast-audit-") as directory:
        mine, theirs = (Heap(ORDER_COLUMNS, f"{directory}/{name}") for name in ("source", "copy"))
        with Cluster(settings) as cluster:
            _fill(mine, cluster.read(ranges), expression, kind)
        _fill(theirs, table.batches(), expression, kind)
        found = _compare_order(mine, theirs)
    findings = report.findings
    if found.keys:
        place = None
        if found.first is not None:
            wanted = found.first[0]
            place = next((each.place for each in report.partitions if each.place.partition == wanted), None)
        finding = Finding(
            Fate.ALTERED,
            table.name,
            place,
            ((found.first[1], found.first[1]),) if found.first is not None else (),
            found.keys,
            found.examples,
            "keys whose records stand in another order",
        )
        findings = (*findings, finding)
    note = f"the order of {found.compared:,} keys was compared"
    return replace(
        report,
        findings=findings,
        notes=(*report.notes, note),
        took_ms=report.took_ms + int((time.monotonic() - clock_s) * 1000),
    )


def _fill(heap: Heap, batches: Iterator[pa.RecordBatch], expression: Expression, kind: Kind) -> None:
    evaluator = Evaluator([expression])
    for batch in batches:
        if not batch.num_rows:
            continue
        keys = canonical(kind, evaluator.evaluate(batch)[0])
        good = ~keys.bad
        content = np.array([_content(value) for value in batch.column("value").to_pylist()], np.int64)
        numbers = {
            "place": batch.column("partition").to_numpy()[good],
            "offset": batch.column("offset").to_numpy()[good],
            "content": content[good],
        }
        heap.add(keys.array.filter(pa.array(good)), numbers)


def _content(value: bytes | None) -> int:
    return (
        0
        if value is None
        else int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "big", signed=True)
    )


def _compare_order(mine: Heap, theirs: Heap) -> _Disorder:
    together(mine, theirs)
    found = _Disorder()
    for one, other in zip(mine.buckets(), theirs.buckets(), strict=True):
        _compare_bucket(one, other, found)
    return found


def _compare_bucket(one: pa.Table, other: pa.Table, found: _Disorder) -> None:
    """Keys that stand as often in both: their contents, in the order of the logs, one by one."""
    chunks = [*one.column("value").chunks, *other.column("value").chunks]
    if not chunks:
        return
    encoded = pc.dictionary_encode(pa.chunked_array(chunks).combine_chunks(), null_encoding="encode")
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    size = len(encoded.dictionary)
    sides = []
    for table, own in ((one, codes[: one.num_rows]), (other, codes[one.num_rows :])):
        place, offset, content = (
            np.asarray(table.column(name).to_numpy(), np.int64) for name in ORDER_COLUMNS
        )
        order = np.lexsort((offset, place, own))
        sides.append(
            (own[order], place[order], offset[order], content[order], np.bincount(own, minlength=size))
        )
    mine, theirs = sides
    same = (mine[4] == theirs[4]) & (mine[4] > 1)
    found.compared += int(same.sum())
    at, there = (np.flatnonzero(same[side[0]]) for side in (mine, theirs))
    wrong = at[mine[3][at] != theirs[3][there]]
    # The same contents in another order, not other contents: those are told as lost and extra.
    for code in np.unique(mine[0][wrong]).tolist():
        if not np.array_equal(_sorted(mine, code), _sorted(theirs, code)):
            continue
        found.keys += 1
        if len(found.examples) < EXAMPLES_MAX:
            found.examples += (shown(encoded.dictionary[code].as_py(), 1),)
        if found.first is None:
            first = wrong[mine[0][wrong] == code][0]
            found.first = int(mine[1][first]), int(mine[2][first])


def _sorted(side: tuple[Numbers, ...], code: int) -> Numbers:
    first, behind = np.searchsorted(side[0], [code, code + 1])
    return np.sort(side[3][first:behind])

"""Two topics that should hold the same: a mirror, a copy job, a migration.

Keys (or any other expression on the record, with the value where asked) are compared as multisets, so records may lie
in other partitions and at other offsets. What stands at the end of a partition and is not in the copy yet may be on its
way: it is pending, and the verdict inconclusive, unless the copy is said to be finished.

In order: for each key, the values in the one topic must follow each other as in the other. Values are told apart by 128
bits of their BLAKE2.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.evaluating import Evaluator, Kind, canonical, shown
from holdfast.audit.foreign_tables import TopicTable, is_bytes
from holdfast.audit.matched import Question, audit_matched
from holdfast.audit.matching import Call, Expression, Field, Match, Pair, parse_condition, parse_expression
from holdfast.audit.model import Fate, Finding, Report
from holdfast.pipeline.scratch import ScratchDatabase
from holdfast.reader import Cluster, PartitionRange, TopicPartition, ranges_of

EXAMPLES_MAX: Final = 5
VALUE: Final = Call("digest", (Field("value"),))
_LOGS: Final = pa.schema(
    {
        "value": pa.large_binary(),
        "content": pa.large_binary(),
        "side": pa.int8(),
        "place": pa.int32(),
        "log_offset": pa.int64(),
    }
)
_KEYS: Final = """
INSERT INTO keys
SELECT value, min_by(place, number) FILTER (is_wrong) AS place,
    min_by(log_offset, number) FILTER (is_wrong) AS log_offset
FROM (
    SELECT value, number, count(*) AS sides, min(content) <> max(content) AS is_wrong,
        min(place) FILTER (side = 0) AS place, min(log_offset) FILTER (side = 0) AS log_offset
    FROM (SELECT *, row_number() OVER (PARTITION BY value, side ORDER BY place, log_offset) AS number
        FROM logs WHERE {chosen})
    GROUP BY value, number
)
GROUP BY value HAVING count(*) > 1 AND min(sides) = 2
"""
"""Of keys that stand as often in both logs, more than once: the first place where their contents differ."""
_DISORDERED: Final = """
SELECT keys.value, place, log_offset FROM (SELECT * FROM keys WHERE {chosen}) AS keys ANTI JOIN (
    SELECT DISTINCT value
    FROM (SELECT value FROM logs WHERE {chosen} GROUP BY value, content HAVING sum(2 * side - 1) <> 0)
) AS altered ON keys.value IS NOT DISTINCT FROM altered.value
WHERE log_offset IS NOT NULL
"""
"""The same contents in another order, not other contents: those are told as lost and extra."""


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
        pairs.append(Pair("value", (), VALUE, VALUE))
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
            topic_ids={},
            table=table,
            conditions=conditions,
            has_tail=not is_finished,
        )
    )
    if in_order:
        report = _with_order(report, settings, ranges, table, expression)
    return report


# ---------------------------------------------------------------------------- order


def _with_order(
    report: Report,
    settings: Mapping[str, str],
    ranges: list[PartitionRange],
    table: TopicTable,
    expression: Expression,
) -> Report:
    clock_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-audit-") as directory,
        ScratchDatabase(directory) as database,
    ):
        database.create("logs", _LOGS)
        with Cluster(settings) as cluster:
            _fill(database, 0, cluster.read(ranges), expression)
        _fill(database, 1, table.batches(), expression)
        database.create("keys", pa.schema([_LOGS.field(name) for name in ("value", "place", "log_offset")]))
        parts = []
        for chosen in database.passes(["value"]):
            database.execute(_KEYS.format(chosen=chosen))
            parts.append(database.query(_DISORDERED.format(chosen=chosen)))
        compared = database.query("SELECT count(*) FROM keys").column(0)[0].as_py()
        found = pa.concat_tables(parts).sort_by([("place", "ascending"), ("log_offset", "ascending")])
    findings = report.findings
    if found.num_rows:
        first, *_ = examples = found.slice(0, EXAMPLES_MAX).to_pylist()
        finding = Finding(
            Fate.ALTERED,
            table.name,
            next((each.place for each in report.partitions if each.place.partition == first["place"]), None),
            ((first["log_offset"], first["log_offset"]),),
            found.num_rows,
            tuple(shown(each["value"], 1) for each in examples),
            "keys whose records stand in another order",
        )
        findings = (*findings, finding)
    return replace(
        report,
        findings=findings,
        notes=(*report.notes, f"the order of {compared:,} keys was compared"),
        took_ms=report.took_ms + int((time.monotonic() - clock_s) * 1000),
    )


def _fill(
    database: ScratchDatabase, side: int, batches: Iterator[pa.RecordBatch], expression: Expression
) -> None:
    evaluator = Evaluator([expression, VALUE])
    kind = Kind.BYTES if is_bytes(expression) else Kind.TEXT
    for batch in batches:
        if not batch.num_rows:
            continue
        key, content = evaluator.evaluate(batch)
        key = canonical(kind, key)
        rows = pa.table(
            [
                key.array,
                pc.fill_null(content.array, b""),
                np.full(batch.num_rows, side, np.int8),
                batch.column("partition").cast(pa.int32()),
                batch.column("offset"),
            ],
            schema=_LOGS,
        )
        database.add("logs", rows.filter(pa.array(~key.bad)))

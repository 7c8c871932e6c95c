"""Whether the spans of a table with versions (`mode: scd2`) follow from its other cells.

A version begins at its `order_by`, and ends where the next one of its key begins; a deletion ends at once. So the cells
of `valid_from`, `valid_to` and `is_current` follow from those of the key, of `order_by` and of `is_deleted`, and from
which rows there are. They are made again from the table alone, all of it, and are worth what those are worth
(`derived`): recomputed where all of those were, unaltered where the digests vouch for all of those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.coverage import LINEAGE
from holdfast.audit.model import ColumnCoverage, Fate, Finding
from holdfast.audit.sinks.base import ContentBatch, SinkReader
from holdfast.audit.stateful.rows import Flags, key_codes
from holdfast.audit.stateful.upserts import ranks
from holdfast.pipeline.definition.model import DeltaSink, PostgresSink
from holdfast.pipeline.definition.naming import IS_CURRENT, IS_DELETED, VALID_FROM, VALID_TO

SPANS: Final = (VALID_FROM, VALID_TO, IS_CURRENT)
UNREAD: Final = "the versions of the table could not be put in order"


def check(reader: SinkReader, sink: PostgresSink | DeltaSink) -> list[Finding] | None:
    """What is wrong with the spans; nothing at all where they could not be made again."""
    entries, order_by = reader.entries(), sink.order_by
    content = entries[-1].content if entries else None
    if content is None or order_by is None or order_by not in content.columns:
        return None
    kinds = {name: content.columns.get(name, "string") for name in (*sink.key, order_by)}
    kinds |= {VALID_FROM: kinds[order_by], VALID_TO: kinds[order_by], IS_CURRENT: "boolean"}
    if sink.delete_when is not None or IS_DELETED in content.columns:
        kinds[IS_DELETED] = "boolean"
    tables = [_table(batch, tuple(kinds)) for batch in reader.contents(kinds)]
    try:
        doing = "cells of one column are of different types"
        rows = pa.concat_tables([each for each in tables if each.num_rows], promote_options="permissive")
        doing = f"spans are no values of {order_by!r}"
        count = int(_wrong(rows, sink.key, order_by).sum()) if rows.num_rows else 0
    except pa.ArrowException as error:
        return [Finding(Fate.ALTERED, reader.name, count=1, detail=f"{doing} ({error})")]
    detail = f"{count:,} rows have another span than the versions of their key say"
    return [Finding(Fate.ALTERED, reader.name, count=count, detail=detail)] if count else []


def _table(batch: ContentBatch, names: Sequence[str]) -> pa.Table:
    constants = {name: pa.scalar(batch.constants.get(name), pa.string()) for name in names}
    size = len(batch.lineage["offset"])
    return pa.table(
        {
            name: batch.columns[name] if name in batch.columns else pa.repeat(constants[name], size)
            for name in names
        }
    )


def _wrong(rows: pa.Table, key: Sequence[str], order_by: str) -> Flags:
    order = rows.column(order_by)
    [codes] = key_codes((rows.num_rows, [rows.column(name) for name in key]))
    numbers = ranks(order)
    at = np.lexsort((numbers, codes))
    ends = np.full(len(at), -1, np.int64)
    has_next = np.diff(codes[at]) == 0
    ends[at[:-1][has_next]] = at[1:][has_next]
    deletes = np.zeros(len(at), np.bool_)
    if IS_DELETED in rows.column_names:
        deletes = _flags(pc.fill_null(rows.column(IS_DELETED).cast(pa.bool_()), False))
    counts = ~deletes & (ends < 0)
    ends = np.where(deletes, np.arange(len(at)), ends)
    until = order.take(pa.array(ends, mask=ends < 0))
    wrong = ~_equal(rows.column(VALID_TO), until) | ~_equal(rows.column(VALID_FROM), order)
    current = rows.column(IS_CURRENT).cast(pa.bool_())
    wrong |= _flags(current.is_null()) | (_flags(pc.fill_null(current, False)) != counts)
    return np.asarray(wrong | _flags(order.is_null()), np.bool_)


def _equal(held: pa.ChunkedArray, wanted: pa.ChunkedArray) -> Flags:
    same = pc.fill_null(pc.equal(held.cast(wanted.type), wanted), False)
    return _flags(pc.or_(same, pc.and_(held.is_null(), wanted.is_null())))


def _flags(column: pa.ChunkedArray) -> Flags:
    return np.asarray(column.to_numpy(), np.bool_)


def derived(
    covered: Iterable[ColumnCoverage], sink: PostgresSink | DeltaSink, *, is_checked: bool
) -> list[ColumnCoverage]:
    """The coverage, in which spans are worth what they follow from: all of it, or nothing."""
    found = list(covered)
    whole = (*sink.key, sink.order_by, IS_DELETED, LINEAGE)
    bases = [each for each in found if each.sink == sink.name and each.column in whole]
    why = "; ".join(dict.fromkeys(base.why for base in bases if base.why))
    for number, each in enumerate(found):
        if each.sink != sink.name or each.column not in SPANS:
            continue
        rows = each.recomputed + each.unaltered + each.trusted
        nothing = replace(each, recomputed=0, unaltered=0, trusted=0, why=why)
        if not is_checked:
            found[number] = replace(nothing, trusted=rows, why=UNREAD)
        elif not any(base.unaltered + base.trusted for base in bases):
            found[number] = replace(nothing, recomputed=rows, why="")
        elif not any(base.trusted for base in bases):
            found[number] = replace(nothing, unaltered=rows)
        else:
            found[number] = replace(nothing, trusted=rows)
    return found

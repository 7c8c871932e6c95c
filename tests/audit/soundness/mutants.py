"""Audits that are wrong on purpose: a comparison dropped, a type skipped, a ledger believed, a digest bound to nothing.

A sink is guarded more than once: what a comparison passes over, a digest may find, and a count. So a mutant that takes
one guard away often takes those beside it away too, and what is left must not be enough for the seeds to be content.
Beside each stands the damage that it is there for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import numpy as np
import pyarrow as pa
from tests.audit.soundness import damages, damages_tables, strokes
from tests.audit.soundness.strokes import KINDS, Stroke

from holdfast.audit import cells, content, ledgers, left, sink_judging, unaltered, versions
from holdfast.audit.model import Examined, Fate
from holdfast.audit.stateful import upserts, window_check
from holdfast.pipeline.row_digest import RowHasher

Mutant = Callable[[], contextlib.AbstractContextManager[Any]]


def _wrapped(where: Any, name: str, change: Callable[[Any], Any]) -> contextlib.AbstractContextManager[Any]:
    """A function whose answer is changed."""
    honest = getattr(where, name)
    return patch.object(where, name, lambda *given, **named: change(honest(*given, **named)))


def _together(*mutants: Mutant) -> Mutant:
    @contextmanager
    def all_of_them() -> Iterator[None]:
        with ExitStack() as stack:
            for mutant in mutants:
                stack.enter_context(mutant())
            yield

    return all_of_them


def contents_unread() -> contextlib.AbstractContextManager[Any]:
    return _wrapped(content, "compare", lambda found: replace(found, findings=()))


def letters_unread() -> contextlib.AbstractContextManager[Any]:
    """Dead letters in a table are counted, and what they hold is not looked at."""
    return patch.dict(content.LETTER, clear=True)


def digests_believed() -> contextlib.AbstractContextManager[Any]:
    """Of every sink all rows are what was written, whatever was found."""
    return _wrapped(
        unaltered,
        "check",
        lambda found: replace(found, findings=(), unaltered=found.rows, trusted=0),
    )


def _without_type(is_skipped: Callable[[pa.DataType], bool]) -> Mutant:
    def mutant() -> contextlib.AbstractContextManager[Any]:
        honest = cells.hash_values

        def hash_values(values: Any) -> Any:
            return np.ones(len(values), np.uint64) if is_skipped(values.type) else honest(values)

        return patch.object(cells, "hash_values", hash_values)

    return mutant


def chain_believed() -> contextlib.AbstractContextManager[Any]:
    return patch.object(unaltered, "broken_links", lambda entries, key: [])


def nobody_knows_how_far() -> contextlib.AbstractContextManager[Any]:
    """Neither home nor committed offsets are asked where a sink stood."""
    stack = ExitStack()
    stack.enter_context(patch.object(unaltered, "witnesses_of", lambda *given: {}))
    stack.enter_context(patch.object(ledgers, "reached", lambda home: {}))
    return stack


def _no_fate(fate: Fate) -> Mutant:
    def mutant() -> contextlib.AbstractContextManager[Any]:
        def without(found: Any) -> Any:
            return replace(found, findings=[each for each in found.findings if each.fate is not fate])

        return _wrapped(sink_judging, "judge", without)

    return mutant


def windows_unread() -> contextlib.AbstractContextManager[Any]:
    return patch.object(window_check, "differing_values", _counting)


def _counting(*given: Any) -> Iterator[tuple[int, str]]:
    """Every aggregate counts as compared, and none differs."""
    step, held, compared = given[0], given[5], given[6]
    compared |= dict.fromkeys(step.aggregates, len(held))
    return iter(())


def upserts_unread() -> contextlib.AbstractContextManager[Any]:
    return _wrapped(upserts.UpsertCheck, "examine", lambda found: replace(found, findings=()))


def spans_believed() -> contextlib.AbstractContextManager[Any]:
    """Of versions, where they end is as it should be."""
    return patch.object(versions, "check", lambda reader, sink: [])


def books_believed() -> contextlib.AbstractContextManager[Any]:
    """What the ledgers count is not counted again."""
    stack = ExitStack()
    for name in ("check_intake", "check_routes", "check_rows"):
        stack.enter_context(patch.object(sink_judging, name, lambda *given: Examined()))
    stack.enter_context(patch.object(left, "against", lambda *given: []))
    return stack


def digest_without_place() -> contextlib.AbstractContextManager[Any]:
    """A row's digest does not say which row it is of; written and read so."""
    honest = RowHasher._places

    def places(self: RowHasher, lineage: Mapping[str, pa.Array]) -> Any:
        topics, *numbers = honest(self, lineage)
        return [topics * 0, numbers[0] * 0, *(each * 0 for each in numbers[1:])]

    return patch.object(RowHasher, "_places", places)


def digest_without_columns() -> contextlib.AbstractContextManager[Any]:
    """A row's digest does not say which column a value is of; written and read so."""
    return patch.object(RowHasher, "_hash_name", lambda self, name: 7)


def digest_without_nested() -> contextlib.AbstractContextManager[Any]:
    """Lists, structs and maps are in no digest; written and read so."""
    honest = RowHasher._take

    def take(self: RowHasher, states: Any, array: pa.Array, name: int) -> None:
        if not pa.types.is_nested(array.type):
            honest(self, states, array, name)

    return patch.object(RowHasher, "_take", take)


class Wrong(NamedTuple):
    """An audit that is wrong, and one that lacks only the guards beside that."""

    mutant: Mutant
    passed_over: tuple[Stroke, ...]
    """The damage that it does not see, where there is such a cell or row."""
    beside: Mutant = contextlib.nullcontext
    kinds: tuple[str, ...] = KINDS
    """Of the sinks that it concerns."""


_books_and_digests: Final = _together(books_believed, digests_believed)
_ANY_CELL: Final = (damages.change_cell, damages_tables.change_table_cell)
MUTANTS: Final[Mapping[str, Wrong]] = {
    "contents are not compared": Wrong(contents_unread, (strokes.change_source,)),
    "dead letters in tables are not compared": Wrong(letters_unread, (strokes.change_source_of_letter,)),
    "nested values are not compared": Wrong(_without_type(pa.types.is_nested), (strokes.change_source,)),
    "texts are not compared": Wrong(_without_type(pa.types.is_string), (strokes.change_source,)),
    "numbers with a point are not compared": Wrong(
        _without_type(pa.types.is_floating), (strokes.change_source,)
    ),
    "times are not compared": Wrong(_without_type(pa.types.is_timestamp), (strokes.change_source,)),
    "digests are believed": Wrong(digests_believed, _ANY_CELL),
    "the chain of entries is not followed": Wrong(
        _together(chain_believed, books_believed),
        (damages.change_ledger, damages_tables.change_table_ledger),
        books_believed,
    ),
    "nobody knows how far a sink had come": Wrong(
        nobody_knows_how_far, (damages.older_copy, damages_tables.older_table)
    ),
    "what is lost is not missed": Wrong(
        _together(_no_fate(Fate.LOST), _books_and_digests),
        (damages.drop_row, damages.remove_file, damages_tables.delete_table_row),
        _books_and_digests,
    ),
    "what is there twice is not seen": Wrong(
        _together(_no_fate(Fate.DUPLICATED), _books_and_digests),
        (damages.double_row, damages.copy_file, damages_tables.double_table_row),
        _books_and_digests,
    ),
    "values of windows are not computed again": Wrong(
        _together(windows_unread, digests_believed),
        (strokes.change_source_of_window, *_ANY_CELL),
        digests_believed,
    ),
    "upserts are not compared": Wrong(
        _together(upserts_unread, digests_believed, contents_unread),
        (damages.drop_row, damages.replace_row, damages_tables.delete_table_row),
        _together(digests_believed, contents_unread),
        ("upsert", "merge"),
    ),
    "spans of versions are not made again": Wrong(
        spans_believed, (damages.change_span, damages_tables.change_table_span)
    ),
    "ledgers are believed": Wrong(
        _together(books_believed, chain_believed), (damages.change_entry_digest,), chain_believed
    ),
}
"""Of the audit alone."""
WRITTEN: Final[Mapping[str, Wrong]] = {
    "a digest is not bound to its row": Wrong(
        _together(digest_without_place, contents_unread),
        (damages.swap_cells, damages_tables.swap_table_cells, damages.replace_row),
    ),
    "a digest is not bound to its columns": Wrong(
        _together(digest_without_columns, contents_unread), (damages.swap_columns,)
    ),
    "nested values are in no digest": Wrong(_together(digest_without_nested, contents_unread), _ANY_CELL),
}
"""Of the pipeline too: worlds are made with them."""

"""Entries of a ledger that somebody changed: refused, or still good for whatever is done with an entry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.audit.sinks import files
from holdfast.audit.sinks.base import hole_findings, number_holes, read_entry
from holdfast.pipeline.ledger import Routes

if TYPE_CHECKING:
    from tests.audit.sinks.conftest import Shop

OTHERS: tuple[Any, ...] = (
    None,
    1,
    "x",
    [],
    {},
    -1,
    1.5,
    True,
    [1],
    {"a": 1},
    10**30,
    [1, 2, 3, 4, 5],
    {"orders": {}},
    [9, 3, 0],
)


def paths(document: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield above
    parts = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document if isinstance(document, list) else ())
    )
    for name, part in parts:
        yield from paths(part, (*above, name))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    copy = json.loads(json.dumps(document))
    if not path:
        return value
    inner = copy
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return copy


def test_an_entry_with_something_else_in_any_place_is_refused_or_usable(shop: Shop) -> None:
    entry = replace(
        shop.entry(0),
        routes=Routes(main=9, dead_letter={"parse": 1}, filtered={"trials": 2}),
        taps={"totals": {"taken": 9, "late": 0, "rows": 1}},
        lookups={"rates": "3"},
        digests={"main": "0123456789abcdef"},
    )
    document = entry.as_json()
    assert read_entry(json.dumps(document), "shop", "out") == entry
    refused = 0
    for path in paths(document):
        for other in OTHERS:
            try:
                found = read_entry(json.dumps(changed(document, path, other)), "shop", "out")
            except ValueError:
                refused += 1
                continue
            files.spans_of([found.range])
            assert found.rows + found.routes.total + found.intake.records >= 0
            number_holes("out", [found, replace(found, number=found.number + 2)], "the ledger")
            assert found.as_json()["sink"] == "out"
    assert refused > 300


@pytest.mark.parametrize("text", ["", "{", "nonsense", "\x00", "[]", "{}", "null", "1"])
def test_what_is_no_entry_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="it is no entry"):
        read_entry(text, "shop", "out")


def test_a_hole_is_named_by_the_offsets_between_its_neighbours(shop: Shop) -> None:
    first = shop.opening()
    entries = [shop.entry(number) for number in range(5)]
    [finding] = number_holes("out", [first, entries[0], entries[3], entries[4]], "the ledger")
    assert finding.ranges == ((10, 29),)
    assert finding.place == shop.place
    assert finding.detail == "entry 2 to 3 missing from the ledger"


def test_a_hole_at_the_beginning_is_told_without_offsets(shop: Shop) -> None:
    shop.opening()
    [finding] = number_holes("out", [shop.entry(0)], "the ledger")
    assert finding.ranges == ()
    assert "entry 0 missing" in finding.detail
    [unknown] = hole_findings("out", "all are missing", None, None)
    assert unknown.detail == "all are missing"

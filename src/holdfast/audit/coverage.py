"""The coverage table: every cell of the sinks, by whether it was recomputed, is unaltered, or is trusted.

The parts of an audit say of how many cells of a column they know something (`Examined.coverage`). What a sink holds
says how many there are. The rest is trusted: nobody can forget a column by not speaking of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from holdfast.audit.model import STEPS, ColumnCoverage

LINEAGE = "_hf"
"""The column of the coverage that stands for a row's lineage, in whatever form a sink keeps it."""
ANY = ""
"""In place of a column: every other one of the sink."""


def settled(
    columns: Mapping[str, Sequence[str]], rows: Mapping[str, int], claims: Iterable[ColumnCoverage]
) -> tuple[ColumnCoverage, ...]:
    """By sink its columns and the number of its rows in the scope, and what is known of them."""
    said: dict[tuple[str, str], list[ColumnCoverage]] = {}
    for each in claims:
        said.setdefault((each.sink, each.column), []).append(each)
    found = []
    for sink, names in columns.items():
        for name in names if rows[sink] else ():
            spoken = (*said.get((sink, name), ()), *said.get((sink, ANY), ()))
            found.append(_column(sink, name, rows[sink], spoken))
    for (sink, name), spoken_of in said.items():
        if sink == STEPS:
            recomputed, unaltered = (
                sum(each.recomputed for each in spoken_of),
                sum(each.unaltered for each in spoken_of),
            )
            why = "; ".join(dict.fromkeys(each.why for each in spoken_of if each.why))
            found.append(ColumnCoverage(sink, name, recomputed, unaltered, why=why))
    return tuple(found)


def _column(sink: str, name: str, rows: int, claims: Sequence[ColumnCoverage]) -> ColumnCoverage:
    recomputed = min(rows, sum(each.recomputed for each in claims))
    # Which rows a digest vouches for is not said: of those that are not recomputed, as few as may be.
    unaltered = max(0, min(rows, sum(each.unaltered for each in claims)) - recomputed)
    trusted = rows - recomputed - unaltered
    whys = dict.fromkeys(each.why for each in claims if each.why)
    why = "; ".join(whys) or "nothing makes it again"
    return ColumnCoverage(sink, name, recomputed, unaltered, trusted, why if recomputed < rows else "")

"""Rows of two sinks compared as multisets, without Spark and out of core.

Rows come as tables whose columns are all bytes, null where there is no value: two values are the same if their bytes
are. A `ScratchDatabase` counts them.

Rows that have no equal on the other side are paired by their key, where they have one: such a pair *differs*, and it is
told in which columns; what finds no partner is only on its side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from holdfast.pipeline.scratch import ScratchDatabase, beginning

EXAMPLES_MAX: Final = 5
ORDER: Final = "_order"
"""A column of numbers, where only the last row of each key counts: that with the greatest."""
GONE: Final = "_gone"
"""Beside it, whether that row takes its key back."""
SIDES: Final = ("a", "b")

Row = dict[str, str | None]


@dataclass
class Differences:
    """What two sinks do not share."""

    rows_a: int = 0
    rows_b: int = 0
    only_a: int = 0
    only_b: int = 0
    differing: int = 0
    """Pairs of rows with the same key and other values."""
    columns: Counter[str] = field(default_factory=Counter)
    """In how many of the pairs each column differs."""
    examples_a: list[Row] = field(default_factory=list)
    examples_b: list[Row] = field(default_factory=list)
    examples: list[tuple[Row, Row]] = field(default_factory=list)

    @property
    def are_none(self) -> bool:
        return not (self.only_a or self.only_b or self.differing)


class Multisets:
    """Takes the rows of side `a` and of side `b`, and compares them once."""

    def __init__(
        self,
        database: ScratchDatabase,
        columns: Sequence[str],
        *,
        key: Sequence[str] = (),
        is_folded: bool = False,
    ) -> None:
        """`columns` are compared, beside the key, which pairs rows: without one, none has a partner. `is_folded`: only
        the last row of each key counts, and rows have `ORDER` and `GONE`."""
        self._database = database
        self._names = {name: f"c{at}" for at, name in enumerate(dict.fromkeys([*key, *columns]))}
        """In the database, whose names do not tell small letters from capitals."""
        self._columns = tuple(columns)
        self._key = tuple(self._names[name] for name in key)
        self._is_folded = is_folded
        fields = [pa.field(name, pa.large_binary()) for name in self._names.values()]
        if is_folded:
            fields += [pa.field(ORDER, pa.int64()), pa.field(GONE, pa.bool_())]
        alone = [
            *(pa.field(name, pa.large_binary()) for name in self._names.values()),
            ("number", pa.int64()),
        ]
        for side in SIDES:
            database.create(side, pa.schema(fields))
            database.create(f"only_{side}", pa.schema(alone))

    def add(self, side: str, rows: pa.Table) -> None:
        """Rows with these columns at least."""
        further = [ORDER, GONE] if self._is_folded else []
        chosen = rows.select([*self._names, *further])
        self._database.add(side, chosen.rename_columns([*self._names.values(), *further]))

    def compare(self) -> Differences:
        self._count_surplus()
        rows_a, rows_b = (self._number(f"SELECT count(*) FROM {self._rows_of(side)}") for side in SIDES)
        found = Differences(rows_a, rows_b)
        same = [f"a.{name} IS NOT DISTINCT FROM b.{name}" for name in self._key]
        on = " AND ".join(["a.number = b.number", *same]) if self._key else "false"
        found.only_a, found.examples_a = self._alone(f"only_a AS a ANTI JOIN only_b AS b ON {on}")
        found.only_b, found.examples_b = self._alone(f"only_b AS b ANTI JOIN only_a AS a ON {on}")
        if self._key:
            self._pair_up(f"only_a AS a JOIN only_b AS b ON {on}", found)
        return found

    def _rows_of(self, side: str, chosen: str = "true") -> str:
        """The rows that count."""
        if not self._is_folded:
            return f"(SELECT * FROM {side} WHERE {chosen})"
        last = f"row_number() OVER (PARTITION BY {', '.join(self._key)} ORDER BY {ORDER} DESC) = 1"
        return f"(SELECT * FROM (SELECT * FROM {side} WHERE {chosen} QUALIFY {last}) WHERE NOT {GONE})"

    def _count_surplus(self) -> None:
        """Of each row, how many more the one side has than the other: as many rows, numbered within their key."""
        listed, key = ", ".join(self._names.values()), ", ".join(self._key) or "NULL"
        for chosen in self._database.passes(self._key or tuple(self._names.values())):
            a, b = (self._rows_of(side, chosen) for side in SIDES)
            self._database.execute(
                f"CREATE OR REPLACE TABLE odd AS SELECT {listed}, sum(side)::BIGINT AS surplus "
                f"FROM (SELECT {listed}, 1 AS side FROM {a} UNION ALL SELECT {listed}, -1 FROM {b}) "
                f"GROUP BY {listed} HAVING sum(side) <> 0"
            )
            for side, surplus in zip(SIDES, ("surplus", "-surplus"), strict=True):
                self._database.execute(
                    f"INSERT INTO only_{side} SELECT {listed}, row_number() OVER (PARTITION BY {key}) AS number "
                    f"FROM (SELECT {listed}, unnest(range({surplus})) FROM odd WHERE {surplus} > 0)"
                )

    def _alone(self, rows: str) -> tuple[int, list[Row]]:
        """Rows without a partner: how many, and some of them."""
        listed = ", ".join(self._names.values())
        examples = self._database.query(f"SELECT {listed} FROM {rows} LIMIT {EXAMPLES_MAX}").to_pylist()
        return self._number(f"SELECT count(*) FROM {rows}"), [self._shown(row) for row in examples]

    def _pair_up(self, pairs: str, found: Differences) -> None:
        """Rows of one key that have other values."""
        inner = [self._names[name] for name in self._columns]
        differs = [f"count(*) FILTER (a.{name} IS DISTINCT FROM b.{name})" for name in inner]
        counts = self._database.query(f"SELECT {', '.join(['count(*)', *differs])} FROM {pairs}")
        found.differing, *by_column = (column[0].as_py() for column in counts.columns)
        found.columns.update(
            {name: count for name, count in zip(self._columns, by_column, strict=True) if count}
        )
        both = [f"{side}.{name} AS {side}{name}" for side in SIDES for name in self._names.values()]
        examples = self._database.query(f"SELECT {', '.join(both)} FROM {pairs} LIMIT {EXAMPLES_MAX}")
        found.examples = [(self._shown(row, "a"), self._shown(row, "b")) for row in examples.to_pylist()]

    def _shown(self, row: Mapping[str, bytes | None], side: str = "") -> Row:
        values = {name: row[side + inner] for name, inner in self._names.items()}
        return {name: None if value is None else beginning(value) for name, value in values.items()}

    def _number(self, statement: str) -> int:
        return int(self._database.query(statement).column(0)[0].as_py())


# ---------------------------------------------------------------------------- values


def as_bytes(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Values in the one form in which they are compared."""
    values = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(values, pa.ChunkedArray):  # more than fits one array
        values = pa.concat_arrays(values.chunks)
    kind = values.type
    if pa.types.is_dictionary(kind):
        values = values.dictionary_decode()
        kind = values.type
    if pa.types.is_large_binary(kind):
        return values
    if pa.types.is_binary(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return values.cast(pa.large_binary())
    if pa.types.is_nested(kind):
        texts = [None if value is None else _json(value) for value in values.to_pylist()]
        return pa.array(texts, pa.large_binary())
    if pa.types.is_timestamp(kind):
        values = values.cast(pa.timestamp("us", kind.tz), safe=False)
    return values.cast(pa.large_string()).cast(pa.large_binary())


def _json(value: Any) -> bytes:
    import json

    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_other).encode()


def _other(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)

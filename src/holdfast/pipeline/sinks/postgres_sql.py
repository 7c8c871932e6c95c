"""The statements of the PostgreSQL sink, composed; nothing here talks to a server."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psycopg import sql

LEDGER = "holdfast_ledger"
LINEAGE_COLUMNS: Mapping[str, str] = {
    "_hf_topic": "text",
    "_hf_partition": "integer",
    "_hf_offset": "bigint",
    "_hf_index": "integer",
}
CONTENT = "_hf_content"
"""The digest of a row of an upsert (`holdfast.pipeline.row_digest`), where its table has this column."""
CONTENT_TYPE = "numeric(39,0)"
ATTEMPT = "_hf_attempt"
DELETE = "_hf_delete"
STAGE_PREFIX = "holdfast_stage"
INDEXED_BYTES = 2000
"""What an index takes of any columns together: a third of a page, less what it adds itself."""
RULES = (
    "SELECT relchecks > 0 OR relhastriggers OR relkind = 'p' OR EXISTS (SELECT FROM pg_index WHERE indrelid = c.oid "
    "AND (indisunique OR indisexclusion) AND NOT indisprimary) OR EXISTS (SELECT FROM pg_attribute WHERE attnotnull "
    "AND attrelid = c.oid AND attnum > 0 AND attname <> ALL(%(key)s)) FROM pg_class c WHERE oid = %(oid)s"
)
"""Whether a table has rules of its own beyond the primary key: checks, foreign keys, triggers, unique columns."""


def stage_prefix(pipeline: str, sink: str) -> str:
    return f"{STAGE_PREFIX}_{_short(f'{pipeline}/{sink}')}_"


def stage_name(pipeline: str, sink: str, label: str) -> str:
    """A name of one attempt at one batch, within the 63 bytes of an identifier."""
    return stage_prefix(pipeline, sink) + _short(label)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def names(columns: Sequence[str], prefix: str | None = None) -> sql.Composed:
    parts = [sql.Identifier(name) if prefix is None else sql.Identifier(prefix, name) for name in columns]
    return sql.SQL(", ").join(parts)


def typed(columns: Mapping[str, str]) -> sql.Composed:
    """`"name" type, …`; types come from PostgreSQL itself or from our own table of them."""
    return sql.SQL(", ").join(sql.Identifier(name) + sql.SQL(" " + kind) for name, kind in columns.items())


@dataclass(frozen=True)
class Target:
    """A table, the columns it is given and what makes a row one of its own."""

    schema: str
    table: str
    columns: Mapping[str, str]
    """Types by name, lineage included."""
    key: tuple[str, ...] = ()
    has_deletes: bool = False
    order_by: str | None = None
    """The column whose greatest value wins; without it, what is read last."""
    versions_of: tuple[str, ...] = ()
    """Of `scd2`: the key whose versions are kept; `key` is that with `order_by`."""

    @property
    def name(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.table)

    @property
    def keeps_digests(self) -> bool:
        return CONTENT in self.columns

    def create(self) -> sql.Composed:
        parts = typed(self.columns)
        if self.key:
            parts = sql.SQL("{}, PRIMARY KEY ({})").format(parts, names(self.key))
        return sql.SQL("CREATE TABLE {} ({})").format(self.name, parts)

    def add(self, columns: Sequence[str]) -> sql.Composed:
        added = sql.SQL(", ").join(
            sql.SQL("ADD COLUMN ") + typed({name: self.columns[name]}) for name in columns
        )
        return sql.SQL("ALTER TABLE {} {}").format(self.name, added)

    def stage(self, name: str) -> sql.Identifier:
        return sql.Identifier(self.schema, name)

    def create_stage(self, name: str) -> sql.Composed:
        """A row without its key could neither be stored nor deleted: the copy refuses it, and the row is named."""
        columns = {ATTEMPT: "bigint", **self.columns}
        columns |= {name: f"{columns[name]} NOT NULL" for name in self.key}
        if self.has_deletes:
            columns[DELETE] = "boolean"
        return sql.SQL("CREATE UNLOGGED TABLE {} ({})").format(self.stage(name), typed(columns))

    def copy(self, name: str) -> sql.Composed:
        columns = [ATTEMPT, *(name for name in self.columns if name != CONTENT)]
        columns += [DELETE] if self.has_deletes else []
        columns += [CONTENT] if self.keeps_digests else []  # tasks add it, behind what Spark gives them
        return sql.SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(self.stage(name), names(columns))

    def count(self, name: str) -> sql.Composed:
        return sql.SQL("SELECT {}, count(*) FROM {} GROUP BY 1").format(
            sql.Identifier(ATTEMPT), self.stage(name)
        )

    def number(self, name: str) -> sql.Composed:
        """Every row becomes an attempt of its own, below zero, in the order of places: `merge` takes any of them."""
        return sql.SQL(
            "UPDATE {stage} AS staged SET {attempt} = -each.number FROM (SELECT ctid, row_number() OVER "
            "(ORDER BY _hf_topic, _hf_partition, _hf_offset, _hf_index) AS number FROM {stage} "
            "WHERE {attempt} = ANY(%(attempts)s)) AS each WHERE staged.ctid = each.ctid "
            "RETURNING staged.{attempt}, staged._hf_topic, staged._hf_partition, staged._hf_offset"
        ).format(stage=self.stage(name), attempt=sql.Identifier(ATTEMPT))

    def may_refuse(self, name: str) -> sql.Composed:
        """Whether the table has rules of its own, or a staged row a key that may be too long for an index."""
        return sql.SQL(
            "SELECT coalesce(({}), false) OR EXISTS (SELECT FROM {} WHERE octet_length(concat({})) > {})"
        ).format(sql.SQL(RULES), self.stage(name), names([*self.key] or [ATTEMPT]), INDEXED_BYTES)

    def merge(self, name: str) -> sql.Composed:
        return self.upsert(name) if self.key else self.append(name)

    def append(self, name: str) -> sql.Composed:
        columns = list(self.columns)
        return sql.SQL("INSERT INTO {} ({}) SELECT {} FROM {} WHERE {} = ANY(%(attempts)s)").format(
            self.name, names(columns), names(columns), self.stage(name), sql.Identifier(ATTEMPT)
        )

    def upsert(self, name: str) -> sql.Composed:
        """The last row of each key, unless the table has a newer one: of the same partition, or by `order_by`."""
        columns = list(self.columns)
        by_order: sql.Composable = sql.SQL("_hf_topic DESC")
        if self.order_by is not None:
            by_order = sql.SQL('{} DESC NULLS LAST, _hf_topic COLLATE "C" DESC').format(
                sql.Identifier(self.order_by)
            )
        last = sql.SQL(
            "last AS MATERIALIZED (SELECT DISTINCT ON ({key}) * FROM {stage} WHERE {attempt} = ANY(%(attempts)s) "
            "ORDER BY {key}, {order}, _hf_partition DESC, _hf_offset DESC, _hf_index DESC)"
        ).format(key=names(self.key), stage=self.stage(name), attempt=sql.Identifier(ATTEMPT), order=by_order)
        same = sql.SQL(" AND ").join(
            sql.SQL("held.{0} = last.{0}").format(sql.Identifier(column)) for column in self.key
        )
        stays = sql.SQL("NOT last.{}").format(sql.Identifier(DELETE)) if self.has_deletes else sql.SQL("true")
        changes = sql.SQL(", ").join(
            sql.SQL("{0} = excluded.{0}").format(sql.Identifier(column))
            for column in columns
            if column not in self.key
        )
        put = sql.SQL(
            "INSERT INTO {} AS held ({}) SELECT {} FROM last WHERE {} ON CONFLICT ({}) DO UPDATE SET {} WHERE {}"
        ).format(
            self.name,
            names(columns),
            names(columns),
            stays,
            names(self.key),
            changes,
            self._not_older("excluded"),
        )
        gone = sql.SQL("DELETE FROM {} AS held USING last WHERE NOT ({}) AND {} AND {}").format(
            self.name, stays, same, self._not_older("last")
        )
        steps = [last, *([sql.SQL("gone AS ({})").format(gone)] if self.has_deletes else [])]
        if not self.keeps_digests:
            return sql.SQL("WITH {} {}").format(sql.SQL(", ").join(steps), put)
        return self._with_digests(last, put, gone if self.has_deletes else None, same)

    def spans(self, name: str | None = None) -> sql.Composed:
        """Where the versions of the staged keys end, or of all keys: at the next one, and a deletion at once."""
        assert self.order_by is not None
        order, key = sql.Identifier(self.order_by), names(self.versions_of)
        gone = sql.SQL("coalesce(is_deleted, false)" if "is_deleted" in self.columns else "false")
        touched: sql.Composable = sql.SQL("true")
        if name is not None:
            touched = sql.SQL("({}) IN (SELECT {} FROM {} WHERE {} = ANY(%(attempts)s))").format(
                key, key, self.stage(name), sql.Identifier(ATTEMPT)
            )
        same = sql.SQL(" AND ").join(
            sql.SQL("held.{0} = span.{0}").format(sql.Identifier(column)) for column in self.key
        )
        return sql.SQL(
            "UPDATE {table} AS held SET valid_to = span.until, is_current = span.counts FROM (SELECT {listed}, "
            "CASE WHEN {gone} THEN {order} ELSE lead({order}) OVER versions END AS until, "
            "NOT {gone} AND lead({order}) OVER versions IS NULL AS counts FROM {table} WHERE {touched} "
            "WINDOW versions AS (PARTITION BY {key} ORDER BY {order})) AS span WHERE {same} "
            "AND (held.valid_to, held.is_current) IS DISTINCT FROM (span.until, span.counts)"
        ).format(
            table=self.name, listed=names(self.key), gone=gone, order=order, touched=touched, key=key, same=same
        )  # fmt: skip

    def _with_digests(
        self, last: sql.Composed, put: sql.Composed, gone: sql.Composed | None, same: sql.Composed
    ) -> sql.Composed:
        """The same, telling the sum of the digests that came, and of those that went: rows replaced or deleted. All
        parts of a statement see the table as it was before it."""
        went = sql.SQL("SELECT held.{} FROM {} AS held, last WHERE {} AND {}").format(
            sql.Identifier(CONTENT), self.name, same, self._not_older("last")
        )
        back = sql.SQL("{} RETURNING held.{}")
        steps = [
            last,
            sql.SQL("went AS MATERIALIZED ({})").format(went),
            sql.SQL("came AS ({})").format(back.format(put, sql.Identifier(CONTENT))),
            *([sql.SQL("gone AS ({})").format(gone)] if gone is not None else []),
        ]
        return sql.SQL(
            "WITH {0} SELECT (SELECT coalesce(sum({1}), 0) FROM came), (SELECT coalesce(sum({1}), 0) FROM went)"
        ).format(sql.SQL(", ").join(steps), sql.Identifier(CONTENT))

    def _not_older(self, new: str) -> sql.Composable:
        """The row in the table is not from this place or a later one of the same partition; or, by `order_by`, it is
        less, or equal and from an earlier place. One whose place is forgotten is before everything."""
        if self.order_by is None:
            return sql.SQL(
                f"(held._hf_topic = {new}._hf_topic AND held._hf_partition = {new}._hf_partition "
                f"AND (held._hf_offset, held._hf_index) >= ({new}._hf_offset, {new}._hf_index)) IS NOT TRUE"
            )
        place = '({0}._hf_topic COLLATE "C", {0}._hf_partition, {0}._hf_offset, {0}._hf_index)'
        return sql.SQL(
            "(held._hf_offset >= 0 AND CASE WHEN held.{order} IS NOT DISTINCT FROM {new}.{order} "
            f"THEN {place.format('held')} >= {place.format(new)} "
            "WHEN held.{order} IS NULL THEN false WHEN {new}.{order} IS NULL THEN true "
            "ELSE held.{order} > {new}.{order} END) IS NOT TRUE"
        ).format(order=sql.Identifier(self.order_by), new=sql.SQL(new))


def forget_places(schema: str, table: str, *, has_digests: bool) -> sql.Composed:
    """Rows stand before every place from now on: whatever comes for their keys takes over. Their digests, which are
    over the places too, go."""
    digests = sql.SQL(", {} = NULL").format(sql.Identifier(CONTENT)) if has_digests else sql.SQL("")
    return sql.SQL("UPDATE {} SET _hf_offset = -1, _hf_index = -1{} WHERE _hf_offset >= 0").format(
        sql.Identifier(schema, table), digests
    )


def forget_digests(schema: str, table: str) -> sql.Composed:
    """Those of another key."""
    return sql.SQL("UPDATE {0} SET {1} = NULL WHERE {1} IS NOT NULL").format(
        sql.Identifier(schema, table), sql.Identifier(CONTENT)
    )


def create_ledger(schema: str) -> sql.Composed:
    return sql.SQL(
        "CREATE TABLE IF NOT EXISTS {} (pipeline text NOT NULL, sink text NOT NULL, number bigint NOT NULL, "
        "entry jsonb NOT NULL, columns jsonb, written timestamptz NOT NULL DEFAULT now(), "
        "PRIMARY KEY (pipeline, sink, number))"
    ).format(ledger(schema))


def ledger(schema: str) -> sql.Identifier:
    return sql.Identifier(schema, LEDGER)

"""The tables of a sink, version by version.

A version that was ever released is never changed: a change is a new version at the end. Each is applied in one
transaction with the note that it was, under a lock, so any number of migrations may run at a time and again.

`holdfast_positions` has one row per group, topic and partition: up to where its messages are in the database. Whoever
changes `position` names the one it expects and itself as `owner`; a row not found that way is not its to change.
"""

from __future__ import annotations

from typing import Final

MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    (
        """create table holdfast_positions (
            group_id text not null,
            topic text not null,
            partition integer not null,
            topic_id text not null,
            position bigint not null,
            owner text not null,
            primary key (group_id, topic, partition)
        )""",
    ),
)
"""Statements that both databases understand; version 1 comes first."""

NEWEST: Final = len(MIGRATIONS)

CREATE_VERSIONS: Final = (
    "create table if not exists holdfast_schema (version integer primary key, applied_at text not null)"
)
READ_VERSION: Final = "select coalesce(max(version), 0) from holdfast_schema"
NOTE_VERSION: Final = "insert into holdfast_schema (version, applied_at) values (:version, :applied_at)"

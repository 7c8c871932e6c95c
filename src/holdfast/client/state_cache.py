"""The state of one partition in a SQLite file: a cache of its changelog.

It holds the newest value of every key, and up to which offset of the changelog that is so: both are written together,
flushed (`synchronous=FULL`), after the changelog was. It may therefore be behind and is never ahead; to catch up, the
changelog is read on from the offset. A file that cannot be trusted is thrown away, and all of the changelog is read.

Its owner writes its name into it. Another that opens the file takes it over: the former can write nothing more to it.
"""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Final

from holdfast.client.errors import ClientError

VERSION: Final = 1
BUSY_SECONDS: Final = 10.0
TABLES: Final = (
    "create table state (key blob primary key, value blob not null) without rowid",
    "create table reflects (version integer, changelog text, position integer, saved_ms integer, owner text)",
)
FILES: Final = ("", "-wal", "-shm", "-journal")


class CacheTaken(ClientError):
    """Another process took this cache over: its partition is no longer ours."""


class StateCache:
    def __init__(self, path: str, changelog_id: str, *, age_ms_max: int) -> None:
        """A cache of the changelog with this id; one of another, or one too old to be caught up with, is dropped.

        Deletions vanish from a compacted changelog after a while: a cache that slept longer would never learn of them.
        """
        self._path = path
        self._changelog_id = changelog_id
        self._owner = uuid.uuid4().hex
        self.position = 0
        """The offset of the changelog from which on it is not in here."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._connection = self._opened(age_ms_max)

    def _opened(self, age_ms_max: int) -> sqlite3.Connection:
        if os.path.exists(self._path):
            try:
                connection = self._connect()
                if self._take_over(connection, age_ms_max):
                    return connection
                connection.close()
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError) and "no such table" not in str(error):
                    raise
            self._remove()
        return self._created()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = full")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _take_over(self, connection: sqlite3.Connection, age_ms_max: int) -> bool:
        row = connection.execute("select version, changelog, position, saved_ms from reflects").fetchone()
        if row is None or row[:2] != (VERSION, self._changelog_id) or _now_ms() - row[3] > age_ms_max:
            return False
        connection.execute("update reflects set owner = ?", (self._owner,))
        # Read again: the former owner may have written up to the moment it was replaced.
        self.position = connection.execute("select position from reflects").fetchone()[0]
        return True

    def _created(self) -> sqlite3.Connection:
        connection = self._connect()
        connection.execute("begin immediate")
        for statement in TABLES:
            connection.execute(statement)
        connection.execute(
            "insert into reflects values (?, ?, 0, ?, ?)",
            (VERSION, self._changelog_id, _now_ms(), self._owner),
        )
        connection.execute("commit")
        self.position = 0
        return connection

    def _remove(self) -> None:
        for suffix in FILES:
            if os.path.exists(self._path + suffix):
                os.remove(self._path + suffix)

    def throw_away(self) -> None:
        """Begin anew, with nothing."""
        self._connection.close()
        self._remove()
        self._connection = self._created()

    def get(self, key: bytes) -> bytes | None:
        row = self._connection.execute("select value from state where key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def all_keys(self) -> Iterator[bytes]:
        for (key,) in self._connection.execute("select key from state order by key"):
            yield key

    def apply(self, changes: Iterable[tuple[bytes, bytes | None]], position: int) -> None:
        """Take changes over, in order, with the offset up to which the changelog is in here now."""
        connection = self._connection
        connection.execute("begin immediate")
        try:
            moved = connection.execute(
                "update reflects set position = ?, saved_ms = ? where owner = ? and position = ?",
                (position, _now_ms(), self._owner, self.position),
            )
            if moved.rowcount != 1:
                raise CacheTaken(f"{self._path} has another owner")
            for key, value in changes:
                if value is None:
                    connection.execute("delete from state where key = ?", (key,))
                else:
                    connection.execute("insert or replace into state values (?, ?)", (key, value))
            connection.execute("commit")
        except BaseException:
            if connection.in_transaction:
                connection.execute("rollback")
            raise
        self.position = position

    def close(self) -> None:
        self._connection.close()


def _now_ms() -> int:
    return int(time.time() * 1000)

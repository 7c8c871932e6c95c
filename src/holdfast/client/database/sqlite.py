"""SQLite: the same promise without a server.

A transaction takes the write lock at its begin, so members in several processes take turns. `synchronous=FULL` flushes
each commit. An authorizer keeps handlers from ending their transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from holdfast.client.database.store import Database, DatabaseUnreachable, TransactionEnded, Trouble

BUSY_SECONDS: Final = 10.0
"""How long to wait for another member's transaction: far below the time after which the group gives us up."""
BUSY: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
PASSING: Final = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
)
"""The disk's, or the file's, and no statement's."""
PRIMARY: Final = 0xFF
"""The low byte of an extended error code is the code itself."""


class SqliteDatabase(Database):
    errors = (sqlite3.Error,)

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._has_denied = False

    def connect(self) -> None:
        self.close()
        try:
            # The sink runs on one thread, which need not be the one that made it.
            connection = sqlite3.connect(
                self.url, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = full")
        except sqlite3.Error as error:
            may_pass = self.judge(error) is Trouble.AGAIN
            raise DatabaseUnreachable(f"{self.name}: {error}", may_pass=may_pass) from error
        self.connection = connection

    @contextmanager
    def transaction(self) -> Iterator[None]:
        # The remarks keep these apart from a handler's statements, whose prepared form would not be judged again.
        self.connection.execute("begin immediate /* holdfast */")
        try:
            yield
            self.connection.execute("commit /* holdfast */")
        except BaseException:
            self.connection.set_authorizer(
                None
            )  # a signal's handler may have raised where `working` did not see it
            if self.connection.in_transaction:
                self.connection.execute("rollback /* holdfast */")
            raise

    @contextmanager
    def working(self) -> Iterator[None]:
        # Only as long as it is needed: what a signal's handler raises within it is lost, and the statement refused.
        self._has_denied = False
        self.connection.set_authorizer(self._authorise)
        try:
            yield
        finally:
            self.connection.set_authorizer(None)
        if not self.connection.in_transaction:
            raise TransactionEnded("the handler ended the transaction it was given: leave that to the sink")

    def _authorise(self, action: int, *_: str | None) -> int:
        if action == sqlite3.SQLITE_TRANSACTION:
            self._has_denied = True
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK

    def run(self, sql: str, parameters: dict[str, Any]) -> Any:
        return self.connection.execute(sql, parameters)

    def judge(self, error: BaseException) -> Trouble:
        code = getattr(error, "sqlite_errorcode", None)
        if code is None:
            return Trouble.FAILED
        if code & PRIMARY in BUSY:
            return Trouble.AGAIN
        if code & PRIMARY == sqlite3.SQLITE_AUTH and not self._has_denied:
            return Trouble.LATER
        return Trouble.LATER if code & PRIMARY in PASSING else Trouble.FAILED

    def is_missing_table(self, error: BaseException) -> bool:
        return isinstance(error, sqlite3.OperationalError) and "no such table" in str(error)

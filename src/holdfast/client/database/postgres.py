"""PostgreSQL, through psycopg 3.

Handlers get the psycopg connection, inside of a transaction that psycopg does not let them commit; that they did not do
so in SQL is looked at by the transaction's number before the positions advance.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from holdfast.client.database.store import (
    Database,
    DatabaseUnreachable,
    TransactionEnded,
    Trouble,
    with_percent,
)
from holdfast.errors import UsageError

try:
    import psycopg
    from psycopg.pq import TransactionStatus
except ImportError as missing:
    raise UsageError("a sink into PostgreSQL needs psycopg: pip install 'holdfast[postgres]'") from missing

CONNECT_SECONDS: Final = 5
LOCK_TIMEOUT_MS: Final = 10_000
"""How long a statement waits for another member's transaction: far below the time after which the group gives us up."""
PEER_TIMEOUT_MS: Final = 30_000
"""After this long without a sign of life from the server, the connection counts as lost."""
CONNECTION: Final = {
    "connect_timeout": CONNECT_SECONDS,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": PEER_TIMEOUT_MS,
}
TRANSIENT: Final = ("40", "55P03")
"""SQL states after which the same transaction may work: serialisation failures, deadlocks, a lock not to be had."""
TRANSACTION_NUMBER: Final = "select pg_current_xact_id()::text"


class PostgresDatabase(Database):
    errors = (psycopg.Error,)
    lock_clause = " for update"
    migration_lock = "select pg_advisory_xact_lock(5208921937)"

    def connect(self) -> None:
        self.close()
        given = psycopg.conninfo.conninfo_to_dict(self.url)
        settings: dict[str, Any] = {name: value for name, value in CONNECTION.items() if name not in given}
        try:
            self.connection = psycopg.connect(self.url, autocommit=True, **settings)
            for name, value in self._session_settings().items():
                self.connection.execute(f"set {name} = {value}")
        except psycopg.Error as error:
            self.close()
            raise DatabaseUnreachable(f"{self.name}: {str(error).strip()}") from error

    def _session_settings(self) -> dict[str, int]:
        return {
            "lock_timeout": LOCK_TIMEOUT_MS,
            # What lets go of a row whose owner sleeps, and of one whose owner's machine is gone without a word.
            "idle_in_transaction_session_timeout": self.idle_timeout_ms,
            "tcp_keepalives_idle": 10,
            "tcp_keepalives_interval": 5,
            "tcp_keepalives_count": 4,
        }

    def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self.connection.transaction():
            yield

    @contextmanager
    def working(self) -> Iterator[None]:
        before = self.connection.execute(TRANSACTION_NUMBER).fetchone()
        yield
        if self.connection.info.transaction_status == TransactionStatus.INTRANS:
            after = self.connection.execute(TRANSACTION_NUMBER).fetchone()
            if after == before:
                return
        elif self.connection.broken or self.connection.info.transaction_status == TransactionStatus.INERROR:
            # The handler caught an error of the database: asking for the number again raises it.
            self.connection.execute(TRANSACTION_NUMBER)
        raise TransactionEnded(
            "the handler ended the transaction it was given, so its results are not together with the positions: "
            "leave COMMIT and ROLLBACK to the sink (a savepoint is fine)"
        )

    def pipeline(self) -> AbstractContextManager[Any]:
        pipeline: AbstractContextManager[Any] = self.connection.pipeline()
        return pipeline

    def run(self, sql: str, parameters: dict[str, Any]) -> Any:
        return self.connection.execute(with_percent(sql), parameters)

    def judge(self, error: BaseException) -> Trouble:
        if self.connection is None or self.connection.broken:
            return Trouble.LOST
        state = getattr(error, "sqlstate", None) or ""
        return Trouble.AGAIN if state.startswith(TRANSIENT) else Trouble.FAILED

    def is_missing_table(self, error: BaseException) -> bool:
        return isinstance(error, psycopg.errors.UndefinedTable)

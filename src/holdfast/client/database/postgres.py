"""PostgreSQL, through psycopg 3.

In a pipeline a handler's statements do not wait for the answer to each, where that does not show: cursors wait when
they are asked for rows, for `rowcount` or for anything else of an answer. What does show is that a refusal comes late,
perhaps while another message is handled. Then the transaction is done again without the pipeline, by the sink, and the
refusal comes where it belongs. It is not the default because `idle_in_transaction_session_timeout` does not count
while a pipeline is open, and ending it after each statement costs more than it gains.

Handlers get the psycopg connection, inside of a transaction that psycopg does not let them commit; that they did not do
so in SQL is looked at by the transaction's number before the committed offsets advance.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from holdfast.client.database.store import (
    Database,
    DatabaseUnreachable,
    TransactionEnded,
    Trouble,
    with_percent,
)
from holdfast.errors import NotInstalled

try:
    import psycopg
    from psycopg.pq import PipelineStatus, TransactionStatus
except ImportError as missing:
    raise NotInstalled("a sink into PostgreSQL needs psycopg: pip install 'holdfast[postgres]'") from missing

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
PASSING: Final = ("08", "53", "57", "58", "25006", "XX001", "XX002")
"""SQL states that say nothing about the statement: connections, resources that ran out (a full disk), an operator's
doing and time-outs, errors of the system below, a server that only reads (a standby, after a failover), damage."""
HOPELESS: Final = ("authentication failed", "does not exist", "no pg_hba.conf entry", "no password supplied")
"""What a refused connection says where waiting does not help. libpq tells nothing else, no SQL state."""
TRANSACTION_NUMBER: Final = "select pg_current_xact_id()::text"


class WaitingCursor(psycopg.Cursor[Any]):
    """In a pipeline psycopg waits for an answer when rows are fetched; this one does for everything in it."""

    def _wait(self) -> None:
        if self.connection.pgconn.pipeline_status != PipelineStatus.OFF:
            # A pipeline within a pipeline begins by waiting for what is under way.
            with self.connection.pipeline():
                pass

    @property
    def rowcount(self) -> int:
        self._wait()
        return super().rowcount

    @property
    def description(self) -> list[psycopg.Column] | None:
        self._wait()
        return super().description

    @property
    def statusmessage(self) -> str | None:
        self._wait()
        return super().statusmessage


class PostgresDatabase(Database):
    errors = (psycopg.Error,)
    lock_clause = " for update"
    migration_lock = "select pg_advisory_xact_lock(5208921937)"

    def connect(self) -> None:
        self.close()
        given = psycopg.conninfo.conninfo_to_dict(self.url)
        settings: dict[str, Any] = {name: value for name, value in CONNECTION.items() if name not in given}
        try:
            self.connection = psycopg.connect(
                self.url, autocommit=True, cursor_factory=WaitingCursor, **settings
            )
            for name, value in self._session_settings().items():
                self.connection.execute(f"set {name} = {value}")
        except psycopg.Error as error:
            self.close()
            may_pass = not any(text in str(error) for text in HOPELESS)
            raise DatabaseUnreachable(f"{self.name}: {str(error).strip()}", may_pass=may_pass) from error

    def _session_settings(self) -> dict[str, int]:
        return {
            "lock_timeout": LOCK_TIMEOUT_MS,
            # What lets go of a row whose owner sleeps, and of one whose owner's machine is gone without a word.
            "idle_in_transaction_session_timeout": self.idle_timeout_ms,
            "tcp_keepalives_idle": 10,
            "tcp_keepalives_interval": 5,
            "tcp_keepalives_count": 4,
        }

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
            "the handler ended the transaction it was given, so its results are not together with the committed "
            "offsets: leave COMMIT and ROLLBACK to the sink (a savepoint is fine)"
        )

    def pipeline(self) -> AbstractContextManager[Any]:
        pipeline: AbstractContextManager[Any] = self.connection.pipeline()
        return pipeline if psycopg.Pipeline.is_supported() else nullcontext()

    def run(self, sql: str, parameters: dict[str, Any]) -> Any:
        return self.connection.execute(with_percent(sql), parameters)

    def judge(self, error: BaseException) -> Trouble:
        if self.connection is None or self.connection.broken:
            return Trouble.LOST
        state = getattr(error, "sqlstate", None) or ""
        if state.startswith(TRANSIENT):
            return Trouble.AGAIN
        return Trouble.LATER if state.startswith(PASSING) else Trouble.FAILED

    def is_missing_table(self, error: BaseException) -> bool:
        return isinstance(error, psycopg.errors.UndefinedTable)

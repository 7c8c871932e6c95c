"""What a sink asks of a database, and the statements that keep its promise.

One transaction of a sink: look that each partition's row still says what we believe and lock it, let the handler work,
advance each row by compare-and-set, commit. The compare-and-set is the guarantee: whoever finds no row to advance rolls
everything back. The look before only saves the handler of a member that was replaced from working in vain.

The look comes first and the advance last on purpose: should a handler end the transaction by itself, in spite of all
that forbids it, its messages are handled again and not lost, and the sink stops and says so.

The tables of a sink are made version by version. A version that was ever released is never changed: a change is a new
version at the end. Each is applied in one transaction with the note that it was, under a lock, so any number of
migrations may run at a time and again.

`holdfast_positions` has one row per group, topic and partition: up to where its messages are in the database. Whoever
changes `position` names the one it expects and itself as `owner`; a row not found that way is not its to change.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from holdfast.client.errors import ClientError
from holdfast.client.messages import DeadLetter, Retry, described
from holdfast.client.process import say
from holdfast.client.spool.format import PartitionKey
from holdfast.errors import UsageError

PARTITION: Final = "group_id = :group_id and topic = :topic and partition = :partition"
EXPECTED: Final = f"{PARTITION} and topic_id = :topic_id and position = :old and owner = :owner"
READ: Final = f"select topic_id, position, owner from holdfast_positions where {PARTITION}"
BEGIN: Final = (
    "insert into holdfast_positions (group_id, topic, partition, topic_id, position, owner) "
    "values (:group_id, :topic, :partition, :topic_id, :position, :owner) on conflict do nothing"
)
OWN: Final = f"update holdfast_positions set owner = :owner where {PARTITION}"
LOOK: Final = f"select 1 from holdfast_positions where {EXPECTED}"
ADVANCE: Final = f"update holdfast_positions set position = :new where {EXPECTED}"
BEGIN_ANEW: Final = (
    f"update holdfast_positions set topic_id = :topic_id, position = :position where {PARTITION} "
    "and topic_id = :old_id and owner = :owner"
)
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
IDLE_TIMEOUT_MS: Final = 30_000
_PARAMETER = re.compile(r":(\w+)")


class SchemaMissing(ClientError, UsageError):
    """The tables of a sink are not in this database, or are of another version."""


class DatabaseUnreachable(ClientError):
    """The database could not be connected to."""

    def __init__(self, reason: str, *, may_pass: bool = True) -> None:
        super().__init__(reason)
        self.may_pass = may_pass
        """False: it does not get better by waiting, such as a password that is wrong."""


class RefusedAtCommit(ClientError):
    """Every statement was taken and the commit was not, as with a constraint that is looked at then; the reason is its
    cause."""


class TransactionEnded(ClientError, UsageError):
    """A handler committed or rolled back the transaction it was given."""


class Trouble(Enum):
    """What an error of the database means for the transaction it happened in."""

    LOST = "the connection is gone, and whether the transaction was committed is not known"
    AGAIN = "another transaction was in the way: the same may work in a moment"
    LATER = (
        "the database cannot do it now, whatever the statement: it is full, read-only, or was told to stop"
    )
    FAILED = "it will not work"


class Stored(NamedTuple):
    """What the database says about a partition."""

    topic_id: str
    position: int
    owner: str


class Start(NamedTuple):
    """Where a partition begins that the database does not know yet, or knows from another topic of the same name."""

    topic: str
    partition: int
    topic_id: str
    position: int


class HandlerFailure(Exception):
    """A handler failed, on the message with this index where that is known."""

    def __init__(self, index: int | None, error: Exception) -> None:
        super().__init__(described(error))
        self.index = index
        self.error = error


@dataclass
class Share:
    """A partition that the group gave us."""

    topic_id: str = ""
    position: int = -1
    """What the database says; the next transaction expects it."""
    next_offset: int = -1
    is_claimed: bool = False
    claim_at: float = 0.0
    """Not before this time."""


class Advance(NamedTuple):
    """One partition's step in a transaction."""

    topic: str
    partition: int
    topic_id: str
    old: int
    new: int

    @property
    def key(self) -> PartitionKey:
        return (self.topic, self.partition)


class Superseded(ClientError):
    """Somebody else moved these partitions on, or owns them: the transaction was rolled back."""

    def __init__(self, keys: Sequence[PartitionKey]) -> None:
        names = ", ".join(f"{topic}-{partition}" for topic, partition in keys)
        super().__init__(f"another member has moved {names}: what was done here was rolled back")
        self.keys = list(keys)


class Database(ABC):
    """A connection to a database that holds committed offsets; `connection` is what handlers get."""

    errors: tuple[type[Exception], ...] = ()
    """What its driver raises."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.connection: Any = None
        self.idle_timeout_ms = IDLE_TIMEOUT_MS
        """After this long without a statement an open transaction is taken back, where the database can do that.

        A member that was stopped in the middle of its work would hold its successor for as long as it sleeps.
        """

    @property
    def name(self) -> str:
        """Its address without a password."""
        return without_password(self.url)

    # What the two databases do differently

    @abstractmethod
    def connect(self) -> None:
        """Open a new connection; raises `DatabaseUnreachable`."""

    def close(self) -> None:
        """Close the connection, whatever its state."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()

    @abstractmethod
    def transaction(self) -> AbstractContextManager[None]:
        """A transaction that is committed at the end of the block, and rolled back by an exception."""

    @abstractmethod
    def working(self) -> AbstractContextManager[None]:
        """Around a handler: makes sure that it does not end the transaction."""

    def pipeline(self) -> AbstractContextManager[Any]:
        """Around a handler: its statements need not wait for the answer to each, where the database can do that."""
        return nullcontext()

    @abstractmethod
    def run(self, sql: str, parameters: dict[str, Any]) -> Any:
        """Run one statement with `:name` for parameters; returns a cursor."""

    @abstractmethod
    def judge(self, error: BaseException) -> Trouble:
        """What an error of its driver means."""

    @abstractmethod
    def is_missing_table(self, error: BaseException) -> bool:
        """Whether an error says that a table does not exist."""

    def trouble(self, error: BaseException) -> Trouble:
        """What an error tells of the database; one that a handler made of the database's error tells the same, unless
        it says what is to become of the message."""
        told = self.judge(error)
        following: BaseException | None = error
        while (
            told is Trouble.FAILED and following is not None and not isinstance(following, Retry | DeadLetter)
        ):
            if isinstance(following, self.errors):
                told = self.judge(following)
            following = following.__cause__ or following.__context__
        return told

    lock_clause = ""
    """Added to a select to lock what it finds."""
    migration_lock: str | None = None
    """A statement that lets one migration at a time go on, until its transaction ends."""

    # Committed offsets

    def positions(self, group: str, keys: Iterable[PartitionKey]) -> dict[PartitionKey, Stored]:
        """What is stored for these partitions; nothing for those the database does not know."""
        found: dict[PartitionKey, Stored] = {}
        for topic, partition in keys:
            row = self.run(READ, {"group_id": group, "topic": topic, "partition": partition}).fetchone()
            if row is not None:
                found[topic, partition] = Stored(*row)
        return found

    def claim(
        self, group: str, owner: str, keys: Sequence[PartitionKey], starts: Iterable[Start]
    ) -> dict[PartitionKey, Stored]:
        """Become the owner of partitions, which ends the say of whoever was; returns where they stand."""
        with self.transaction():
            for start in starts:
                self.run(BEGIN, {"group_id": group, "owner": owner, **start._asdict()})
            # In one order everywhere, so that two members that claim do not wait for each other in a circle.
            for topic, partition in sorted(keys):
                self.run(OWN, {"group_id": group, "owner": owner, "topic": topic, "partition": partition})
            return self.positions(group, keys)

    def begin_anew(self, group: str, owner: str, start: Start, old_id: str) -> None:
        """Let a partition of ours stand in another topic of the same name; raises `Superseded` when it is not ours."""
        values = {"group_id": group, "owner": owner, "old_id": old_id, **start._asdict()}
        with self.transaction():
            if self.run(BEGIN_ANEW, values).rowcount != 1:
                raise Superseded([(start.topic, start.partition)])

    def store(self, group: str, owner: str, advances: Iterable[Advance], work: Callable[[Any], None]) -> None:
        """Do the work and advance the committed offsets, both or neither; raises `Superseded` where they are not
        ours."""
        steps = [(each, {"group_id": group, "owner": owner, **each._asdict()}) for each in sorted(advances)]
        is_complete = False
        try:
            with self.transaction():
                self._step_by_step(steps, work)
                is_complete = True
        except self.errors as error:
            if is_complete and self.judge(error) is Trouble.FAILED:
                raise RefusedAtCommit(str(error)) from error
            raise

    def _step_by_step(
        self, steps: Sequence[tuple[Advance, dict[str, Any]]], work: Callable[[Any], None]
    ) -> None:
        stale = [each.key for each, values in steps if not self._holds(values)]
        if stale:
            raise Superseded(stale)
        with self.working():
            work(self.connection)
        stale = [each.key for each, values in steps if self.run(ADVANCE, values).rowcount != 1]
        if stale:
            raise Superseded(stale)

    def _holds(self, values: dict[str, Any]) -> bool:
        return self.run(LOOK + self.lock_clause, values).fetchone() is not None

    # The schema

    def version(self) -> int:
        """The version of the schema; 0 when there is none."""
        try:
            return int(self.run(READ_VERSION, {}).fetchone()[0])
        except self.errors as error:
            if not self.is_missing_table(error):
                raise
            return 0

    def check_schema(self) -> None:
        version = self.version()
        if version != NEWEST:
            found = "are missing" if version == 0 else f"have version {version}, not {NEWEST}"
            way_out = (
                "a newer holdfast made them: use that"
                if version > NEWEST
                else f"run `holdfast sink migrate --database {self.name}`"
            )
            raise SchemaMissing(f"the sink's tables in {self.name} {found}: {way_out}")

    def migrate(self) -> list[int]:
        """Bring the schema to the newest version; returns the versions that were applied now."""
        applied: list[int] = []
        with self.transaction():
            if self.migration_lock is not None:
                self.run(self.migration_lock, {})
            self.run(CREATE_VERSIONS, {})
            version = int(self.run(READ_VERSION, {}).fetchone()[0])
            if version > NEWEST:
                raise SchemaMissing(
                    f"the sink's tables in {self.name} have version {version}, made by a newer holdfast; "
                    f"this one knows {NEWEST}"
                )
            for number, statements in enumerate(MIGRATIONS[version:], version + 1):
                for statement in statements:
                    self.run(statement, {})
                self.run(
                    NOTE_VERSION,
                    {"version": number, "applied_at": datetime.now(UTC).isoformat(timespec="seconds")},
                )
                applied.append(number)
        return applied


def with_percent(sql: str) -> str:
    """`:name` as `%(name)s`."""
    return _PARAMETER.sub(r"%(\1)s", sql)


def without_password(url: str) -> str:
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return url.replace(f":{parts.password}@", ":***@", 1)


def open_database(url: str) -> Database:
    """The database of a URL: `postgresql://…`, `sqlite:///path` or a path of a SQLite file."""
    scheme, found, rest = url.partition("://")
    if scheme in ("postgresql", "postgres") and found:
        from holdfast.client.database.postgres import PostgresDatabase

        return PostgresDatabase(url)
    if scheme == "sqlite" and found:
        if not rest.startswith("/") or rest == "/":
            raise UsageError(f"{url}: write sqlite:///relative/path, or sqlite:////absolute/path")
        url = rest[1:]
    elif found:
        raise UsageError(f"{without_password(url)}: a sink writes to postgresql://… or sqlite:///path")
    from holdfast.client.database.sqlite import SqliteDatabase

    return SqliteDatabase(url)


BACK_OFF_SECONDS: Final = (0.1, 10.0)
"""The first and the longest pause between attempts to connect."""


class Reconnecting:
    """A connection to the database that is opened again when it is lost, and when nothing can be stored over it now.

    The pause before the next attempt grows until something was stored, and everything may pass: the next connection may
    reach another server. Only at the very first one it shows whether the address, the password and the tables are
    right: what waiting cannot mend is raised then, and a database that is away or starting is waited for.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.is_up = False
        self._is_checked = False
        """Whether we were connected once and found our tables."""
        self._connect_at = 0.0
        self._back_off = BACK_OFF_SECONDS[0]

    def connect(self) -> None:
        """Try it, if it is time."""
        if time.monotonic() < self._connect_at:
            return
        try:
            self._database.connect()
            if not self._is_checked:
                self._database.check_schema()
        except DatabaseUnreachable as error:
            if not self._is_checked and not error.may_pass:
                raise
            self._later(str(error))
        except self._database.errors as error:
            if self._database.judge(error) is Trouble.FAILED:
                raise
            self._later(f"{self._database.name}: {str(error).strip()}")
        else:
            self.is_up = self._is_checked = True

    def lost(self, problem: str) -> None:
        self.is_up = False
        self._later(f"{self._database.name}: {problem}")

    def stored(self) -> None:
        self._back_off = BACK_OFF_SECONDS[0]

    def _later(self, problem: str) -> None:
        say(f"{problem}; trying again in {self._back_off:.1f} s")
        self._connect_at = time.monotonic() + self._back_off
        self._back_off = min(self._back_off * 2, BACK_OFF_SECONDS[1])

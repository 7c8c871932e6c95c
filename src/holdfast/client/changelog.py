"""The state of one partition in a SQLite file: a cache of its changelog.

It holds the newest value of every key, and up to which offset of the changelog that is so: both are written together,
flushed (`synchronous=FULL`), after the changelog was. It may therefore be behind and is never ahead; to catch up, the
changelog is read on from the offset. A file that cannot be trusted is thrown away, and all of the changelog is read.

Its owner writes its name into it. Another that opens the file takes it over: the former can write nothing more to it.
A file that is thrown away, or that a frozen former owner keeps locked, is followed by one with the next number, and
then its name is removed. No name is used twice, so whatever a former owner does when it wakes up touches its own file
alone.

The changelog of a state: a compacted topic, partition by partition beside the topic whose messages change the state.

Restoring reads it up to its end: the end of all that was written, by transactions that have not ended too. Only what is
committed is read, so a transaction that a dead member left open is waited for; its time-out is short. Then the state is
the one that belongs to the group's positions.

Beside each position stands which changelog belongs to it and how far that had been written (`Extent`). A changelog that
was recreated, cut off at its end or emptied at its beginning since then has lost state: that is an error, and never an
empty state.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from holdfast.client.errors import ClientError
from holdfast.client.process import say
from holdfast.client.settings import Settings, admin_settings
from holdfast.client.spool.format import PartitionKey
from holdfast.client.topic_ids import TopicIds, is_gone
from holdfast.errors import UsageError

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
        self._first_path = path
        self._path, self._number = self._newest()
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
                if _is_locked(error):
                    say(
                        f"{self._path} is locked by a process that does not go on: its state is restored anew"
                    )
                elif isinstance(error, sqlite3.OperationalError) and "no such table" not in str(error):
                    raise
            return self._begun_anew()
        return self._created()

    def _newest(self) -> tuple[str, int]:
        """The cache's file with the highest number, without a number for the first, and that number."""
        directory, name = os.path.split(self._first_path)
        names = os.listdir(directory) if os.path.isdir(directory) else []
        numbers = (re.fullmatch(rf"{re.escape(name)}\.([0-9]+)", each) for each in names)
        number = max((int(found[1]) for found in numbers if found), default=0)
        return (f"{self._first_path}.{number}" if number else self._first_path), number

    def _begun_anew(self) -> sqlite3.Connection:
        former = self._path
        self._number += 1
        self._path = f"{self._first_path}.{self._number}"
        connection = self._created()
        for suffix in FILES:
            if os.path.exists(former + suffix):
                os.remove(former + suffix)
        return connection

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

    def throw_away(self) -> None:
        """Begin anew, with nothing."""
        self._connection.close()
        self._connection = self._begun_anew()

    def get(self, key: bytes) -> bytes | None:
        row = self._connection.execute("select value from state where key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def all_keys(self) -> Iterator[bytes]:
        for (key,) in self._connection.execute("select key from state order by key"):
            yield key

    def apply(self, changes: Iterable[tuple[bytes, bytes | None]], position: int) -> None:
        """Take changes over, in order, with the offset up to which the changelog is in here now."""
        connection = self._connection
        try:
            connection.execute("begin immediate")
        except sqlite3.OperationalError as error:
            if not _is_locked(error):
                raise
            raise CacheTaken(f"{self._path} is locked by another process") from error
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


def _is_locked(error: sqlite3.DatabaseError) -> bool:
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) == sqlite3.SQLITE_BUSY


def _now_ms() -> int:
    return int(time.time() * 1000)


ANSWER_SECONDS: Final = 15.0
UNHEARD_SECONDS: Final = 0.05
STEP_MESSAGES: Final = 5000
"""How much is read before others have their turn, and how much a transaction of the cache holds at most."""
FIRST: Final = OffsetSpec._earliest
LATEST: Final = OffsetSpec._latest
_EXTENT = re.compile("(.+)@([0-9]+)-([0-9]+)")
DELETIONS_KEPT_MS: Final = 7 * 86_400_000
"""How long a deletion stays in a changelog of ours: a cache may sleep half as long and still catch up."""


class StateLost(ClientError):
    """A changelog does not hold any more what belongs to the group's positions."""


class Extent(NamedTuple):
    """What a partition of a changelog holds, or held once."""

    topic_id: str
    first: int
    end: int

    def encode(self) -> str:
        return f"{self.topic_id}@{self.first}-{self.end}"

    @classmethod
    def decode(cls, text: str) -> Extent | None:
        found = _EXTENT.fullmatch(text)
        return None if found is None else cls(found[1], int(found[2]), int(found[3]))

    def lost_since(self, before: Extent) -> str | None:
        """Why state is missing that was there before; none when nothing is."""
        if self.topic_id != before.topic_id:
            return f"was deleted and recreated (its id was {before.topic_id} and is {self.topic_id})"
        if self.end < before.end:
            return f"was cut off: it had been written up to {before.end} and ends at {self.end}"
        if self.first > before.first:
            return f"was emptied at its beginning: it began at {before.first} and begins at {self.first}"
        return None


class Changelogs:
    """What is asked of the cluster about changelogs."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._admin = AdminClient(admin_settings(settings))
        self._ids = TopicIds(settings)

    def ensure(self, changelog: str, source: str) -> None:
        """The changelog exists, is compacted, and has a partition beside each of the source."""
        wanted = self._partitions(source)
        if wanted == 0:
            raise UsageError(f"there is no topic {source}")
        found = self._partitions(changelog)
        if found == 0:
            # One that is missing and has held state is noticed: its id is beside the group's positions.
            config = {"cleanup.policy": "compact", "delete.retention.ms": str(DELETIONS_KEPT_MS)}
            self._done(self._admin.create_topics([NewTopic(changelog, wanted, config=config)])[changelog])
        elif found < wanted:
            say(
                f"topic '{source}' has {wanted} partitions and its changelog {found}: the changelog gets as many. Keys "
                "whose messages go to other partitions from now on begin there without state; their old state stays "
                f"in '{changelog}', in the partitions it was in"
            )
            self._done(self._admin.create_partitions([NewPartitions(changelog, wanted)])[changelog])
        if self.setting(changelog, "cleanup.policy") != "compact":
            raise UsageError(
                f"topic {changelog} is to hold state and is not compacted alone: its cleanup.policy is "
                f"{self.setting(changelog, 'cleanup.policy')}, which drops state that is old"
            )

    @staticmethod
    def _done(future: Any) -> None:
        try:
            future.result()
        except KafkaException as refused:
            # Another member was faster.
            if refused.args[0].code() not in (KafkaError.TOPIC_ALREADY_EXISTS, KafkaError.INVALID_PARTITIONS):
                raise

    def _partitions(self, topic: str) -> int:
        found = self._admin.list_topics(timeout=ANSWER_SECONDS).topics.get(topic)
        return 0 if found is None or found.error is not None else len(found.partitions)

    def setting(self, topic: str, name: str) -> str:
        """A setting of a topic that exists; a broker may hear of a new one some moments after it was created."""
        resource = ConfigResource(ResourceType.TOPIC, topic)
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            asked = self._admin.describe_configs([resource], request_timeout=ANSWER_SECONDS)[resource]
            try:
                return str(asked.result()[name].value)
            except KafkaException as error:
                if not is_gone(error) or time.monotonic() > deadline:
                    raise
            time.sleep(UNHEARD_SECONDS)

    def extent(self, changelog: str, source: str, partition: int) -> Extent:
        """What a partition of a changelog holds now; the changelog grows along with its source."""
        if partition >= self._partitions(changelog):
            self.ensure(changelog, source)
        return Extent(
            self._ids.ask([changelog])[changelog],
            self._offset(changelog, partition, FIRST),
            self._offset(changelog, partition, LATEST),
        )

    def _offset(self, topic: str, partition: int, which: Any) -> int:
        place = TopicPartition(topic, partition)
        (future,) = self._admin.list_offsets(
            {place: which},
            isolation_level=IsolationLevel.READ_UNCOMMITTED,
            request_timeout=ANSWER_SECONDS,
        ).values()
        return int(future.result().offset)


class RestoreTarget(NamedTuple):
    """What a restoration is to reach."""

    cache: StateCache
    first: int
    end: int


class Restoration:
    """Reads changelogs into caches until each has reached its end, a step at a time."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings: Settings = {
            **settings,
            "group.id": f"{settings['group.id']}-restoration",
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "auto.offset.reset": "error",
            "group.protocol": "classic",
            # The end of a log is told by a fetch that finds nothing, which a broker holds back for so long.
            "fetch.wait.max.ms": 10,
        }
        for name in ("group.instance.id", "session.timeout.ms", "heartbeat.interval.ms"):
            self._settings.pop(name, None)
        self._consumer: Any = None
        self._targets: dict[PartitionKey, RestoreTarget] = {}

    def add(self, changelog: str, partition: int, target: RestoreTarget) -> None:
        self._targets[changelog, partition] = target
        self._assign()

    def drop(self, changelog: str, partition: int) -> None:
        if self._targets.pop((changelog, partition), None) is not None:
            self._assign()

    def _assign(self) -> None:
        if not self._targets:
            self.close()
            return
        if self._consumer is None:
            self._consumer = RawConsumer(self._settings)
        self._consumer.assign(
            [
                TopicPartition(*key, max(target.first, target.cache.position))
                for key, target in self._targets.items()
            ]
        )

    def step(self, seconds: float) -> Collection[PartitionKey]:
        """Read for so long at most; returns the changelog partitions that are at their end now."""
        if self._consumer is None:
            return ()
        changes: dict[PartitionKey, list[tuple[bytes, bytes | None]]] = {}
        positions: dict[PartitionKey, int] = {}
        finished: set[PartitionKey] = set()
        """A partition that is written to meanwhile may be found at its end twice."""
        deadline = time.monotonic() + seconds
        for _ in range(STEP_MESSAGES):
            raw = self._consumer.poll(max(0.0, deadline - time.monotonic()))
            if raw is None:
                break
            key = (raw.topic(), raw.partition())
            error = raw.error()
            if error is None:
                changes.setdefault(key, []).append((raw.key(), raw.value()))
                positions[key] = raw.offset() + 1
            elif error.code() == KafkaError._PARTITION_EOF:
                positions[key] = raw.offset()
                if key in self._targets and raw.offset() >= self._targets[key].end:
                    finished.add(key)
            elif error.fatal() or error.code() == KafkaError._AUTO_OFFSET_RESET:
                raise KafkaException(error)
        for key, position in positions.items():
            if key in self._targets and position > self._targets[key].cache.position:
                self._targets[key].cache.apply(changes.get(key, ()), position)
        if finished:
            for key in finished:
                self._targets.pop(key)
            self._assign()
        return finished

    def close(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

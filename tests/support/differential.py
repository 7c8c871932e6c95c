"""One script, two brokers, the same answers: what differential tests are made of.

A script is a function that takes a `Side` and asks it things, each under a label. It runs against two
brokers; what each answered is made comparable and compared field by field. The rules of that:

- Names that a broker chooses (topic ids, producer ids, session ids) become symbols in the order in which they
  are first seen, so that equal use gives equal text.
- What no two brokers can share (addresses, cluster ids, clocks) is replaced by whether it is there.
- Lists whose order the protocol leaves open are sorted by what names their items.
- Record bytes are compared as batches: every header field and every record.
- The words of an error message are the broker's own; whether there is one is compared.

A difference is a path, `script/label/field.field[name]`, with both values. The allow-list is a table of names
and patterns of paths; a difference under no name is a failure, and so is a name whose script no longer shows
it.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import fnmatch
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from holdfast.errors import InvalidRecords
from holdfast.testing.wire_client import WireClient
from holdfast.wire.api_keys import (
    CREATE_TOPICS,
    DESCRIBE_GROUPS,
    DESCRIBE_TRANSACTIONS,
    FETCH,
    FIND_COORDINATOR,
    INIT_PRODUCER_ID,
    LIST_OFFSETS,
    PRODUCE,
)
from holdfast.wire.batch import HEADER_SIZE, BatchHeader, iterate_records, read_header

ITEM_NAMES: Final = (
    "name",
    "topic",
    "topic_name",
    "resource_name",
    "topic_id",
    "log_dir",
    "partition_index",
    "index",
    "partition",
    "partition_id",
    "api_key",
    "node_id",
    "broker_id",
    "replica_id",
    "producer_id",
    "group_id",
    "key",
    "transactional_id",
    "member_id",
    "group_instance_id",
)
"""Fields that name an item of a list, the first that it has."""
ORDERED_LISTS: Final = frozenset(
    ("synonyms", "replica_nodes", "replicas", "broker_ids", "record_errors", "batches")
)
"""Lists whose order means something."""
PRESENCE_ONLY: Final = frozenset(
    (
        "host",
        "cluster_id",
        "error_message",
        "batch_index_error_message",
        "documentation",
        "log_dir",
        "last_timestamp",
        "last_fetch_timestamp",
        "last_caught_up_timestamp",
        "replica_directory_id",
    )
)
NUMBERS_FROM_OUTSIDE: Final = frozenset(
    ("port", "log_append_time", "total_bytes", "usable_bytes", "finalized_features_epoch")
)
"""Compared by sign alone."""
ANSWER_SECONDS_MAX: Final = 8.0
"""A broker that says nothing for this long is taken to stay silent."""
EFFECT_SECONDS_MAX: Final = 30.0
EFFECT_POLL_SECONDS: Final = 0.02
SYMBOLS: Final = {
    "topic_id": "topic",
    "producer_id": "producer",
    "session_id": "session",
    "member_id": "member",
    "leader": "member",
}


class Difference(NamedTuple):
    path: str
    ours: Any
    theirs: Any

    def __str__(self) -> str:
        return f"{self.path}: holdfast {self.ours!r}, Apache Kafka {self.theirs!r}"


class Normaliser:
    """Turns the answers of one broker into plain data that can be compared with another's."""

    def __init__(self) -> None:
        self._symbols: dict[str, dict[Any, str]] = {}

    def symbol(self, kind: str, value: Any) -> str:
        known = self._symbols.setdefault(kind, {})
        return known.setdefault(value, f"<{kind} {len(known) + 1}>")

    def rename(self, kind: str, old: Any, new: Any) -> None:
        """From now on the new one stands for what the old one stood for."""
        self._symbols.setdefault(kind, {})[new] = self.symbol(kind, old)

    def __call__(self, value: Any, field: str = "") -> Any:
        if value is None:
            return None
        if field in PRESENCE_ONLY:
            return f"<{field}>" if value not in ("", 0) else value
        if field in NUMBERS_FROM_OUTSIDE:
            return f"<{field}>" if value != _missing_time() and _as_number(value) > 0 else _as_number(value)
        if field in SYMBOLS and not isinstance(value, list | tuple):
            missing = value in (-1, "") or (value == 0 and field == "session_id")
            return value if missing else self.symbol(SYMBOLS[field], value)
        if field == "records":
            return self.batches(value)
        if dataclasses.is_dataclass(value):
            return {f.name: self(getattr(value, f.name), f.name) for f in dataclasses.fields(value)}
        if isinstance(value, Mapping):
            return {key: self(item, key) for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = list(value) if field in ORDERED_LISTS else self._sorted(value)
            return [self(item, field if not _is_struct(item) else "") for item in items]
        return _scalar(value)

    def _sorted(self, items: Sequence[Any]) -> list[Any]:
        if not items:
            return []
        if not _is_struct(items[0]):
            return sorted(items, key=str)
        names = [name for name in ITEM_NAMES if _has(items[0], name)]

        def place(item: Any) -> tuple[str, ...]:
            values = [(name, _get(item, name)) for name in names]
            return tuple(
                self._symbols.get(SYMBOLS[name], {}).get(value, "<new>")
                if name in SYMBOLS
                else f"{value:012d}"
                if isinstance(value, int)
                else str(value)
                for name, value in values
                if name not in PRESENCE_ONLY
            )

        return sorted(items, key=place)

    def batches(self, data: bytes) -> dict[str, Any]:
        """Whole batches of a fetched set of records; a cut one at the end is only mentioned."""
        found = []
        position = 0
        while len(data) - position >= HEADER_SIZE:
            header = read_header(data, position)
            if len(data) - position < header.size:
                break
            found.append(self._batch(header, data[position : position + header.size]))
            position += header.size
        return {"batches": found, "cut_batch_follows": position < len(data)}

    def _batch(self, header: BatchHeader, data: bytes) -> dict[str, Any]:
        fields = header._asdict()
        for name in ("batch_length", "crc"):  # follow from the rest, except under compression
            del fields[name]
        fields["producer_id"] = self(header.producer_id, "producer_id")
        if header.is_log_append_time:
            fields["max_timestamp"] = "<log append time>"
        if header.is_control:  # of the broker's own making, and so its clock
            fields["base_timestamp"] = fields["max_timestamp"] = "<time of the marker>"
        try:
            fields["records_held"] = [tuple(record) for record in iterate_records(data)]
        except InvalidRecords as error:
            fields["records_held"] = error.code.name
        return fields


def _is_struct(value: Any) -> bool:
    return dataclasses.is_dataclass(value) or isinstance(value, Mapping)


def _has(item: Any, name: str) -> bool:
    return name in item if isinstance(item, Mapping) else hasattr(item, name)


def _get(item: Any, name: str) -> Any:
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name)


def _missing_time() -> datetime.datetime:
    return datetime.datetime.fromtimestamp(0, datetime.UTC) - datetime.timedelta(milliseconds=1)


def _as_number(value: Any) -> int:
    scalar = _scalar(value)
    return scalar if isinstance(scalar, int) else 0


def _scalar(value: Any) -> Any:
    if isinstance(value, ErrorCode):
        return value.name
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, datetime.timedelta):
        return round(value / datetime.timedelta(milliseconds=1))
    if isinstance(value, datetime.datetime):
        return round(
            (value - datetime.datetime.fromtimestamp(0, datetime.UTC)) / datetime.timedelta(milliseconds=1)
        )
    if isinstance(value, uuid.UUID):
        return str(value)
    return value


class Side:
    """One of the two brokers, as a script sees it: asks, notes down, and returns the raw answer."""

    def __init__(self, bootstrap_servers: str) -> None:
        self.bootstrap_servers = bootstrap_servers
        self.client = WireClient(bootstrap_servers, timeout_s=ANSWER_SECONDS_MAX)
        self.normalise = Normaliser()
        self.seen: dict[str, Any] = {}
        self._others: list[WireClient] = []

    def connect(self) -> WireClient:
        """One more connection, for requests that the broker lets wait."""
        client = WireClient(self.bootstrap_servers, timeout_s=ANSWER_SECONDS_MAX)
        self._others.append(client)
        return client

    def ask(self, label: str, api_key: int, version: int, fields: Mapping[str, Any]) -> Any:
        answer = self.client.ask(api_key, version, fields)
        self.note(label, answer)
        return answer

    def note(self, label: str, what: Any) -> None:
        """Keep an observation for the comparison."""
        if label in self.seen:
            raise ValueError(f"the script uses the label {label!r} twice")
        self.seen[label] = self.normalise(what)

    def create_topic(
        self, name: str, partitions: int = 1, configs: Mapping[str, str] | None = None
    ) -> uuid.UUID:
        """Make a topic and return its id; anything but success ends the script."""
        # Scripts write messages of long ago, and each broker looks for what has expired when its own time has come.
        wanted = {"retention.ms": "-1", **(configs or {})}
        settings = [{"name": key, "value": value} for key, value in wanted.items()]
        topic = {"name": name, "num_partitions": partitions, "replication_factor": 1, "configs": settings}
        answer = self.client.ask(CREATE_TOPICS, 7, {"topics": [topic], "timeout": 30_000})
        made = answer.topics[0]
        if made.error_code is not ErrorCode.none:
            raise AssertionError(f"creating {name}: {made.error_code.name} {made.error_message}")
        topic_id = made.topic_id
        assert isinstance(topic_id, uuid.UUID)
        self.normalise.symbol("topic", topic_id)
        self.await_leaders(name, partitions)
        return topic_id

    def await_leaders(self, topic: str, partitions: int) -> None:
        """Return when every partition can be read: Apache Kafka answers a creation before it is carried out."""
        wanted = [{"partition_index": index, "timestamp": -1} for index in range(partitions)]

        def is_served() -> bool:
            answer = self.client.ask(LIST_OFFSETS, 3, {"topics": [{"name": topic, "partitions": wanted}]})
            return all(p.error_code is ErrorCode.none for p in answer.topics[0].partitions)

        self.wait_until(is_served)

    @staticmethod
    def wait_until(condition: Callable[[], bool]) -> None:
        """Ask again and again until it is so, for brokers that answer before the effect shows."""
        deadline = time.monotonic() + EFFECT_SECONDS_MAX
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"did not come about within {EFFECT_SECONDS_MAX:.0f} s: {condition}")
            time.sleep(EFFECT_POLL_SECONDS)

    def produce(
        self,
        label: str,
        topic: str | uuid.UUID,
        records: bytes | None,
        *,
        partition: int = 0,
        version: int = 9,
        acks: int = -1,
    ) -> Any:
        """One batch, good or bad, to one partition."""
        key = "topic_id" if isinstance(topic, uuid.UUID) else "name"
        data = [{key: topic, "partition_data": [{"index": partition, "records": records}]}]
        return self.ask(label, PRODUCE, version, {"acks": acks, "timeout": 30_000, "topic_data": data})

    def end_offset(self, label: str, topic: str, partition: int = 0) -> None:
        """Where the partition ends: whether a refused batch really left nothing behind."""
        wanted = [{"name": topic, "partitions": [{"partition_index": partition, "timestamp": -1}]}]
        self.ask(label, LIST_OFFSETS, 5, {"topics": wanted})

    def read_back(self, label: str, topic: str, partition: int = 0, offset: int = 0) -> None:
        """Every batch from an offset on, as stored."""
        part = {"partition": partition, "fetch_offset": offset, "partition_max_bytes": 10 << 20}
        fields = {"max_bytes": 50 << 20, "topics": [{"topic": topic, "partitions": [part]}], "replica_id": -1}
        self.ask(label, FETCH, 11, {**fields, "session_id": 0, "session_epoch": -1})

    def close(self) -> None:
        for client in (self.client, *self._others):
            client.close()


def await_coordinators(bootstrap_servers: str) -> None:
    """Return when every partition of the internal topics has its coordinator: made on demand, loaded a moment later."""
    names = [f"coordinated-{number}" for number in range(20)]
    with WireClient(bootstrap_servers) as client:

        def are_found(kind: int) -> bool:
            answer = client.ask(FIND_COORDINATOR, 4, {"key_type": kind, "coordinator_keys": names})
            return all(each.error_code is ErrorCode.none for each in answer.coordinators)

        def groups_are_served() -> bool:
            answer = client.ask(DESCRIBE_GROUPS, 5, {"groups": names})
            return all(each.error_code is ErrorCode.none for each in answer.groups)

        def transactions_are_served() -> bool:
            answer = client.ask(DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": names})
            missing = ErrorCode.transactional_id_not_found
            return all(each.error_code is missing for each in answer.transaction_states)

        Side.wait_until(lambda: are_found(0) and groups_are_served())
        Side.wait_until(lambda: are_found(1) and transactions_are_served())
        one = {"transactional_id": names[0], "transaction_timeout": 60_000}
        # The first needs producer ids, which Apache Kafka fetches when somebody asks.
        Side.wait_until(lambda: client.ask(INIT_PRODUCER_ID, 2, one).error_code is ErrorCode.none)


Script = Callable[[Side], None]


MEMBER: Final = re.compile(r"<member (\d+)>")


def run_script(script: Script, bootstrap_servers: str) -> dict[str, Any]:
    """What one broker answered, by label."""
    side = Side(bootstrap_servers)
    try:
        script(side)
    finally:
        side.close()
    seen: dict[str, Any] = without_gaps(side.seen)
    return seen


def without_gaps(seen: Any) -> Any:
    """The same with members counted as they are told of: one that only a retry came to know has no number."""
    numbers = sorted({int(number) for number in MEMBER.findall(repr(seen))})
    names = {str(number): f"<member {place}>" for place, number in enumerate(numbers, start=1)}

    def told(value: Any) -> Any:
        if isinstance(value, str):
            return MEMBER.sub(lambda found: names[found[1]], value)
        if isinstance(value, dict):
            return {told(key): told(item) for key, item in value.items()}
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(told(item) for item in value)
        return value

    return told(seen)


def differences(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    """Every field in which two runs of the script `name` differ."""
    found: list[Difference] = []
    for label in {**ours, **theirs}:
        _compare(
            f"{name}/{label}/", ours.get(label, "<not reached>"), theirs.get(label, "<not reached>"), found
        )
    return found


def _compare(path: str, ours: Any, theirs: Any, found: list[Difference]) -> None:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in {**ours, **theirs}:
            _compare(f"{path}.{key}", ours.get(key, "<absent>"), theirs.get(key, "<absent>"), found)
    elif isinstance(ours, list) and isinstance(theirs, list):
        left, right = _by_name(ours), _by_name(theirs)
        for key in {**left, **right}:
            _compare(f"{path}[{key}]", left.get(key, "<absent>"), right.get(key, "<absent>"), found)
    elif ours != theirs or type(ours) is not type(theirs):
        found.append(Difference(path.replace("/.", "/"), ours, theirs))


def _by_name(items: list[Any]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for place, item in enumerate(items):
        name = str(place)
        if isinstance(item, dict) and "base_offset" not in item:
            name = next(
                (str(item[key]) for key in ITEM_NAMES if key in item and key not in PRESENCE_ONLY), name
            )
        named[name if name not in named else f"{name}#{place}"] = item
    return named


class Allowed(NamedTuple):
    """One named difference that is meant to be there, and where it shows."""

    name: str
    where: tuple[str, ...]
    """Shell patterns of paths."""
    ours: str = "*"
    """A pattern of the text of our value."""
    theirs: str = "*"

    def covers(self, difference: Difference) -> bool:
        return (
            any(_matches(difference.path, pattern) for pattern in self.where)
            and _matches(str(difference.ours), self.ours)
            and _matches(str(difference.theirs), self.theirs)
        )

    def expected_in(self, script: str) -> list[Allowed]:
        """Itself once per pattern that names this script, each of which must still match something."""
        return [self._replace(where=(each,)) for each in self.where if each.split("/", 1)[0] == script]


def _matches(text: str, pattern: str) -> bool:
    # Brackets are part of a path, never of a pattern.
    return fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))


def judge(script: str, found: Iterable[Difference], allowed: Iterable[Allowed]) -> list[str]:
    """What is wrong: differences under no name, and patterns that no longer match any."""
    found = list(found)
    allowed = list(allowed)
    problems = [str(each) for each in found if not any(rule.covers(each) for rule in allowed)]
    problems += [
        f"the allowed difference {rule.name!r} no longer shows at {expected.where[0]}"
        for rule in allowed
        for expected in rule.expected_in(script)
        if not any(expected.covers(each) for each in found)
    ]
    return problems

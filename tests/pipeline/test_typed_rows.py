"""Values of every type through every format, through steps, into every sink: what readers find there is equal.

The rows and what has to come out are made without our code (`support.typed_rows`), and read by what people read with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import psycopg.types.json
import pyarrow.dataset
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from deltalake import DeltaTable
from tests.support import typed_rows
from tests.support.tiers import by_tier, is_long
from tests.support.typed_rows import Rows

from holdfast.broker.server.embed import Broker
from holdfast.pipeline.definition.model import (
    Decoding,
    Dedupe,
    DeltaSink,
    EventTime,
    Expect,
    Field,
    Filter,
    Join,
    KafkaSink,
    Keyed,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    Python,
    Source,
    Sql,
    Window,
)
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.keyed import KeyState, each_row
from holdfast.testing.kafka_fixtures import unavailable
from holdfast.testing.postgres import NoPostgres, PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WORLDS = [(seed, 45) for seed in range(1, 1 + by_tier(quick=1, check=1, long=6))]
"""Seeds, and how many rows of each format: no type has more extremes."""
BROKEN = {
    b'{"id": 1, "c6": NaN}': "NaN is no JSON value",
    b'{"id": 1, "c3": 2147483648}': 'field "c3": expected int, found the number 2147483648: out of range',
    b'{"id": 1, "c7": 1.5}': 'field "c7": expected decimal(38,0)',
}
"""JSON that is not of the types, and what is said of it."""


def unchanged(rows: Any) -> Any:
    return rows


@each_row
def by_way_of_its_state(
    key: tuple[int], row: dict[str, Any] | None, state: KeyState
) -> dict[str, Any] | None:
    """What a key's state holds of the row, as it will be read from the disk."""
    assert row is not None
    state.put({name: value for name, value in row.items() if name[0] in "cn"})
    return state.value


def every_format(seed: int, count: int) -> tuple[Rows, dict[str, tuple[Rows, Decoding, list[bytes]]]]:
    """The columns, and by topic its rows, its decoding and its values; ids are told apart."""
    whole = typed_rows.renamed(Rows.of(seed, count, nested=6 if is_long() else 2))
    protobuf = [name for name, kind in whole.kinds.items() if typed_rows.is_protobuf(kind)]
    scalars = [name for name, kind in whole.kinds.items() if isinstance(kind, str)]
    made: dict[str, tuple[Rows, Decoding, list[bytes]]] = {}

    def add(topic: str, rows: Rows, values: list[bytes], **more: Any) -> None:
        fields = tuple(Field(name, typed_rows.ddl(kind), required=False) for name, kind in rows.kinds.items())
        made[topic] = (rows, Decoding(topic, fields, **more), values)  # type: ignore[arg-type]

    rows = whole.numbered(0)
    schema, values = typed_rows.as_avro(rows)
    add("avro", rows, values, schema=schema)
    rows = whole.numbered(1000).fitted(typed_rows.finite)
    add("json", rows, typed_rows.as_json(rows))
    rows = whole.numbered(2000).only(scalars).fitted(typed_rows.finite)
    add("csv", rows, typed_rows.as_csv(rows), csv={"null": typed_rows.CSV_NULL})
    rows = whole.numbered(3000).only(protobuf).fitted(typed_rows.unabsent)
    schema, values = typed_rows.as_protobuf(rows)
    add("protobuf", rows, values, schema=schema, message="typed.Typed")
    return whole, made


def read(bootstrap: str, topic: str) -> list[Any]:
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "reader", "isolation.level": "read_committed"}
        | {"enable.auto.commit": False, "enable.partition.eof": True}
    )
    found: list[Any] = []
    try:
        partitions = list(consumer.list_topics(topic, timeout=10).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, each, 0) for each in partitions])
        while partitions:
            message = consumer.poll(10)
            assert message is not None
            if message.error() is None:
                found.append(message)
            else:
                partitions.remove(message.partition())
    finally:
        consumer.close()
    return found


class World:
    """A broker with topics of every format, and a pipeline over them all."""

    def __init__(self, broker: Broker, home: Path, seed: int, count: int) -> None:
        self.bootstrap = broker.bootstrap_servers
        self.home = home
        self.seed = seed
        self.whole, self.topics = every_format(seed, count)
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        for each in admin.create_topics([NewTopic(topic, 2, 1) for topic in self.topics]).values():
            each.result(30)
        self.places: dict[tuple[str, int, int], int] = {}
        """Ids by place; `BROKEN` lies in front of them in the first partition of `json`."""
        producer = Producer({"bootstrap.servers": self.bootstrap})
        for value in BROKEN:
            producer.produce("json", value, partition=0)
        for topic, (rows, _, values) in self.topics.items():
            for row, value in zip(rows.rows, values, strict=True):
                headers: Any = [("h", b"\xff\0"), ("\u00fc", None)]
                partition, offset = row["id"] % 2, row["id"] % 1000 // 2
                offset += len(BROKEN) if (topic, partition) == ("json", 0) else 0
                self.places[topic, partition, offset] = row["id"]
                producer.produce(topic, value, str(row["id"]), partition, headers=headers)
        assert producer.flush(30) == 0

    def source(self) -> Source:
        decodings = {topic: decoding for topic, (_, decoding, _) in self.topics.items()}
        return Source(
            topics=tuple(decodings),
            bootstrap=self.bootstrap,
            values=decodings,
            event_time=EventTime("_timestamp", "1d"),
        )

    def definition(self, *sinks: Any, steps: tuple[Any, ...] = ()) -> PipelineDefinition:
        home = str(self.home / "home")
        return PipelineDefinition(
            "typed", self.source(), steps=steps, sinks=sinks, home=home, directory=str(self.home)
        )

    def expected(self) -> dict[int, dict[str, Any]]:
        """Of every topic, null where its format has no such column."""
        nothing = dict.fromkeys(self.whole.kinds)
        return {
            number: nothing | row
            for rows, _, _ in self.topics.values()
            for number, row in rows.plain().items()
        }

    def json_rows(self, topic: str) -> Iterator[dict[str, Any]]:
        for message in read(self.bootstrap, topic):
            row = typed_rows.parsed(message.value())
            yield {name: typed_rows.of_json(kind, row[name]) for name, kind in self.whole.kinds.items()}

    def dead_letters(self) -> dict[tuple[str, int, int], str]:
        found = {}
        for message in read(self.bootstrap, "typed-dlt"):
            told = {name: (value or b"").decode(errors="replace") for name, value in message.headers()}
            place = (told["hf-dlt-topic"], int(told["hf-dlt-partition"]), int(told["hf-dlt-offset"]))
            found[place] = told["hf-dlt-message"]
        return found

    def with_nul(self) -> dict[int, list[str]]:
        """Rows that PostgreSQL has no text for, and their columns."""
        found: dict[int, list[str]] = {}
        for rows, _, _ in self.topics.values():
            for row in rows.rows:
                for name, kind in rows.kinds.items():
                    if any("\0" in text for text in typed_rows.texts_in(kind, row[name])):
                        found.setdefault(row["id"], []).append(name)
        return found


STEPS: tuple[Any, ...] = (
    Sql("query", "SELECT *, _timestamp AS written, _headers AS heads, id % 1000 AS twin FROM input"),
    Python("arrow", function=unchanged),
    Python("pandas", function=unchanged, mode="pandas"),
    Filter("all", "id >= 0"),
    Expect("good", "id IS NOT NULL AND size(heads) = 2 AND heads[0].value = X'FF00'"),
    Dedupe("once", key=("id",)),
)
if not is_long():
    STEPS = (STEPS[0], STEPS[2], STEPS[4])  # each costs a second


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    with Broker(str(tmp_path / "broker")) as broker:
        yield World(broker, tmp_path, *request.param)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    try:
        server = PostgresServer()
    except NoPostgres as missing:
        unavailable(str(missing))
    with server:
        yield server


@pytest.fixture
def database(world: World, server: PostgresServer) -> str:
    """The address of one of its own: a pipeline refuses the tables of another world."""
    name = f"seed_{world.seed}"
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return server.url.rpartition("/")[0] + f"/{name}"


@pytest.mark.parametrize("world", WORLDS, indirect=True)
def test_rows_of_every_type_come_out_equal(world: World, spark: SparkSession, database: str) -> None:
    files, table = ParquetSink("parquet"), PostgresSink(database, "typed")
    definition = world.definition(files, DeltaSink("delta"), KafkaSink("out"), table, steps=STEPS)
    run_pipeline(definition, spark=spark, signals=False)
    dead = world.dead_letters()
    for offset, said in enumerate(BROKEN.values()):
        assert said in dead.pop(("json", 0, offset))
    rejected = {world.places[place]: said for place, said in dead.items()}
    nul = world.with_nul()
    assert rejected.keys() == nul.keys()
    for number, said in rejected.items():
        assert any(repr(name) in said for name in nul[number])
    expected = {number: row for number, row in world.expected().items() if number not in nul}
    for reader, found in readers(world, spark, database).items():
        rows = with_one_zero(world.whole.kinds, expected) if reader == "psycopg" else expected
        assert (reader, typed_rows.differences(world.whole.kinds, rows, found)) == (reader, [])


@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS, indirect=True)
def test_steps_with_a_memory_hand_on_what_they_were_given(world: World, spark: SparkSession) -> None:
    """And U+0000, which no database keeps out here."""
    names = [name for name in world.whole.kinds if name != "id"]
    columns = ", ".join(f"{name} {typed_rows.ddl(world.whole.kinds[name])}" for name in names)
    steps = (
        *STEPS,
        Window("windows", {name: f"first({name})" for name in names}, size="1d", key=("id",), emit="changes"),
        Join(
            "joined",
            *("id < 1000", "id BETWEEN 1000 AND 1999"),
            on={"twin": "twin"},
            within="1d",
            select={name: f"l.{name}" for name in world.whole.kinds},
        ),
        Keyed("keyed", ("id",), function=by_way_of_its_state, schema=f"id bigint, {columns}", state=columns),
    )
    sinks = (
        ParquetSink("parquet"),
        KafkaSink("windows", name="windows", rows="windows"),
        ParquetSink("joined", name="joined", rows="joined"),
        ParquetSink("keyed", name="keyed", rows="keyed"),
    )
    definition = world.definition(*sinks, steps=steps)
    few = replace(definition.source, batch_records=60)  # the left rows of a pair come from the state
    run_pipeline(replace(definition, source=few), spark=spark, signals=False)
    expected = world.expected()
    left = {number: row for number, row in expected.items() if number < 1000}
    joined = spark.read.parquet(str(world.home / "joined")).toArrow().to_pylist()
    assert typed_rows.differences(world.whole.kinds, left, joined) == []
    found = {
        "parquet": spark.read.parquet(str(world.home / "parquet")).toArrow().to_pylist(),
        "windows": world.json_rows("windows"),
        "keyed": spark.read.parquet(str(world.home / "keyed")).toArrow().to_pylist(),
    }
    for reader, rows in found.items():
        assert (reader, typed_rows.differences(world.whole.kinds, expected, rows)) == (reader, [])


def with_one_zero(
    kinds: Mapping[str, Any], rows: Mapping[int, dict[str, Any]]
) -> Mapping[int, dict[str, Any]]:
    """Rows of plain values as `jsonb` keeps them: what is nested has no negative zero."""
    negative = {kind: typed_rows.plain(kind, -0.0) for kind in ("float", "double")}

    def fit(kind: Any, value: Any) -> Any:
        is_negative = isinstance(kind, str) and kind in negative and value == negative[kind]
        return typed_rows.plain(kind, 0.0) if is_negative else value

    nested = {name: kind for name, kind in kinds.items() if not isinstance(kind, str)}
    return {
        number: row | {name: typed_rows.walk(kind, row[name], fit) for name, kind in nested.items()}
        for number, row in rows.items()
    }


def readers(world: World, spark: SparkSession, database: str) -> Mapping[str, Any]:
    files = str(world.home / "parquet")
    return {
        "pyarrow": pyarrow.dataset.dataset(files, partitioning="hive").to_table().to_pylist(),
        "Spark": spark.read.parquet(files).toArrow().to_pylist(),
        "deltalake": DeltaTable(world.home / "delta").to_pyarrow_table().to_pylist(),
        "consumer": world.json_rows("out"),
        "psycopg": in_postgres(world, database),
    }


def in_postgres(world: World, database: str) -> Iterator[dict[str, Any]]:
    with psycopg.connect(database) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        psycopg.types.json.set_json_loads(typed_rows.parsed, connection)
        cursor = connection.execute("SELECT * FROM typed")
        names = [column.name for column in cursor.description or ()]
        for values in cursor:
            row = dict(zip(names, values, strict=True))
            yield {
                name: row[name] if isinstance(kind, str) else typed_rows.of_json(kind, row[name])
                for name, kind in world.whole.kinds.items()
            }


KEYS = ("a", "", "\u00e9", "e\u0301", "\U0001f600", "null", '"', "x" * 3000)


@pytest.mark.long
def test_a_compacted_topic_has_the_last_row_of_each_key_after_compaction(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Keys as the source has them, tombstones too; what is deleted is gone, what came back is there."""
    rows = typed_rows.renamed(Rows.of(3, 3 * len(KEYS) + 1)).fitted(typed_rows.finite)
    values: list[bytes | None] = list(typed_rows.as_json(rows))
    keys = [KEYS[at % len(KEYS)] for at in range(len(values) - 1)] + ["the newest segment is not compacted"]
    for deleted in (8, 9, 16, 18):
        values[deleted] = None
    expected: dict[bytes, dict[str, Any] | None] = {}
    for key, value, row in zip(keys, values, rows.plain().values(), strict=True):
        expected[key.encode()] = None if value is None else row
    fields = tuple(Field(name, typed_rows.ddl(kind), required=False) for name, kind in rows.kinds.items())
    compacted = {"cleanup.policy": "compact", "segment.ms": "1", "min.cleanable.dirty.ratio": "0"}
    with Broker(str(tmp_path / "broker"), settings={"log.cleaner.backoff.ms": "20"}) as broker:
        bootstrap = broker.bootstrap_servers
        admin = AdminClient({"bootstrap.servers": bootstrap})
        topics = [NewTopic("typed", 1, 1), NewTopic("last", 1, 1, config=compacted)]
        for each in admin.create_topics(topics).values():
            each.result(30)
        producer = Producer({"bootstrap.servers": bootstrap})
        for key, value in zip(keys, values, strict=True):
            producer.produce("typed", value, key)
        assert producer.flush(30) == 0
        source = Source(
            ("typed",), bootstrap=bootstrap, value=Decoding("json", fields), batch_records=len(KEYS)
        )
        definition = PipelineDefinition(
            "last", source, sinks=(KafkaSink("last"),), home=str(tmp_path / "home")
        )
        run_pipeline(definition, spark=spark, signals=False)
        while True:
            found = read(bootstrap, "last")
            if len(found) == len({message.key() for message in found}):
                break
    assert {message.key() for message in found} == expected.keys()
    for message in found:
        last = expected[message.key()]
        if last is None:
            assert message.value() is None
        else:
            value = typed_rows.parsed(message.value())
            given = {name: typed_rows.of_json(kind, value[name]) for name, kind in rows.kinds.items()}
            assert typed_rows.differences(rows.kinds, {last["id"]: last}, [given]) == []

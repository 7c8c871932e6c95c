"""The Kafka sink: rows and ledger in one transaction, finished or fenced."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import functions

from holdfast.pipeline.definition.model import KafkaSink
from holdfast.pipeline.sinks.base import RowsRejected, SinkContext, SinkError, SinkFenced
from holdfast.pipeline.sinks.kafka import KafkaSinkWriter, RecordEnvelope
from holdfast.pipeline.sinks.kafka_writer import Writer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.holdfast(mode="thread")]


def committed(bootstrap: str, topic: str) -> list[Any]:
    """Every committed record of a topic, in the order of its partitions."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "reader",
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 10,
        }
    )
    found: list[Any] = []
    try:
        for partition in consumer.list_topics(topic, timeout=10).topics[topic].partitions:
            consumer.assign([TopicPartition(topic, partition, 0)])
            while True:
                message = consumer.poll(10)
                assert message is not None
                error = message.error()
                if error is None:
                    found.append(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    break
    finally:
        consumer.close()
    return found


def ids_of(messages: list[Any]) -> list[int]:
    return sorted(json.loads(message.value())["id"] for message in messages)


@pytest.fixture
def bootstrap(holdfast_broker: Any) -> str:
    return str(holdfast_broker.bootstrap_servers)


@pytest.fixture
def make(
    bootstrap: str, context: SinkContext, spark: SparkSession
) -> Iterator[Callable[..., KafkaSinkWriter]]:
    opened: list[KafkaSinkWriter] = []

    def build(*, is_open: bool = True, **settings: Any) -> KafkaSinkWriter:
        sink = KafkaSinkWriter(KafkaSink(**{"topic": "out", "name": "kafka", **settings}), "shop")
        if is_open:
            home = f"{context.home}-{len(opened)}"
            sink.open(replace(context, source={"bootstrap.servers": bootstrap}, home=home), spark)
            opened.append(sink)
        return sink

    yield build
    for sink in opened:
        sink.close()


def ids(*numbers: int) -> list[dict[str, Any]]:
    return [{"id": number, "name": f"n{number}"} for number in numbers]


def test_rows_arrive_in_source_order_with_lineage_in_their_headers(
    make: Any, rows: Any, batches: Any, bootstrap: str
) -> None:
    sink, cut = make(key="cast(id % 2 AS string)", headers={"shop": "upper(name)"}), batches("kafka")
    assert sink.last_entry() is None
    entry = cut.write(sink, cut.at(0, 6), rows(ids(*range(6))).repartition(3))
    assert entry.rows == 6
    assert sink.last_entry() == entry
    messages = committed(bootstrap, "out")
    assert [json.loads(m.value())["id"] for m in messages] == list(range(6))
    assert [m.key() for m in messages] == [b"0", b"1"] * 3
    assert messages[4].headers() == [("hf-source", b"orders:0@4#0"), ("shop", b"N4")]
    assert json.loads(messages[0].value()) == {"id": 0, "name": "n0"}


def test_a_tombstone_stays_one_and_the_source_key_is_kept(
    make: Any, rows: Any, batches: Any, bootstrap: str
) -> None:
    sink, cut = make(), batches("kafka")
    cut.write(sink, cut.at(0, 1), rows([{"_key": b"k", "_tombstone": True}]))
    (message,) = committed(bootstrap, "out")
    assert (message.key(), message.value()) == (b"k", None)


def test_a_tombstone_stays_one_where_the_definition_names_key_and_value(
    make: Any, rows: Any, batches: Any, bootstrap: str
) -> None:
    sink = make(key="id", value="to_json(struct(id, name))", headers={"of": "id"})
    cut = batches("kafka")
    given = rows([{"_key": b"17", "_tombstone": True}, {"_key": b"x", "id": 3}])
    cut.write(sink, cut.at(0, 2), given)
    decoded = given.withColumn("_key_id", functions.lit(5).cast("int"))
    cut.write(sink, cut.at(2, 4), decoded)
    found = [(m.key(), m.value()) for m in committed(bootstrap, "out")]
    assert found == [(b"17", None), (b"3", b'{"id":3}'), (b"5", None), (b"3", b'{"id":3}')]

    told = make(name="told", topic="told", key="coalesce(id, 0)", value="string(_tombstone)")
    cut = batches("told")
    cut.write(told, cut.at(0, 2), given)
    assert [(m.key(), m.value()) for m in committed(bootstrap, "told")] == [(b"0", b"true"), (b"3", b"false")]


def test_times_keep_their_microseconds(make: Any, rows: Any, batches: Any, bootstrap: str) -> None:
    sink, cut = make(), batches("kafka")
    at = datetime(2026, 3, 1, 12, 0, 0, 123456)
    cut.write(
        sink,
        cut.at(0, 1),
        rows([{"wall": at, "utc": at.replace(tzinfo=UTC)}], "wall timestamp_ntz, utc timestamp"),
    )
    (message,) = committed(bootstrap, "out")
    assert json.loads(message.value()) == {
        "wall": "2026-03-01T12:00:00.123456",
        "utc": "2026-03-01T12:00:00.123456Z",
    }


def test_a_new_run_continues_from_the_ledger_and_empty_batches_move_it(
    make: Any, rows: Any, batches: Any, bootstrap: str, context: SinkContext
) -> None:
    first, cut = make(), batches("kafka")
    cut.write(first, cut.at(0, 0), rows([]))
    cut.write(first, cut.at(0, 2), rows(ids(0, 1)))
    last = cut.write(first, cut.at(2, 9), rows([]))
    first.close()
    second = make()
    assert second.last_entry() == last
    reader = make(is_open=False)
    reader.open(replace(context, source={"bootstrap.servers": bootstrap}), None)
    assert reader.last_entry() == last
    cut.write(second, cut.at(9, 10), rows(ids(9), start=9))
    assert ids_of(committed(bootstrap, "out")) == [0, 1, 9]


def test_nothing_is_seen_of_a_batch_that_failed_half_way(
    make: Any, rows: Any, batches: Any, bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, cut = make(), batches("kafka")
    honest = RecordEnvelope.messages

    def dying(envelope: RecordEnvelope, batch: Any) -> Iterator[Any]:
        yield from list(honest(envelope, batch))[:2]
        raise RuntimeError("the driver dies here")

    monkeypatch.setattr(RecordEnvelope, "messages", dying)
    with pytest.raises(RuntimeError):
        cut.write(sink, cut.at(0, 5), rows(ids(*range(5))))
    monkeypatch.undo()
    assert committed(bootstrap, "out") == []
    # The same run goes on: it takes its ids again and reads the ledger.
    cut.write(sink, cut.at(0, 5), rows(ids(*range(5))))
    assert ids_of(committed(bootstrap, "out")) == [0, 1, 2, 3, 4]


def test_a_transaction_left_open_by_a_crash_is_ended_by_the_next_run(
    make: Any, rows: Any, batches: Any, bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed, cut = make(), batches("kafka")

    def die(writer: Writer) -> None:
        writer._producer.flush(10)
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "_commit", die)
        with pytest.raises(SystemExit):
            cut.write(crashed, cut.at(0, 3), rows(ids(0, 1, 2)))
    again = make()
    assert again.last_entry() is None
    cut.write(again, cut.at(0, 3), rows(ids(0, 1, 2)))
    assert ids_of(committed(bootstrap, "out")) == [0, 1, 2]


def test_a_commit_whose_answer_was_lost_is_found_in_the_ledger(
    make: Any, rows: Any, batches: Any, bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, cut = make(), batches("kafka")
    commit = Writer._commit

    def lost(writer: Writer) -> None:
        commit(writer)
        raise SinkError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "_commit", lost)
        with pytest.raises(SinkError):
            cut.write(sink, cut.at(0, 3), rows(ids(0, 1, 2)))
    assert sink.last_entry().number == 0
    assert sink.last_entry().range == cut.at(0, 3).range
    assert ids_of(committed(bootstrap, "out")) == [0, 1, 2]


@pytest.mark.holdfast(mode="process")
def test_a_broker_that_dies_between_prepare_and_commit_costs_nothing(
    make: Any, rows: Any, batches: Any, holdfast_broker: Any, bootstrap: str
) -> None:
    sink, cut = make(), batches("kafka")
    first = cut.write(sink, cut.at(0, 2), rows(ids(0, 1)))
    prepared = sink.prepare(cut.at(2, 4), rows(ids(2, 3), start=2))
    holdfast_broker.crash()
    holdfast_broker.restart()
    try:
        prepared.commit(cut.entry(cut.at(2, 4), first, 2))
    except SinkError:
        if sink.last_entry() == first:
            cut.write(sink, cut.at(2, 4), rows(ids(2, 3), start=2))
    assert sink.last_entry().number == 1
    assert ids_of(committed(bootstrap, "out")) == [0, 1, 2, 3]


def test_an_older_copy_is_fenced_and_stays_so(make: Any, rows: Any, batches: Any, bootstrap: str) -> None:
    """HF408: two copies of one pipeline."""
    old, cut = make(), batches("kafka")
    prepared = old.prepare(cut.at(0, 2), rows(ids(0, 1)))
    new = make()
    cut.write(new, cut.at(0, 2), rows(ids(0, 1)))
    with pytest.raises(SinkFenced):
        prepared.commit(cut.entry(cut.at(0, 2), None, 2))
    with pytest.raises(SinkFenced):
        old.last_entry()
    cut.write(new, cut.at(2, 3), rows(ids(2), start=2))
    assert ids_of(committed(bootstrap, "out")) == [0, 1, 2]


@pytest.mark.parametrize("changed", [pytest.param(1, marks=pytest.mark.long), 4])
def test_a_batch_some_writers_have_is_finished_with_its_own_number_of_writers(
    make: Any, rows: Any, batches: Any, bootstrap: str, monkeypatch: pytest.MonkeyPatch, changed: int
) -> None:
    cut = batches("kafka")
    single = make(writers=1)
    first = cut.write(single, cut.at(0, 10), rows(ids(*range(10))))
    single.close()
    three = make(writers=3)
    commit = Writer._commit

    def two_of_three(writer: Writer) -> None:
        if writer._id.endswith("-1"):
            raise SinkError("power cut")
        commit(writer)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "_commit", two_of_three)
        with pytest.raises(SinkError, match="power cut"):
            cut.write(three, cut.at(10, 40), rows(ids(*range(10, 40)), start=10))
    again = make(writers=changed)
    assert 10 < len(committed(bootstrap, "out")) < 40
    assert again.last_entry() == first
    assert again.unfinished().range == cut.at(10, 40).range
    with pytest.raises(SinkError, match="finished first"):
        cut.write(again, cut.at(10, 50), rows([]))
    last = cut.write(again, cut.at(10, 40), rows(ids(*range(10, 40)), start=10).repartition(2))
    assert again.unfinished() is None
    cut.write(again, cut.at(40, 45), rows(ids(*range(40, 45)), start=40))
    assert ids_of(committed(bootstrap, "out")) == list(range(45))
    assert again.last_entry().number == last.number + 1


def test_records_of_a_key_stay_in_order_whatever_the_number_of_writers(
    make: Any, rows: Any, batches: Any, bootstrap: str
) -> None:
    sink, cut = make(key="cast(id % 3 AS string)", writers=3), batches("kafka")
    cut.write(sink, cut.at(0, 60), rows(ids(*range(60))).repartition(4))
    by_key: dict[bytes, list[int]] = {}
    for message in committed(bootstrap, "out"):
        by_key.setdefault(message.key(), []).append(json.loads(message.value())["id"])
    assert sorted(by_key) == [b"0", b"1", b"2"]
    assert all(numbers == sorted(numbers) and len(numbers) == 20 for numbers in by_key.values())


def test_writers_that_are_no_longer_used_are_fenced_too(
    make: Any, rows: Any, batches: Any, bootstrap: str
) -> None:
    old, cut = make(writers=3), batches("kafka")
    prepared = old.prepare(cut.at(0, 30), rows(ids(*range(30))))
    new = make(writers=1)
    with pytest.raises(SinkFenced):
        prepared.commit(cut.entry(cut.at(0, 30), None, 30))
    cut.write(new, cut.at(0, 30), rows(ids(*range(30))))
    assert ids_of(committed(bootstrap, "out")) == list(range(30))


def test_a_record_too_large_for_the_topic_stops_with_its_size(
    make: Any, rows: Any, batches: Any, bootstrap: str
) -> None:
    sink, cut = make(), batches("kafka")
    with pytest.raises(SinkError, match=r"record of 20000\d\d bytes.*nothing was committed"):
        cut.write(sink, cut.at(0, 1), rows([{"id": 1, "name": "x" * 2_000_000}]))
    assert committed(bootstrap, "out") == []
    assert sink.last_entry() is None


def test_records_that_the_topic_does_not_take_are_found(
    make: Any, rows: Any, batches: Any, bootstrap: str
) -> None:
    """A compacted topic takes none without a key; a record is too large with its headers, too."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic("out", 1, 1, config={"cleanup.policy": "compact,delete"})])["out"].result(
        30
    )
    sink, cut = make(key="name", value="string(id)", headers={"more": "repeat('x', id)"}), batches("kafka")
    given = [{"id": 1, "name": "a"}, {"id": 2}, {"id": 2_000_000, "name": "b"}, {"id": 4, "name": ""}]
    with pytest.raises(RowsRejected) as caught:
        sink.prepare(cut.at(0, 4), rows(given))
    found = {each.offset: each.why for each in caught.value.rows}
    assert found[1] == "the record has no key, and topic 'out' is compacted"
    assert "too large" in found[2]
    assert sorted(found) == [1, 2]
    cut.write(sink, cut.at(0, 4), rows([given[0], given[3]]))
    assert [message.key() for message in committed(bootstrap, "out")] == [b"a", b""]


def test_a_reset_forgets_the_ledger_and_keeps_the_rows(
    make: Any, rows: Any, batches: Any, bootstrap: str, context: SinkContext
) -> None:
    sink, cut = make(writers=2), batches("kafka")
    cut.write(sink, cut.at(0, 4), rows(ids(*range(4))))
    sink.close()
    offline = make(is_open=False)
    offline.open(replace(context, source={"bootstrap.servers": bootstrap}), None)
    offline.forget()
    assert make().last_entry() is None
    assert len(committed(bootstrap, "out")) == 4


def test_a_ledger_of_another_pipeline_is_refused(
    make: Any, rows: Any, batches: Any, bootstrap: str, context: SinkContext, spark: SparkSession
) -> None:
    sink, cut = make(name="b--c"), batches("b--c")
    cut.write(sink, cut.at(0, 1), rows(ids(1)))
    other = KafkaSinkWriter(KafkaSink("out", name="c"), "shop--b")
    with pytest.raises(SinkError, match="belongs to the sink 'b--c'"):
        other.open(replace(context, source={"bootstrap.servers": bootstrap}), spark)


def test_expressions_are_checked_without_a_broker(rows: Any) -> None:
    sink = KafkaSinkWriter(
        KafkaSink("out", key="nothing", value="struct(id)", headers={"h": "id +"}, writers=0), "shop"
    )
    problems = {problem.where: problem.message for problem in sink.check(rows([]).schema)}
    assert set(problems) == {"key", "value", "headers.h", "writers"}
    assert "to_json" in problems["value"]


def test_the_first_records_of_a_writer_may_be_rejected(
    make: Any, rows: Any, batches: Any, bootstrap: str
) -> None:
    """Brokers have seen no record of it when the next ones come."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic("out", 1, config={"max.message.bytes": "4000"})])["out"].result(10)
    sink, cut = make(), batches("kafka")
    given = [{"id": number, "name": "x" * size} for number, size in enumerate((9, 9000, 9000, 9000))]
    with pytest.raises(RowsRejected, match="does not take 3 rows"):
        sink.prepare(cut.at(0, 4), rows(given))
    cut.write(sink, cut.at(0, 1), rows(given[:1]))
    assert ids_of(committed(bootstrap, "out")) == [0]


def test_records_that_the_topic_does_not_take_are_rejected_row_by_row(
    make: Any, rows: Any, batches: Any, bootstrap: str
) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic("out", 1, config={"max.message.bytes": "4000"})])["out"].result(10)
    sink, cut = make(settings={"compression.type": "gzip"}), batches("kafka")
    noise = "".join(chr(33 + at * 7919 % 90) for at in range(8000)) + os.urandom(4000).hex()
    given = [{"id": number, "name": name} for number, name in enumerate(("n", noise, noise, "x" * 9000))]
    with pytest.raises(RowsRejected, match=r"does not take 2 rows .*orders-0 at offset 1") as caught:
        sink.prepare(cut.at(0, 4), rows(given))
    assert [each.offset for each in caught.value.rows] == [1, 2]
    cut.write(sink, cut.at(0, 2), rows([given[0], given[3]]))
    assert ids_of(committed(bootstrap, "out")) == [0, 3]


@pytest.mark.parametrize(("policy", "says"), [("compact,delete", True), ("delete", False)])
def test_a_compacted_topic_whose_last_rows_depend_on_batches_is_said(
    bootstrap: str, context: SinkContext, policy: str, says: bool
) -> None:
    new = NewTopic("last", 1, 1, config={"cleanup.policy": policy})
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([new])["last"].result(30)
    said: list[str] = []
    sink = KafkaSinkWriter(KafkaSink("last"), "shop", "which row is last depends on batches")
    sink.open(
        replace(context, source={"bootstrap.servers": bootstrap}, warn=said.append), cast("Any", "writing")
    )
    try:
        sink.last_entry()
    finally:
        sink.close()
    assert (
        said == ["sink 'kafka': the topic 'last' is compacted: which row is last depends on batches"] * says
    )


@pytest.mark.parametrize("name", ["orders-claen", "orders-clean", "elsewhere"])
def test_a_topic_that_was_missing_is_created_and_said_with_the_name_that_may_be_meant(
    bootstrap: str, context: SinkContext, name: str
) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic("orders-clean", 1)])["orders-clean"].result(30)
    said: list[str] = []
    sink = KafkaSinkWriter(KafkaSink(name), "shop", None)
    for _ in range(2):
        sink.open(
            replace(context, source={"bootstrap.servers": bootstrap}, warn=said.append),
            cast("Any", "writing"),
        )
        sink.close()
    created = f"sink 'kafka': there was no topic {name!r}, and it was created"
    assert (
        said
        == {
            "orders-claen": [f"{created}; there is 'orders-clean', in case that was meant"],
            "orders-clean": [],
            "elsewhere": [created],
        }[name]
    )


class TestALostTopic:
    def written(self, make: Any, rows: Any, batches: Any) -> KafkaSinkWriter:
        sink: KafkaSinkWriter = make()
        batches(sink.name).write(sink, batches(sink.name).at(0, 1), rows([{"id": 1}]))
        sink.close()
        return sink

    def test_one_that_is_gone_is_not_made_anew(
        self, make: Any, rows: Any, batches: Any, bootstrap: str
    ) -> None:
        self.written(make, rows, batches)
        delete(bootstrap, "out")
        again = make()
        assert again.missing() == (
            "the topic 'out', which the ledger says has records of this pipeline, is gone"
        )
        assert "out" not in AdminClient({"bootstrap.servers": bootstrap}).list_topics(timeout=10).topics

    def test_one_that_was_created_again_is_another(
        self, make: Any, rows: Any, batches: Any, bootstrap: str, context: SinkContext
    ) -> None:
        self.written(make, rows, batches)
        delete(bootstrap, "out")
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic("out", 1)])["out"].result(10)
        again = make()
        assert "was deleted and created again" in again.missing()
        again.forget()
        assert again.missing() is None
        reader = make(is_open=False)
        reader.open(replace(context, source={"bootstrap.servers": bootstrap}), None)
        assert (reader.missing(), reader.last_entry()) == (None, None)

    def test_another_topic_of_the_definition_is_a_new_one(self, make: Any, rows: Any, batches: Any) -> None:
        self.written(make, rows, batches)
        moved = make(topic="elsewhere")
        assert moved.missing() is None
        assert moved.last_entry() is not None
        assert moved.partitions > 0


def delete(bootstrap: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_topics([topic])[topic].result(10)

"""Traces: from a producer over its message's headers to whoever handles it, and nothing without them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.support.running_clients import run_until

from holdfast import Broker
from holdfast.client import (
    Consumer,
    DatabaseSink,
    Message,
    Output,
    Processor,
    Producer,
    RetryPolicy,
    Tracing,
    UndeliveredMessages,
)
from holdfast.client.database.store import open_database


class Traced:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(provider)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [each for each in self.exporter.get_finished_spans() if each.name == name]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def trace_of(span: ReadableSpan) -> int:
    assert span.context is not None
    found: int = span.context.trace_id
    return found


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    settings = {"group.initial.rebalance.delay.ms": "0"}
    with Broker(tmp_path_factory.mktemp("traces") / "data", settings=settings) as broker:
        yield broker


@pytest.fixture
def traced() -> Traced:
    return Traced()


@pytest.mark.check
def test_a_message_is_followed_from_its_producer_over_a_processor_to_a_database(
    broker: Broker, traced: Traced, tmp_path: Path
) -> None:
    for topic in ("orders", "doubled"):
        broker.create_topic(topic)
    with Producer(broker.bootstrap_servers, spool=tmp_path / "spool", tracing=traced.tracing) as producer:
        producer.send("orders", b"7", headers={"own": "x", "traceparent": "of another message"}).wait(30)
    processor = Processor(
        broker.bootstrap_servers, group="doubler", topics=["orders"], tracing=traced.tracing
    )
    run_until(
        processor,
        lambda: processor.run(lambda message: [Output("doubled", message.value, headers=message.headers)]),
        lambda: bool(processor.committed),
    )
    database = open_database(str(tmp_path / "sink.sqlite"))
    database.connect()
    database.migrate()
    database.close()
    sink = DatabaseSink(
        broker.bootstrap_servers,
        group="booking",
        topics=["doubled"],
        database=str(tmp_path / "sink.sqlite"),
        tracing=traced.tracing,
    )
    seen: list[Message] = []
    run_until(sink, lambda: sink.run(lambda message, connection: seen.append(message)), lambda: bool(seen))
    (sent,), (processed,) = traced.spans("send orders"), traced.spans("process orders")
    stored = traced.spans("process doubled")[0]
    assert trace_of(sent) == trace_of(processed) == trace_of(stored)
    assert sent.context is not None
    assert processed.context is not None
    assert parent_of(sent) is None
    assert parent_of(processed) == sent.context.span_id
    assert parent_of(stored) == processed.context.span_id
    assert attributes(sent) == {
        "messaging.system": "kafka",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.message.body.size": 1,
        "messaging.destination.partition.id": "0",
        "messaging.kafka.offset": 0,
    }
    assert attributes(processed)["messaging.consumer.group.name"] == "doubler"
    assert [name for name, _ in seen[0].headers].count("traceparent") == 1
    assert seen[0].header("own") == b"x"


def test_what_fails_is_an_error_of_its_span(broker: Broker, traced: Traced) -> None:
    broker.create_topic("small", settings={"max.message.bytes": "1000"})
    broker.create_topic("small-dlt")
    with (
        pytest.raises(UndeliveredMessages),
        Producer(broker.bootstrap_servers, tracing=traced.tracing) as producer,
    ):
        producer.send("small", b"x").wait(30)
        producer.send("small", b"x" * 2000)
    failed, fine = sorted(traced.spans("send small"), key=lambda span: span.status.is_ok)
    assert attributes(failed)["error.type"] == "DeliveryFailed"
    assert "messaging.kafka.offset" in attributes(fine)

    async def handle(message: Message) -> None:
        raise ValueError("bad")

    consumer = Consumer(
        broker.bootstrap_servers,
        group="mailer",
        topics=["small"],
        retry=RetryPolicy(attempts=1),
        tracing=traced.tracing,
    )
    run_until(consumer, lambda: consumer.run(handle), lambda: bool(traced.spans("process small")))
    (span,) = traced.spans("process small")
    assert attributes(span)["error.type"] == "ValueError"
    assert trace_of(span) == trace_of(fine)


def test_a_batch_has_links_to_its_messages(broker: Broker, traced: Traced) -> None:
    broker.create_topic("many")
    with Producer(broker.bootstrap_servers, tracing=traced.tracing) as producer:
        producer.send_many("many", [b"a", b"b", b"c"])
    consumer = Consumer(broker.bootstrap_servers, group="files", topics=["many"], tracing=traced.tracing)
    taken: list[Message] = []
    run_until(consumer, lambda: consumer.run_batches(taken.extend), lambda: len(taken) == 3)
    spans = traced.spans("process many")
    linked = {link.context.span_id for span in spans for link in span.links}
    assert linked == {each.context.span_id for each in traced.spans("send many") if each.context is not None}
    assert sum(attributes(span)["messaging.batch.message_count"] for span in spans) == 3


def test_a_client_without_tracing_imports_none_of_it() -> None:
    program = (
        "import sys; from holdfast.client import Producer, Consumer, Processor, DatabaseSink; "
        "print([name for name in sys.modules if 'opentelemetry' in name or name.endswith('client.tracing')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"

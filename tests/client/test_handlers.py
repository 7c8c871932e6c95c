"""A handler that only begins its work handles nothing: refused at the start, or at its first outcome."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.client.consumer import App, Consumer
from holdfast.client.consuming.handling import Handling
from holdfast.client.consuming.tracker import PartitionTracker
from holdfast.client.consuming.workers import Run
from holdfast.client.database.sink import DatabaseSink
from holdfast.client.database.store import open_database
from holdfast.client.dead_letters import failure_of
from holdfast.client.messages import Message, UnusableHandler, check_handler, check_outcome, described
from holdfast.client.processor import Processor
from holdfast.client.retries import RetryPolicy
from holdfast.client.state import StatefulProcessor
from holdfast.errors import UsageError
from holdfast.testing.broker import BrokerProcess


async def coroutine(*_: Any) -> None: ...


def generator(*_: Any) -> Iterator[None]:
    yield


async def async_generator(*_: Any) -> Any:
    yield


class AwaitedObject:
    async def __call__(self, *_: Any) -> None: ...


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


LATER: dict[str, Callable[..., Any]] = {
    "coroutine": lambda *_: coroutine(),
    "generator": lambda *_: generator(),
    "async generator": lambda *_: async_generator(),
    "future": lambda *_: Future(),
}
"""Plain functions whose outcome is yet to come: nothing tells of it before they are called."""
KINDS: dict[str, Callable[..., Any]] = {
    "coroutine": coroutine,
    "object": AwaitedObject(),
    "partial": functools.partial(coroutine, 1),
    "generator": generator,
    "async generator": async_generator,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_only_begins_its_work_is_refused_before_it_is_called(kind: str) -> None:
    with pytest.raises(UnusableHandler):
        check_handler(KINDS[kind])


@pytest.mark.parametrize("kind", ["coroutine", "object", "partial"])
def test_coroutines_are_taken_where_they_are_awaited(kind: str) -> None:
    check_handler(KINDS[kind], awaits=True)
    for generating in (generator, async_generator):
        with pytest.raises(UnusableHandler):
            check_handler(generating, awaits=True)


def test_generators_are_taken_where_they_are_iterated() -> None:
    check_handler(generator, iterates=True)
    check_outcome(generator(), iterates=True)
    for kind in (coroutine, async_generator):
        with pytest.raises(UnusableHandler):
            check_handler(kind, iterates=True)
    with pytest.raises(UnusableHandler):
        check_handler(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", LATER)
@pytest.mark.parametrize("way", ["one", "batch", "async one", "async batch"])
def test_an_outcome_that_is_yet_to_come_stops_and_finishes_nothing(kind: str, way: str) -> None:
    """Neither tried again nor set aside: whoever handles messages must stop."""
    calls, aside = [], []
    tracker = PartitionTracker("orders", 0, 0)
    run = Run([("orders", 0, offset, 0, None, b"x", ()) for offset in range(2)], tracker)
    tracker.begin_all(range(2))
    handling = Handling(RetryPolicy(attempts=3, first_seconds=0), lambda *given: aside.append(given))

    def handle(argument: Any) -> Any:
        calls.append(argument)
        return LATER[kind]()

    async def awaited(argument: Any) -> Any:
        return handle(argument)

    async def whole(carry_out: Any) -> None:
        await carry_out(run)

    with pytest.raises(UnusableHandler):
        if way == "one":
            handling.one_by_one(handle)(run)
        elif way == "batch":
            handling.in_batches(handle)(run)
        elif way == "async one":
            asyncio.run(whole(handling.awaiting(awaited)))
        else:
            asyncio.run(whole(handling.awaiting_batches(awaited)))
    assert (run.finished, len(calls), aside) == (0, 1, [])


def test_an_error_without_words_is_judged_like_any_other() -> None:
    assert described(Unspeakable()) == "Unspeakable (its text cannot be made: RuntimeError)"
    verdict = RetryPolicy(attempts=1).judge(Unspeakable(), 1, 0.0)
    assert "Unspeakable" in str(verdict)
    letter = failure_of(Message("t", 0, 0, 0, None, None), "g", "given up", Unspeakable(), 1)
    assert letter.message == "(its text cannot be made: RuntimeError)"


@pytest.mark.parametrize("is_async", [False, True])
def test_time_for_retries_counts_from_the_beginning_of_the_first_attempt(
    monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    now = 0.0
    monkeypatch.setattr("holdfast.client.consuming.handling.time.monotonic", lambda: now)
    aside: list[int] = []
    tracker = PartitionTracker("orders", 0, 0)
    run = Run([("orders", 0, 0, 0, None, b"x", ())], tracker)
    tracker.begin_all(range(1))
    policy = RetryPolicy(attempts=10, first_seconds=0, within_seconds=5)
    handling = Handling(policy, lambda message, reason, error, attempts: aside.append(attempts))

    def slow(message: Message) -> None:
        nonlocal now
        now += 6
        raise ValueError

    async def awaited(message: Message) -> None:
        slow(message)

    if is_async:

        async def whole() -> None:
            await handling.awaiting(awaited)(run)

        asyncio.run(whole())
    else:
        handling.one_by_one(slow)(run)
    assert aside == [1]


# With a real broker


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    settings = {"group.initial.rebalance.delay.ms": "0"}
    with BrokerProcess(str(tmp_path_factory.mktemp("handlers") / "broker"), settings=settings) as process:
        yield process


@pytest.fixture
def topic(broker: BrokerProcess) -> str:
    name = f"orders-{uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    admin.create_topics([NewTopic(name, 1, 1)])[name].result()
    fill(broker, name)
    return name


def fill(broker: BrokerProcess, topic: str) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    for number in range(10):
        producer.produce(topic, b"%d" % number)
    assert producer.flush(30) == 0


def committed(broker: BrokerProcess, group: str) -> int:
    """As a plain client sees it."""
    consumer = RawConsumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": group})
    try:
        (found,) = consumer.committed([TopicPartition(group, 0)], timeout=30)
        return int(found.offset)
    finally:
        consumer.close()


def run_of(kind: str, broker: BrokerProcess, topic: str, directory: Path) -> Callable[[Any], None]:
    given: dict[str, Any] = {
        "group": topic,
        "topics": [topic],
        "retry": RetryPolicy(attempts=2, first_seconds=0),
    }
    bootstrap = broker.bootstrap_servers
    if kind == "Consumer":
        return Consumer(bootstrap, **given).run
    if kind == "Consumer in batches":
        return Consumer(bootstrap, **given).run_batches
    if kind == "Processor":
        return Processor(bootstrap, **given).run
    if kind == "StatefulProcessor":
        return StatefulProcessor(bootstrap, directory=str(directory), **given).run
    url = f"sqlite:///{directory}/results.sqlite"
    database = open_database(url)
    database.connect()
    database.migrate()
    database.close()
    sink = DatabaseSink(bootstrap, database=url, **given)
    return sink.run if kind == "DatabaseSink" else sink.run_batches


@pytest.mark.parametrize(
    "client",
    [
        "Consumer",
        "Consumer in batches",
        "Processor",
        "StatefulProcessor",
        "DatabaseSink",
        "DatabaseSink in batches",
    ],
)
def test_no_client_commits_what_a_handler_left_for_later(
    client: str, broker: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    run = run_of(client, broker, topic, tmp_path)
    with pytest.raises(UnusableHandler):
        run(LATER["coroutine"])
    assert committed(broker, topic) <= 0
    with pytest.raises(UnusableHandler):
        run(async_generator)
    if not client.startswith("Consumer"):
        with pytest.raises(UnusableHandler):
            run(coroutine)


@pytest.mark.parametrize("client", ["Processor", "DatabaseSink"])
@pytest.mark.check
def test_a_client_that_was_stopped_runs_again(
    client: str, broker: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    run = run_of(client, broker, topic, tmp_path)
    owner: Any = run.__self__  # type: ignore[attr-defined]
    seen: list[int] = []

    def handle(message: Message, *_: Any) -> None:
        if not seen:
            with pytest.raises(UsageError, match="one run at a time"):
                run(handle)
        seen.append(message.offset)
        if message.offset in (9, 19):
            owner.stop()

    run(handle)
    fill(broker, topic)
    run(handle)
    assert seen == list(range(20))


def test_an_app_refuses_a_generator_as_a_handler() -> None:
    app = App("localhost:9092", group="g")
    with pytest.raises(UnusableHandler):
        app.handler("orders")(generator)
        app.run()

"""The consumer against the real broker: every message is handled, and no position is ahead of the work."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import Producer as RawProducer
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.client.consumer import App, Consumer
from holdfast.client.consuming.assignment import CommittedOffsetLost
from holdfast.client.consuming.commits import OffsetsNotCommitted
from holdfast.client.dedupe import Dedupe
from holdfast.client.messages import Message
from holdfast.client.retries import RetryPolicy
from holdfast.errors import UsageError
from holdfast.testing.broker import BrokerProcess

SETTINGS = {"group.initial.rebalance.delay.ms": "0", "group.min.session.timeout.ms": "500"}
PROTOCOLS: dict[str, dict[str, Any]] = {
    "eager": {"partition.assignment.strategy": "range"},
    "cooperative": {"partition.assignment.strategy": "cooperative-sticky"},
    "consumer": {"group.protocol": "consumer"},
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(str(tmp_path_factory.mktemp("consumer") / "broker"), settings=SETTINGS)
    process.start()
    yield process
    process.stop()


@pytest.fixture
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One that a test may kill."""
    process = BrokerProcess(str(tmp_path_factory.mktemp("own") / "broker"), settings=SETTINGS)
    process.start()
    yield process
    process.stop()


def fill(broker: BrokerProcess, topic: str, count: int, partitions: int = 1, keys: int = 10) -> None:
    """A topic with the numbers 0 to count, number n under key n % keys, in partition key % partitions."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    for future in admin.create_topics([NewTopic(topic, partitions, 1)]).values():
        future.result()
    add(broker, topic, range(count), partitions, keys)


def add(broker: BrokerProcess, topic: str, numbers: range, partitions: int = 1, keys: int = 10) -> None:
    producer = RawProducer({"bootstrap.servers": broker.bootstrap_servers})
    for number in numbers:
        key = number % keys
        producer.produce(topic, b"%d" % number, key=b"%d" % key, partition=key % partitions)
    assert producer.flush(30) == 0


def committed(broker: BrokerProcess, group: str, topic: str, partitions: int = 1) -> list[int]:
    raw = RawConsumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": group})
    positions = raw.committed([TopicPartition(topic, index) for index in range(partitions)], timeout=30)
    raw.close()
    return [position.offset for position in positions]


def number_of(message: Message) -> int:
    return int(message.value or b"-1")


class Handled:
    """Collects what was handled, and calls something when there is enough."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self.numbers: list[int] = []
        self._count = count
        self._then = then

    def __call__(self, message: Message) -> None:
        self.numbers.append(number_of(message))
        if len(set(self.numbers)) >= self._count:
            self._then()


def run_in_thread(work: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("order", ["partition", "key", "none"])
@pytest.mark.parametrize("kind", ["function", "coroutine", "batches", "coroutine batches"])
def test_every_kind_of_handler_sees_every_message_once(broker: BrokerProcess, order: Any, kind: str) -> None:
    name = f"kinds-{order}-{kind.replace(' ', '-')}"
    fill(broker, name, 300, partitions=3)
    consumer = Consumer(broker.bootstrap_servers, group=name, topics=[name], workers=4, order=order)
    handled = Handled(300, consumer.stop)

    def one(message: Message) -> None:
        handled(message)

    async def one_awaited(message: Message) -> None:
        handled(message)

    def batch(messages: list[Message]) -> None:
        assert len({(message.topic, message.partition) for message in messages}) == 1
        assert len(messages) <= 7
        for message in messages:
            handled(message)

    async def batch_awaited(messages: list[Message]) -> None:
        batch(messages)

    if kind == "function":
        consumer.run(one)
    elif kind == "coroutine":
        consumer.run(one_awaited)
    else:
        consumer.run_batches(batch if kind == "batches" else batch_awaited, batch_max=7)
    assert sorted(handled.numbers) == list(range(300))
    assert consumer.handled == 300
    assert sum(committed(broker, name, name, 3)) == 300


@pytest.mark.parametrize("is_async", [False, True])
def test_messages_of_a_key_are_handled_in_their_order(broker: BrokerProcess, is_async: bool) -> None:
    name = f"keys-{is_async}"
    fill(broker, name, 400, partitions=2)
    consumer = Consumer(broker.bootstrap_servers, group=name, topics=[name], workers=4, order="key")
    by_key: dict[bytes | None, list[int]] = defaultdict(list)
    handled = Handled(400, consumer.stop)

    def handle(message: Message) -> None:
        by_key[message.key].append(number_of(message))
        handled(message)

    async def handle_async(message: Message) -> None:
        handle(message)

    consumer.run(handle_async if is_async else handle)
    assert all(numbers == sorted(numbers) for numbers in by_key.values())
    assert len(handled.numbers) == 400


def test_positions_pass_the_markers_of_transactions_at_the_end(broker: BrokerProcess) -> None:
    fill(broker, "markers", 0)
    producer = RawProducer({"bootstrap.servers": broker.bootstrap_servers, "transactional.id": "markers"})
    producer.init_transactions(30)
    for number in range(3):
        producer.begin_transaction()
        producer.produce("markers", b"%d" % number)
        producer.flush(30)
        if number == 1:
            producer.abort_transaction(30)
        else:
            producer.commit_transaction(30)
    consumer = Consumer(broker.bootstrap_servers, group="markers", topics=["markers"], commit_seconds=0.05)
    handled = Handled(2, lambda: None)
    thread, errors = run_in_thread(lambda: consumer.run(handled))
    until(lambda: committed(broker, "markers", "markers") == [6])
    consumer.stop()
    thread.join()
    assert not errors
    assert handled.numbers == [0, 2]


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    waiting = threading.Event()
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        waiting.wait(0.05)
    pytest.fail("it did not come to pass")


@pytest.mark.check
def test_a_handler_that_outlasts_the_poll_interval_keeps_its_partitions(broker: BrokerProcess) -> None:
    # HF308
    fill(broker, "long", 3)
    consumer = Consumer(
        broker.bootstrap_servers,
        group="long",
        topics=["long"],
        in_flight_max=1,
        drain_seconds=0.3,
        last_commit_seconds=0.3,
        config={"max.poll.interval.ms": 1000, "session.timeout.ms": 1000, "heartbeat.interval.ms": 100},
    )
    handled = Handled(3, consumer.stop)
    never = threading.Event()

    def handle(message: Message) -> None:
        if message.offset == 0:
            never.wait(2.0)
        handled(message)

    consumer.run(handle)
    assert handled.numbers == [0, 1, 2]
    assert committed(broker, "long", "long") == [3]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.check
def test_members_come_and_go_and_nothing_is_skipped(broker: BrokerProcess, protocol: str) -> None:
    """Few messages may be under way, so partitions are paused when they are taken away, and come back."""
    name = f"moves-{protocol}"
    fill(broker, name, 600, partitions=4)
    handled: list[int] = []
    pace = threading.Event()

    def make() -> Consumer:
        return Consumer(
            broker.bootstrap_servers,
            group=name,
            topics=[name],
            workers=4,
            order="key",
            in_flight_max=5,
            commit_seconds=0.05,
            config=PROTOCOLS[protocol],
        )

    def handle(message: Message) -> None:
        pace.wait(0.005)
        handled.append(number_of(message))

    first, second = make(), make()
    one, errors_one = run_in_thread(lambda: first.run(handle))
    until(lambda: first.handled > 10)
    two, errors_two = run_in_thread(lambda: second.run(handle))
    until(lambda: second.handled > 10 or len(set(handled)) == 600)
    second.stop()
    two.join()
    until(lambda: sum(committed(broker, name, name, 4)) == 600)
    first.stop()
    one.join()
    assert not errors_one
    assert not errors_two
    assert set(handled) == set(range(600))
    # What was being handled when partitions moved was finished and committed before they went; only a member that a
    # stalled machine costs its session leaves what it had under way to the other.
    assert len(handled) <= 600 + 5


def test_work_that_outlasts_the_drain_is_done_again_by_the_next_owner(broker: BrokerProcess) -> None:
    # HF307
    fill(broker, "stuck", 5)
    stuck = threading.Event()
    release = threading.Event()
    handled: list[tuple[str, int]] = []

    def make() -> Consumer:
        return Consumer(broker.bootstrap_servers, group="stuck", topics=["stuck"], drain_seconds=0.2)

    def hang(message: Message) -> None:
        if message.offset == 2:
            stuck.set()
            release.wait(30)
        handled.append(("first", message.offset))

    first, second = make(), make()
    one, errors = run_in_thread(lambda: first.run(hang))
    assert stuck.wait(30)
    first.stop()
    one.join()
    assert not errors
    assert committed(broker, "stuck", "stuck") == [2]

    def go_on(message: Message) -> None:
        handled.append(("second", message.offset))
        if message.offset == 4:
            second.stop()

    second.run(go_on)
    release.set()
    assert committed(broker, "stuck", "stuck") == [5]
    assert [offset for who, offset in handled if who == "second"] == [2, 3, 4]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_handler_that_ends_the_program_moves_no_position(
    broker: BrokerProcess, error: type[BaseException]
) -> None:
    name = f"exit-{error.__name__}"
    fill(broker, name, 5)
    consumer = Consumer(broker.bootstrap_servers, group=name, topics=[name])

    def handle(message: Message) -> None:
        if message.offset == 3:
            raise error

    with pytest.raises(error):
        consumer.run(handle)
    assert committed(broker, name, name) == [3]


def test_a_coroutine_that_is_cancelled_moves_no_position(broker: BrokerProcess) -> None:
    import asyncio

    from holdfast.client.consumer import HandlerFailed

    fill(broker, "cancelled", 5)
    consumer = Consumer(broker.bootstrap_servers, group="cancelled", topics=["cancelled"])

    async def handle(message: Message) -> None:
        if message.offset == 3:
            raise asyncio.CancelledError

    with pytest.raises(HandlerFailed, match="cancelled"):
        consumer.run(handle)
    assert committed(broker, "cancelled", "cancelled") == [3]


def test_a_last_commit_that_cannot_be_made_is_an_error(own_broker: BrokerProcess) -> None:
    # HF309
    fill(own_broker, "last", 5)
    consumer = Consumer(
        own_broker.bootstrap_servers,
        group="last",
        topics=["last"],
        commit_seconds=3600,
        last_commit_seconds=0.5,
        config={"session.timeout.ms": 1000, "heartbeat.interval.ms": 300},
    )

    def handle(message: Message) -> None:
        if message.offset == 4:
            own_broker.crash()
            consumer.stop()

    with pytest.raises(OffsetsNotCommitted, match="last-0 to 5, committed nothing"):
        consumer.run(handle)


def test_a_broker_that_goes_away_and_comes_back_costs_nothing(own_broker: BrokerProcess) -> None:
    fill(own_broker, "back", 100, partitions=2)
    consumer = Consumer(own_broker.bootstrap_servers, group="back", topics=["back"], commit_seconds=0.05)
    handled: list[int] = []

    def handle(message: Message) -> None:
        handled.append(number_of(message))

    thread, errors = run_in_thread(lambda: consumer.run(handle))
    until(lambda: len(handled) >= 100)
    own_broker.crash()
    own_broker.start()
    add(own_broker, "back", range(100, 200), partitions=2)
    until(lambda: set(handled) == set(range(200)))
    until(lambda: sum(committed(own_broker, "back", "back", 2)) == 200)
    consumer.stop()
    thread.join()
    assert not errors


def test_an_app_gives_each_topic_to_its_handler(broker: BrokerProcess) -> None:
    fill(broker, "app-orders", 50, partitions=2)
    fill(broker, "app-invoices", 30)
    app = App(broker.bootstrap_servers, group="app", commit_seconds=0.05)
    orders: list[int] = []
    invoices: list[int] = []

    def look() -> None:
        if len(orders) == 50 and len(invoices) == 30:
            app.stop()

    @app.handler("app-orders", workers=4, order="key", retry=RetryPolicy(attempts=2, first_seconds=0))
    def take_order(message: Message) -> None:
        orders.append(number_of(message))
        look()

    @app.handler("app-invoices", batch_max=10)
    async def file_away(messages: list[Message]) -> None:
        invoices.extend(map(number_of, messages))
        look()

    with pytest.raises(UsageError, match="handler already"):
        app.handler("app-orders")(print)
    app.run()
    assert sorted(orders) == list(range(50))
    assert invoices == list(range(30))
    assert app.handled == 80


def produce_with_ids(broker: BrokerProcess, topic: str, sequences: list[int]) -> None:
    producer = RawProducer({"bootstrap.servers": broker.bootstrap_servers})
    for sequence in sequences:
        headers: list[tuple[str, str | bytes | None]] = [("hf-id", b"00000000000000aa:0:%d" % sequence)]
        producer.produce(topic, b"%d" % sequence, headers=headers, partition=0)
    assert producer.flush(30) == 0


def test_what_a_spool_sends_again_is_handled_once_over_restarts(broker: BrokerProcess) -> None:
    fill(broker, "again", 0)
    produce_with_ids(broker, "again", [0, 1, 2, 1, 2, 3])
    handled: list[int] = []

    def run_to(position: int) -> None:
        consumer = Consumer(broker.bootstrap_servers, group="again", topics=["again"], commit_seconds=0.05)
        thread, errors = run_in_thread(
            lambda: consumer.run(lambda message: handled.append(number_of(message)))
        )
        until(lambda: committed(broker, "again", "again") == [position])
        consumer.stop()
        thread.join()
        assert not errors

    run_to(6)
    produce_with_ids(broker, "again", [2, 3, 4, 5])
    run_to(10)
    produce_with_ids(broker, "again", [5, 6])
    run_to(12)
    assert handled == [0, 1, 2, 3, 4, 5, 6]


def test_a_key_of_the_users_is_recognised_over_restarts_too(broker: BrokerProcess) -> None:
    fill(broker, "users-key", 20, keys=1)
    handled: list[int] = []

    def run(count: int) -> Consumer:
        consumer = Consumer(
            broker.bootstrap_servers,
            group="users-key",
            topics=["users-key"],
            commit_seconds=0.05,
            dedupe=Dedupe(key=lambda message: message.value, window=10),
        )
        thread, errors = run_in_thread(
            lambda: consumer.run(lambda message: handled.append(number_of(message)))
        )
        until(lambda: committed(broker, "users-key", "users-key") == [count])
        consumer.stop()
        thread.join()
        assert not errors
        return consumer

    run(20)
    # 15 to 19 are within the window of the messages behind them, 0 to 4 are not.
    add(broker, "users-key", range(15, 20))
    add(broker, "users-key", range(5))
    assert run(30).duplicates == 5
    assert handled == [*range(20), *range(5)]


def test_a_position_that_left_the_log_stops_the_consumer_unless_told_otherwise(
    broker: BrokerProcess,
) -> None:
    # HF305, HF206
    fill(broker, "expired", 10)
    raw = RawConsumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "expired"})
    raw.commit(offsets=[TopicPartition("expired", 0, 2)], asynchronous=False)
    raw.close()
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    for future in admin.delete_records([TopicPartition("expired", 0, 5)]).values():
        future.result()
    stopped = Consumer(broker.bootstrap_servers, group="expired", topics=["expired"])
    with pytest.raises(CommittedOffsetLost, match="3 messages expired"):
        stopped.run(print)
    assert committed(broker, "expired", "expired") == [2]
    told = Consumer(broker.bootstrap_servers, group="expired", topics=["expired"], lost_offsets="earliest")
    handled = Handled(5, told.stop)
    told.run(handled)
    assert handled.numbers == [5, 6, 7, 8, 9]


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(UsageError, match=r"max\.poll\.interval\.ms"):
        Consumer("localhost:1", group="g", topics=["t"], drain_seconds=400)
    with pytest.raises(UsageError, match="workers"):
        Consumer("localhost:1", group="g", topics=["t"], workers=0)
    with pytest.raises(UsageError, match="topics"):
        Consumer("localhost:1", group="g", topics="t")
    with pytest.raises(UsageError, match="handler"):
        App("localhost:1", group="g").run()
    with pytest.raises(UsageError, match="unexpected"):
        App("localhost:1", group="g", worker=3)

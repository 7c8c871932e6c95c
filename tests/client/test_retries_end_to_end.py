"""Retry topics and dead letters with a consumer and a real broker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic

from holdfast.client import side_topics
from holdfast.client.consumer import Consumer, HandlerFailed
from holdfast.client.dead_letter_dialects import Failure, read_failure
from holdfast.client.messages import DeadLetter, Message, Origin
from holdfast.client.partitioner import murmur2
from holdfast.client.producer import Producer
from holdfast.client.retries import NO_RETRIES, History, RetryPolicy, RetryTopics
from holdfast.client.side_topics import SideTopicMissing, TooLargeToSetAside
from holdfast.testing.broker import BrokerProcess

QUICK = {"group.initial.rebalance.delay.ms": "0"}
SOON = (0.05, 0.1)
PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("retries") / "broker"
    settings = {"group.initial.rebalance.delay.ms": "0", "auto.create.topics.enable": "true"}
    with BrokerProcess(str(directory), settings=settings) as process:
        yield process


@pytest.fixture
def admin(broker: BrokerProcess) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.bootstrap_servers})


def create(admin: AdminClient, topic: str, partitions: int = 1, **config: str) -> None:
    settings = {name.replace("_", "."): value for name, value in config.items()}
    admin.create_topics([NewTopic(topic, partitions, 1, config=settings)])[topic].result()


def write(broker: BrokerProcess, topic: str, *values: bytes, partition: int = 0) -> None:
    with Producer(broker.bootstrap_servers) as producer:
        for value in values:
            producer.send(topic, value, key=value[:8], headers={"trace": "7"}, partition=partition)


def read(broker: BrokerProcess, topic: str, partitions: int = 1) -> list[Message]:
    consumer = RawConsumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "reader",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # the end is told when a fetch comes back
        }
    )
    consumer.assign([TopicPartition(topic, at, 0) for at in range(partitions)])
    found: list[Message] = []
    ends = 0
    while ends < partitions:
        raw: Any = consumer.poll(10)
        assert raw is not None, f"no end of {topic}"
        if raw.error() is not None:
            ends += 1
        else:
            headers = tuple(raw.headers() or ())
            found.append(
                Message(
                    topic, raw.partition(), raw.offset(), raw.timestamp()[1], raw.key(), raw.value(), headers
                )
            )
    consumer.close()
    return found


def committed(broker: BrokerProcess, group: str, topic: str) -> int:
    raw = RawConsumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": group})
    (position,) = raw.committed([TopicPartition(topic, 0)], timeout=30)
    raw.close()
    return int(position.offset)


def run_until(
    consumer: Consumer,
    handler: Callable[..., Any],
    is_over: Callable[[], bool],
    *,
    in_batches: bool = False,
) -> None:
    """Consume until a condition holds, looked at every now and then."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            if in_batches:
                consumer.run_batches(handler)
            else:
                consumer.run(handler)
        except BaseException as error:  # noqa: BLE001 - raised again in the test
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    looks = threading.Event()
    for _ in range(int(PATIENCE_SECONDS / 0.02)):
        if is_over() or not thread.is_alive():
            break
        looks.wait(0.02)
    consumer.stop()
    thread.join(PATIENCE_SECONDS)
    if failed:
        raise failed[0]
    assert is_over()


def failure_in(message: Message) -> Failure:
    failure = read_failure(message.headers)
    assert failure is not None
    return failure


def test_a_failed_message_is_tried_again_later_and_holds_nobody_up(
    broker: BrokerProcess, admin: AdminClient
) -> None:
    create(admin, "mail", 2)
    write(broker, "mail", b"bad", b"1", b"2", partition=1)
    seen: list[Message] = []

    def handle(message: Message) -> None:
        seen.append(message)
        if message.value == b"bad" and len([each for each in seen if each.value == b"bad"]) < 3:
            raise ConnectionError("away")

    consumer = Consumer(
        broker.bootstrap_servers, group="mailer", topics=["mail"], retry=RetryTopics(delays=SOON, create=True)
    )
    # Handled or brought to safety: three in their topic, one in each retry topic.
    run_until(consumer, handle, lambda: consumer.handled >= 5)
    assert [(each.topic, each.partition, each.value) for each in seen] == [
        ("mail", 1, b"bad"),
        ("mail", 1, b"1"),
        ("mail", 1, b"2"),
        ("mail-retry-0", 1, b"bad"),
        ("mail-retry-1", 1, b"bad"),
    ]
    first, last = seen[0], seen[-1]
    assert last.origin == Origin("mail", 1, 0, first.timestamp_ms) == first.origin
    assert (last.key, last.header("trace")) == (b"bad", b"7")
    assert History.read(last).attempts == 2
    assert "mail-dlt" not in admin.list_topics(timeout=30).topics


def test_after_the_last_retry_topic_comes_the_dead_letter_topic(
    broker: BrokerProcess, admin: AdminClient
) -> None:
    create(admin, "bills", 2)
    write(broker, "bills", b"bad", partition=1)

    def handle(message: Message) -> None:
        raise ConnectionError(f"away {message.topic}")

    consumer = Consumer(
        broker.bootstrap_servers,
        group="biller",
        topics=["bills"],
        retry=RetryTopics(delays=SOON, in_place=RetryPolicy(attempts=2, first_seconds=0.01), create=True),
    )
    run_until(consumer, handle, lambda: consumer.handled >= 3)
    (letter,) = read(broker, "bills-dlt", 2)
    failure = failure_in(letter)
    assert (letter.partition, letter.value, letter.header("trace")) == (1, b"bad", b"7")
    assert (failure.place, failure.attempts, failure.group) == ("bills-1@0", 6, "biller")
    assert (failure.error, failure.message) == ("ConnectionError", "away bills-retry-1")
    assert not [name for name, _ in letter.headers if name.startswith("hf-retry-")]
    # Nothing forgets them by itself.
    resource = ConfigResource(ConfigResource.Type.TOPIC, "bills-dlt")
    (asked,) = admin.describe_configs([resource]).values()
    assert asked.result()["retention.ms"].value == "-1"


def test_errors_that_are_final_skip_the_retry_topics(broker: BrokerProcess, admin: AdminClient) -> None:
    for topic in ("final", "final-retry-0", "final-dlt"):
        create(admin, topic)
    write(broker, "final", b"a", b"b")

    def handle(message: Message) -> None:
        raise DeadLetter("never") if message.value == b"a" else ValueError("broken")

    consumer = Consumer(
        broker.bootstrap_servers,
        group="final",
        topics=["final"],
        retry=RetryTopics(delays=[0.05], in_place=RetryPolicy(attempts=1, final=(ValueError,))),
    )
    run_until(consumer, handle, lambda: consumer.handled >= 2)
    assert read(broker, "final-retry-0") == []
    assert [failure_in(letter).reason for letter in read(broker, "final-dlt")] == [
        "never",
        "ValueError: broken",
    ]


@pytest.mark.parametrize("kind", ["coroutine", "batch"])
@pytest.mark.check
def test_coroutines_and_batches_fail_into_the_retry_topics_alike(
    broker: BrokerProcess, admin: AdminClient, kind: str
) -> None:
    create(admin, kind)
    write(broker, kind, b"0", b"1", b"2", b"3")
    seen: list[tuple[str, bytes | None]] = []

    def check(message: Message) -> None:
        if message.value == b"1" and message.topic == kind:
            raise ConnectionError("away")
        if (message.topic, message.value) not in seen:
            seen.append((message.topic, message.value))

    async def one(message: Message) -> None:
        check(message)

    def many(batch: list[Message]) -> None:
        for message in batch:
            check(message)

    consumer = Consumer(
        broker.bootstrap_servers, group=kind, topics=[kind], retry=RetryTopics(delays=[0.05], create=True)
    )
    handler = one if kind == "coroutine" else many
    run_until(consumer, handler, lambda: consumer.handled >= 5, in_batches=kind == "batch")
    assert seen == [(kind, b"0"), (kind, b"2"), (kind, b"3"), (f"{kind}-retry-0", b"1")]


def test_what_waits_is_still_there_after_a_restart(broker: BrokerProcess, admin: AdminClient) -> None:
    create(admin, "again")
    write(broker, "again", b"bad")
    seen: list[str] = []

    def handle(message: Message) -> None:
        seen.append(message.topic)
        if message.topic == "again":
            raise ConnectionError("away")

    def consumer(delay: float) -> Consumer:
        return Consumer(
            broker.bootstrap_servers,
            group="again",
            topics=["again"],
            retry=RetryTopics(delays=[delay], create=True),
        )

    long = consumer(3600)
    run_until(long, handle, lambda: long.handled >= 1)
    assert (seen, committed(broker, "again", "again")) == (["again"], 1)
    assert committed(broker, "again", "again-retry-0") <= 0
    # The topic's delay is shorter now, and nothing waits longer than that.
    short = consumer(0.05)
    run_until(short, handle, lambda: short.handled >= 1)
    assert seen == ["again", "again-retry-0"]
    assert committed(broker, "again", "again-retry-0") == 1


def test_a_group_passes_over_what_another_one_failed_on(broker: BrokerProcess, admin: AdminClient) -> None:
    create(admin, "shared")
    write(broker, "shared", b"x")
    retry = RetryTopics(delays=[0.05], create=True)
    seen: list[str] = []

    def fail_first(message: Message) -> None:
        seen.append(message.topic)
        if message.topic == "shared":
            raise ConnectionError("away")

    first = Consumer(broker.bootstrap_servers, group="one", topics=["shared"], retry=retry)
    run_until(first, fail_first, lambda: first.handled >= 2)
    others: list[str] = []
    second = Consumer(
        broker.bootstrap_servers, group="two", topics=["shared"], retry=retry, commit_seconds=0.05
    )
    run_until(
        second,
        lambda message: others.append(message.topic),
        lambda: committed(broker, "two", "shared-retry-0") == 1 and len(others) == 1,
    )
    assert seen == ["shared", "shared-retry-0"]
    assert others == ["shared"]


def test_stopping_after_the_last_retry_topic(broker: BrokerProcess, admin: AdminClient) -> None:
    create(admin, "strict")
    write(broker, "strict", b"x")
    consumer = Consumer(
        broker.bootstrap_servers,
        group="strict",
        topics=["strict"],
        retry=RetryTopics(delays=[0.05], in_place=RetryPolicy(attempts=1, give_up="stop"), create=True),
    )

    def handle(message: Message) -> None:
        raise ValueError("no")

    with pytest.raises(HandlerFailed, match="strict-retry-0-0@0"):
        run_until(consumer, handle, lambda: False)
    assert committed(broker, "strict", "strict-retry-0") <= 0


# The dead-letter topic


def fail(message: Message) -> None:
    raise ValueError("unlucky")


def test_without_its_dead_letter_topic_a_message_stays_where_it_is(
    broker: BrokerProcess, admin: AdminClient
) -> None:
    create(admin, "lonely", 3)
    write(broker, "lonely", b"x")
    consumer = Consumer(broker.bootstrap_servers, group="lonely", topics=["lonely"], retry=NO_RETRIES)
    with pytest.raises(
        SideTopicMissing,
        match=r"holdfast topics create --topic lonely-dlt --partitions 3 --config retention\.ms=-1",
    ):
        run_until(consumer, fail, lambda: False)
    assert committed(broker, "lonely", "lonely") <= 0
    assert "lonely-dlt" not in admin.list_topics(timeout=30).topics
    allowed = Consumer(
        broker.bootstrap_servers, group="lonely", topics=["lonely"], retry=NO_RETRIES, create_topics=True
    )
    run_until(allowed, fail, lambda: allowed.handled >= 1)
    assert len(admin.list_topics(timeout=30).topics["lonely-dlt"].partitions) == 3
    assert len(read(broker, "lonely-dlt", 3)) == 1


def test_a_message_too_large_for_its_dead_letter_topic_stays_where_it_is(
    broker: BrokerProcess, admin: AdminClient
) -> None:
    create(admin, "large")
    create(admin, "large-dlt", max_message_bytes="10000")
    write(broker, "large", b"x" * 8_900, b"y" * 20_000)
    consumer = Consumer(broker.bootstrap_servers, group="large", topics=["large"], retry=NO_RETRIES)

    def handle(message: Message) -> None:
        raise ValueError("unlucky " * 400)

    with pytest.raises(TooLargeToSetAside, match="large-0@1"):
        run_until(consumer, handle, lambda: False)
    assert committed(broker, "large", "large") == 1
    (letter,) = read(broker, "large-dlt")
    failure = failure_in(letter)
    assert (failure.stack, len(failure.message or "")) == (None, 200)


def test_a_dead_letter_topic_with_fewer_partitions_takes_them_by_key(
    broker: BrokerProcess, admin: AdminClient
) -> None:
    create(admin, "wide", 4)
    create(admin, "wide-dlt", 2)
    for partition in (1, 3):
        write(broker, "wide", b"x", partition=partition)
    consumer = Consumer(broker.bootstrap_servers, group="wide", topics=["wide"], retry=NO_RETRIES)
    run_until(consumer, fail, lambda: consumer.handled >= 2)
    letters = {failure_in(letter).partition: letter.partition for letter in read(broker, "wide-dlt", 2)}
    assert letters == {1: 1, 3: murmur2(b"x") % 2}


def test_a_consumer_that_waits_for_its_broker_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_topics, "ANSWER_SECONDS", 1.0)
    consumer = Consumer(
        "127.0.0.1:1", group="nobody", topics=["nothing"], retry=RetryTopics(delays=[1], create=True)
    )
    running = threading.Thread(target=consumer.run, args=(fail,))
    running.start()
    consumer.stop()
    running.join(PATIENCE_SECONDS)
    assert not running.is_alive()


def test_another_dialect_can_be_written(broker: BrokerProcess, admin: AdminClient) -> None:
    create(admin, "spring")
    create(admin, "spring-dlt")
    write(broker, "spring", b"x")
    consumer = Consumer(
        broker.bootstrap_servers,
        group="spring",
        topics=["spring"],
        retry=NO_RETRIES,
        dead_letter_dialect="spring",
    )
    run_until(consumer, fail, lambda: consumer.handled >= 1)
    (letter,) = read(broker, "spring-dlt")
    assert letter.header("kafka_dlt-original-offset") == bytes(8)
    assert failure_in(letter).dialect == "spring"


def test_a_broker_that_is_away_is_waited_for(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path / "broker"), settings=QUICK) as process:
        create(AdminClient({"bootstrap.servers": process.bootstrap_servers}), "away")
        create(AdminClient({"bootstrap.servers": process.bootstrap_servers}), "away-dlt")
        write(process, "away", b"x")
        is_gone = threading.Event()
        seen: list[Message] = []

        def handle(message: Message) -> None:
            if not seen:
                process.crash()
                is_gone.set()
            seen.append(message)
            raise ValueError("unlucky")

        consumer = Consumer(process.bootstrap_servers, group="away", topics=["away"], retry=NO_RETRIES)

        def is_over() -> bool:
            if is_gone.is_set():
                is_gone.clear()
                process.start()
            return consumer.handled >= 1

        run_until(consumer, handle, is_over)
        assert [letter.value for letter in read(process, "away-dlt")] == [b"x"] * len(seen)

"""Consume, transform, produce: results and positions together, once."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

import holdfast.client.processor
from holdfast.client.consuming.assignment import messages
from holdfast.client.errors import DeliveryFailed
from holdfast.client.messages import Message
from holdfast.client.processor import Output, Processor, ProcessorFenced
from holdfast.errors import UsageError
from holdfast.testing.broker import BrokerProcess

SETTINGS = {
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("processor") / "broker"
    with BrokerProcess(str(directory), settings=SETTINGS) as process:
        yield process


def create(broker: BrokerProcess, *topics: str, partitions: int = 2) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    for future in admin.create_topics([NewTopic(topic, partitions, 1) for topic in topics]).values():
        future.result()


def fill(broker: BrokerProcess, topic: str, count: int, start: int = 0) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "acks": "all"})
    for number in range(start, start + count):
        producer.produce(topic, b"%d" % number, key=b"%d" % number)
    assert producer.flush(30) == 0


def visible(broker: BrokerProcess, topic: str, partitions: int = 2) -> list[int]:
    """Everything a read_committed reader sees."""
    consumer = RawConsumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # the end is told when a fetch comes back
        }
    )
    consumer.assign([TopicPartition(topic, index, 0) for index in range(partitions)])
    found: list[int] = []
    ended = 0
    while ended < partitions:
        raw: Any = consumer.poll(10)
        assert raw is not None
        if raw.error():
            ended += 1
        else:
            found.append(int(raw.value()))
    consumer.close()
    return sorted(found)


def stop_after(processor: Processor, count: int) -> threading.Thread:
    def wait() -> None:
        pause = threading.Event()
        while processor.committed < count:
            pause.wait(0.02)
        processor.stop()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def double(message: Message) -> list[Output]:
    return [Output("doubled", b"%d" % (2 * int(message.value or b"")), key=message.key)]


def test_every_message_is_processed_once(broker: BrokerProcess) -> None:
    create(broker, "numbers", "doubled")
    fill(broker, "numbers", 200)
    processor = Processor(
        broker.bootstrap_servers, group="doubler", topics=["numbers"], commit_seconds=0.05, commit_messages=20
    )
    stopper = stop_after(processor, 200)
    processor.run(double)
    stopper.join()
    assert visible(broker, "doubled") == [2 * number for number in range(200)]


def test_messages_from_before_the_position_are_not_processed_again(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """librdkafka reads a partition that was lost and came back from its beginning, now and then."""
    create(broker, "stale", "stale-copy")
    fill(broker, "stale", 200)
    given: list[Any] = []

    def with_stale(consumer: Any, seconds: float, most: int) -> Iterator[Any]:
        for raw in messages(consumer, seconds, most):
            yield raw
            given.append(raw)
            if len(given) % 7 == 0:
                yield from (given[0], raw)

    monkeypatch.setattr(holdfast.client.processor, "messages", with_stale)
    processor = Processor(broker.bootstrap_servers, group="stale", topics=["stale"], commit_messages=10)
    stopping = stop_after(processor, 200)
    processor.run(copy_to("stale-copy"))
    stopping.join()
    assert visible(broker, "stale-copy") == list(range(200))


def test_a_failure_takes_its_transaction_back_and_the_next_run_goes_on(broker: BrokerProcess) -> None:
    create(broker, "fragile", "halved")
    fill(broker, "fragile", 60)
    broken = [True]

    def halve(message: Message) -> list[Output]:
        number = int(message.value or b"")
        if number == 31 and broken[0]:
            raise ValueError("not today")
        return [Output("halved", b"%d" % number)]

    def run() -> None:
        processor = Processor(
            broker.bootstrap_servers,
            group="halver",
            topics=["fragile"],
            commit_seconds=0.0,
            commit_messages=7,
            config={"session.timeout.ms": 6000},
        )
        stopper = stop_after(processor, 60 - already) if not broken[0] else None
        processor.run(halve)
        if stopper is not None:
            stopper.join()

    already = 0
    with pytest.raises(ValueError, match="not today"):
        run()
    before = visible(broker, "halved")
    assert 31 not in before
    already = len(before)
    broken[0] = False
    run()
    assert visible(broker, "halved") == list(range(60))


def test_a_transaction_that_could_outlive_its_member_is_refused(broker: BrokerProcess) -> None:
    with pytest.raises(UsageError, match="session"):
        Processor(
            broker.bootstrap_servers,
            group="slow",
            topics=["numbers"],
            producer_config={"transaction.timeout.ms": 60_000},
        )


def test_settings_that_say_how_to_reach_the_brokers_hold_for_the_producer_too() -> None:
    made = Processor(
        "b:9092", group="g", topics=["t"], config={"sasl.password": "s", "max.poll.interval.ms": 9}
    )
    assert made._consumer_settings["sasl.password"] == made._producer_settings["sasl.password"] == "s"
    assert "max.poll.interval.ms" not in made._producer_settings


def test_a_transaction_that_is_used_longer_than_it_lasts_is_refused(broker: BrokerProcess) -> None:
    with pytest.raises(UsageError, match="commit_seconds"):
        Processor(broker.bootstrap_servers, group="slow", topics=["numbers"], commit_seconds=20)


def copy_to(topic: str) -> Callable[[Message], list[Output]]:
    return lambda message: [Output(topic, message.value, key=message.key)]


def test_an_output_that_is_refused_for_good_stops_with_its_reason(broker: BrokerProcess) -> None:
    create(broker, "loud", "quiet")
    fill(broker, "loud", 3)
    big = b"x" * 2_000_000

    def shout(message: Message) -> list[Output]:
        return [Output("quiet", message.value), Output("quiet", big)]

    processor = Processor(
        broker.bootstrap_servers,
        group="shouter",
        topics=["loud"],
        producer_config={"message.max.bytes": 10_000_000},
    )
    with pytest.raises(DeliveryFailed, match="quiet"):
        processor.run(shout)
    assert visible(broker, "quiet") == []


def test_a_fenced_producer_is_replaced_and_nothing_is_done_twice(broker: BrokerProcess) -> None:
    create(broker, "contested", "settled")
    fill(broker, "contested", 100)
    processor = Processor(
        broker.bootstrap_servers,
        group="contest",
        topics=["contested"],
        commit_seconds=0.05,
        commit_messages=10,
        producer_config={"transactional.id": "contest"},
    )
    seen = [0]

    def copy(message: Message) -> list[Output]:
        seen[0] += 1
        if seen[0] in (15, 40):
            rival = Producer({"bootstrap.servers": broker.bootstrap_servers, "transactional.id": "contest"})
            rival.init_transactions(30)
        return [Output("settled", message.value)]

    stopper = stop_after(processor, 100)
    processor.run(copy)
    stopper.join()
    assert seen[0] > 100
    assert visible(broker, "settled") == list(range(100))


@pytest.mark.check
def test_a_producer_that_is_fenced_for_ever_stops_and_says_why(broker: BrokerProcess) -> None:
    create(broker, "hopeless", "nothing")
    fill(broker, "hopeless", 10)
    processor = Processor(
        broker.bootstrap_servers,
        group="hopeless",
        topics=["hopeless"],
        producer_config={"transactional.id": "hopeless"},
    )

    def copy(message: Message) -> list[Output]:
        rival = Producer({"bootstrap.servers": broker.bootstrap_servers, "transactional.id": "hopeless"})
        rival.init_transactions(30)
        return [Output("nothing", message.value)]

    with pytest.raises(ProcessorFenced, match=r"transactional.id=hopeless"):
        processor.run(copy)
    assert visible(broker, "nothing") == []


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_members_that_come_and_go_process_each_message_once(broker: BrokerProcess, strategy: str) -> None:
    """Each arrival takes partitions away from a member with an open transaction."""
    source, target = f"shared-{strategy}", f"shared-{strategy}-copy"
    create(broker, source, target)
    fill(broker, source, 300)

    def member() -> Processor:
        return Processor(
            broker.bootstrap_servers,
            group=source,
            topics=[source],
            commit_seconds=0.2,
            config={"partition.assignment.strategy": strategy},
        )

    first, second, third = member(), member(), member()
    threads = [threading.Thread(target=each.run, args=(copy_to(target),)) for each in (first, second, third)]
    pause = threading.Event()
    threads[0].start()
    while first.committed == 0:
        pause.wait(0.01)
    threads[1].start()
    fill(broker, source, 300, 300)
    while first.committed + second.committed < 600:
        pause.wait(0.01)
    first.stop()
    threads[0].join()
    threads[2].start()
    fill(broker, source, 300, 600)
    while first.committed + second.committed + third.committed < 900:
        pause.wait(0.01)
    for each in (second, third):
        each.stop()
    for thread in threads:
        thread.join()
    assert visible(broker, target) == list(range(900))


MEMBER = """
import sys, time
from holdfast.client.processor import Output, Processor, ProcessorFenced
bootstrap, source, target, pause = sys.argv[1:]
def copy(message):
    time.sleep(float(pause))
    return [Output(target, message.value)]
Processor(bootstrap, group=source, topics=[source], commit_seconds=0.1,
    config={"session.timeout.ms": 2000, "heartbeat.interval.ms": 300}).run(copy)
"""


def member(broker: BrokerProcess, source: str, target: str, pause: float = 0.003) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", MEMBER, broker.bootstrap_servers, source, target, str(pause)]
    return subprocess.Popen(command)


@pytest.mark.check
@pytest.mark.crash
def test_members_killed_and_stopped_process_each_message_once(broker: BrokerProcess) -> None:
    """One is killed in the middle of work; another sleeps until it was replaced, and wakes up: a zombie."""
    create(broker, "hunted", "survived")
    fill(broker, "hunted", 500)
    members = [member(broker, "hunted", "survived")]
    try:
        wait_for(broker, "survived", 30)
        members[0].kill()
        members[0].wait()
        members.append(member(broker, "hunted", "survived"))
        before = len(visible(broker, "survived"))
        wait_for(broker, "survived", before + 20)
        members[1].send_signal(signal.SIGSTOP)
        before = len(visible(broker, "survived"))
        members.append(member(broker, "hunted", "survived"))
        wait_for(broker, "survived", before + 50)
        members[1].send_signal(signal.SIGCONT)
        wait_for(broker, "survived", 500)
        for each in members[1:]:
            each.send_signal(signal.SIGTERM)
        assert [each.wait(30) for each in members[1:]] == [0, 0]
    finally:
        for each in members:
            each.kill()
            each.wait()
    assert visible(broker, "survived") == list(range(500))


def wait_for(broker: BrokerProcess, topic: str, least: int) -> None:
    pause = threading.Event()
    while len(visible(broker, topic)) < least:
        pause.wait(0.25)


@pytest.mark.crash
def test_a_broker_that_crashes_is_waited_for(tmp_path: Path) -> None:
    """In the middle of transactions, twice."""
    with BrokerProcess(str(tmp_path / "broker"), settings=SETTINGS) as broker:
        create(broker, "source", "target")
        fill(broker, "source", 500)
        processor = Processor(
            broker.bootstrap_servers,
            group="steady",
            topics=["source"],
            commit_seconds=0.05,
            commit_messages=7,
        )
        thread = threading.Thread(target=processor.run, args=(copy_to("target"),))
        thread.start()
        pause = threading.Event()
        for least in (50, 300):
            while processor.committed < least:
                pause.wait(0.005)
            broker.crash()
            broker.start()
        while processor.committed < 500:
            pause.wait(0.01)
        processor.stop()
        thread.join()
        assert visible(broker, "target") == list(range(500))

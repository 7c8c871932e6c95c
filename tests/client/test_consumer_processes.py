"""Members that are processes of their own: killed, and told to end."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import Producer as RawProducer
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.testing.broker import BrokerProcess

COUNT = 2000
PARTITIONS = 4
MEMBER = """
import sys, time
from holdfast.client.consumer import Consumer
bootstrap, group, topic, path = sys.argv[1:]
out = open(path, "a", buffering=1)
def handle(message):
    time.sleep(0.001)
    out.write(f"{message.partition} {message.offset}\\n")
Consumer(
    bootstrap, group=group, topics=[topic], workers=8, order="none", commit_seconds=0.05,
    config={"session.timeout.ms": 1000, "heartbeat.interval.ms": 200},
).run(handle)
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    settings = {"group.initial.rebalance.delay.ms": "0", "group.min.session.timeout.ms": "500"}
    with BrokerProcess(str(tmp_path_factory.mktemp("members") / "broker"), settings=settings) as process:
        yield process


@pytest.fixture
def start(broker: BrokerProcess) -> Iterator[Callable[[str, Path], subprocess.Popen[bytes]]]:
    members: list[subprocess.Popen[bytes]] = []

    def start(topic: str, path: Path) -> subprocess.Popen[bytes]:
        arguments = [broker.bootstrap_servers, f"{topic}-group", topic, str(path)]
        members.append(subprocess.Popen([sys.executable, "-c", MEMBER, *arguments]))
        return members[-1]

    yield start
    for member in members:
        member.kill()
        member.wait()


def fill(broker: BrokerProcess, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    for future in admin.create_topics([NewTopic(topic, PARTITIONS, 1)]).values():
        future.result()
    producer = RawProducer({"bootstrap.servers": broker.bootstrap_servers})
    for number in range(COUNT):
        producer.produce(topic, b"%d" % number, partition=number % PARTITIONS)
    assert producer.flush(30) == 0


def handled(*paths: Path) -> list[tuple[int, int]]:
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines()]
    return [(int(partition), int(offset)) for partition, offset in map(str.split, lines)]


def committed(broker: BrokerProcess, topic: str) -> list[int]:
    raw = RawConsumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": f"{topic}-group"})
    found = raw.committed([TopicPartition(topic, index) for index in range(PARTITIONS)], timeout=30)
    raw.close()
    return [max(0, each.offset) for each in found]


def until(condition: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(600):
        if condition():
            return
        waiting.wait(0.1)
    pytest.fail("it did not come to pass")


def never_ahead(positions: list[int], work: list[tuple[int, int]]) -> bool:
    """Whether everything before each position was handled."""
    done = set(work)
    return all(
        (partition, offset) in done for partition, end in enumerate(positions) for offset in range(end)
    )


def test_a_member_killed_at_work_loses_and_skips_nothing(
    broker: BrokerProcess, start: Callable[[str, Path], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    fill(broker, "killed")
    first, second = tmp_path / "first", tmp_path / "second"
    victim = start("killed", first)
    until(lambda: len(handled(first)) > 100)
    start("killed", second)
    until(lambda: len(handled(first)) > 300)
    victim.kill()
    victim.wait()
    assert never_ahead(committed(broker, "killed"), handled(first, second))
    until(lambda: sum(committed(broker, "killed")) == COUNT)
    everything = {(number % PARTITIONS, number // PARTITIONS) for number in range(COUNT)}
    assert set(handled(first, second)) == everything


def test_a_member_told_to_end_commits_what_it_handled_and_leaves(
    broker: BrokerProcess, start: Callable[[str, Path], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    # C5
    fill(broker, "ended")
    path = tmp_path / "first"
    member = start("ended", path)
    until(lambda: len(handled(path)) > 100)
    member.send_signal(signal.SIGTERM)
    assert member.wait(30) == 0
    work = handled(path)
    positions = committed(broker, "ended")
    assert never_ahead(positions, work)
    # Whoever is at a message finishes it; what lies behind a message that was not begun is handed out again.
    assert sum(positions) >= len(work) - 8 * PARTITIONS
    second = tmp_path / "second"
    start("ended", second)
    until(lambda: sum(committed(broker, "ended")) == COUNT)
    assert set(handled(path, second)) == {(n % PARTITIONS, n // PARTITIONS) for n in range(COUNT)}

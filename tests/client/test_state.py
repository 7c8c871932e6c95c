"""State, outputs and positions are of one piece, whatever dies and whatever becomes of the cache (C10)."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from holdfast.client.changelog import Changelogs, Extent, StateLost
from holdfast.client.messages import DeadLetter, Message
from holdfast.client.processor import Output
from holdfast.client.retries import RetryPolicy
from holdfast.client.state import State, StatefulProcessor
from holdfast.errors import UsageError
from holdfast.testing.broker import BrokerProcess

SETTINGS = {
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
}
SOON = {"session.timeout.ms": 3000, "heartbeat.interval.ms": 300, "fetch.wait.max.ms": 50}
PARTITIONS = 2
KEYS = 5


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(str(tmp_path_factory.mktemp("state") / "broker"), settings=SETTINGS) as process:
        yield process


def create(broker: BrokerProcess, *topics: str, config: dict[str, str] | None = None) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    new = [NewTopic(topic, PARTITIONS, 1, config=config or {}) for topic in topics]
    for future in admin.create_topics(new).values():
        future.result()


def fill(broker: BrokerProcess, topic: str, numbers: range) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "acks": "all"})
    for number in numbers:
        producer.produce(topic, b"%d" % number, key=b"%d" % (number % KEYS))
    assert producer.flush(30) == 0


def read(broker: BrokerProcess, topic: str) -> list[tuple[bytes, bytes]]:
    """Every committed message: key and value."""
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
    consumer.assign([TopicPartition(topic, index, 0) for index in range(PARTITIONS)])
    found: list[tuple[bytes, bytes]] = []
    ended = 0
    while ended < PARTITIONS:
        raw: Any = consumer.poll(10)
        assert raw is not None
        if raw.error():
            ended += 1
        else:
            found.append((raw.key(), raw.value()))
    consumer.close()
    return found


def total(message: Message, state: State) -> list[Output]:
    """The sum and the count so far, per key."""
    key = message.key or b""
    summed, count = map(int, (state.get(key) or b"0 0").split())
    state[key] = b"%d %d" % (summed + int(message.value or b""), count + 1)
    return [Output(f"{message.topic}-totals", state[key], key=key)]


def expected(count: int) -> Counter[tuple[bytes, bytes]]:
    """Each sum comes exactly once: one that was counted twice or not at all changes all that follow."""
    sums: dict[bytes, tuple[int, int]] = {}
    outputs: Counter[tuple[bytes, bytes]] = Counter()
    for number in range(count):
        key = b"%d" % (number % KEYS)
        summed, seen = sums.get(key, (0, 0))
        sums[key] = (summed + number, seen + 1)
        outputs[key, b"%d %d" % sums[key]] += 1
    return outputs


def processor(broker: BrokerProcess, topic: str, directory: Path, **arguments: Any) -> StatefulProcessor:
    return StatefulProcessor(
        broker.bootstrap_servers,
        group=f"{topic}-group",
        topics=[topic],
        directory=str(directory),
        commit_seconds=0.05,
        commit_messages=20,
        **{"config": SOON, **arguments},
    )


def run_until(running: StatefulProcessor, count: int, transform: Any = total) -> None:
    def watch() -> None:
        pause = threading.Event()
        while running.committed < count:
            pause.wait(0.01)
        running.stop()

    watcher = threading.Thread(target=watch)
    watcher.start()
    running.run(transform)
    watcher.join()


@pytest.mark.parametrize("cache", ["kept", "gone", "old"])
def test_a_second_run_goes_on_with_the_state_of_the_first(
    broker: BrokerProcess, tmp_path: Path, cache: str
) -> None:
    topic = f"sums-{cache}"
    create(broker, topic, f"{topic}-totals")
    directory, aside = tmp_path / "state", tmp_path / "aside"
    done = 0
    for count in (100, 200, 300):
        fill(broker, topic, range(done, count))
        run_until(processor(broker, topic, directory), count - done)
        done = count
        if cache == "gone":
            shutil.rmtree(directory)
        elif cache == "old" and count == 100:
            shutil.copytree(directory, aside)
        elif cache == "old":
            shutil.rmtree(directory)
            shutil.copytree(aside, directory)
    assert Counter(read(broker, f"{topic}-totals")) == expected(300)


def test_a_failure_takes_state_back_with_its_messages(broker: BrokerProcess, tmp_path: Path) -> None:
    create(broker, "unsteady", "unsteady-totals")
    fill(broker, "unsteady", range(100))

    def fail(message: Message, state: State) -> list[Output]:
        outputs = total(message, state)
        if message.value == b"57":
            raise ValueError("not today")
        return outputs

    with pytest.raises(ValueError, match="not today"):
        processor(broker, "unsteady", tmp_path).run(fail)
    left = 100 - len(read(broker, "unsteady-totals"))
    run_until(processor(broker, "unsteady", tmp_path), left)
    assert Counter(read(broker, "unsteady-totals")) == expected(100)


def test_a_message_that_fails_has_changed_nothing_and_is_tried_again_or_set_aside(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    create(broker, "fragile", "fragile-totals", "fragile-dlt")
    fill(broker, "fragile", range(40))
    failed: set[bytes | None] = set()

    def fail(message: Message, state: State) -> list[Output]:
        state[b"touched"] = b"by %s" % (message.value or b"")
        del state[b"touched"]
        if message.value == b"39":
            state[message.key or b""] = b"1000 1000"
            raise DeadLetter("never")
        outputs = total(message, state)
        if int(message.value or b"") % 3 == 0 and message.value not in failed:
            failed.add(message.value)
            raise ValueError("not at once")
        return outputs

    running = processor(broker, "fragile", tmp_path, retry=RetryPolicy(attempts=3, first_seconds=0.01))
    run_until(running, 40, fail)
    assert Counter(read(broker, "fragile-totals")) == expected(39)
    assert [value for _, value in read(broker, "fragile-dlt")] == [b"39"]


@pytest.mark.check
def test_an_input_topic_that_grows_stops_nobody(
    broker: BrokerProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create(broker, "growing", "growing-totals")
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    fill(broker, "growing", range(20))
    running = processor(
        broker, "growing", tmp_path, config={"topic.metadata.refresh.interval.ms": 100, **SOON}
    )

    def watch() -> None:
        pause = threading.Event()
        while running.committed < 20:
            pause.wait(0.01)
        admin.create_partitions([NewPartitions("growing", PARTITIONS + 1)])["growing"].result()
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "acks": "all"})
        for partition in range(PARTITIONS + 1):
            for number in range(5):
                producer.produce("growing", b"%d" % number, key=b"k%d" % partition, partition=partition)
        assert producer.flush(30) == 0
        while running.committed < 20 + 5 * (PARTITIONS + 1):
            pause.wait(0.01)
        running.stop()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    running.run(total)
    watcher.join()
    last = dict(read(broker, "growing-totals"))
    assert [last[b"k%d" % partition] for partition in range(PARTITIONS + 1)] == [b"10 5"] * (PARTITIONS + 1)
    assert "begin there without state" in caplog.text


def test_a_changelog_that_lost_state_stops_it(broker: BrokerProcess, tmp_path: Path) -> None:
    create(broker, "robbed", "robbed-totals")
    fill(broker, "robbed", range(20))
    run_until(processor(broker, "robbed", tmp_path / "one"), 20)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    changelog = "robbed-group-robbed-changelog"
    admin.delete_topics([changelog])[changelog].result()
    with pytest.raises(StateLost, match=f"{changelog}.*recreated"):
        processor(broker, "robbed", tmp_path / "two").run(total)


@pytest.mark.parametrize(
    ("now", "word"),
    [
        (Extent("a", 0, 10), None),
        (Extent("a", 0, 99), None),
        (Extent("b", 0, 10), "recreated"),
        (Extent("a", 0, 9), "cut off"),
        (Extent("a", 1, 10), "emptied"),
    ],
)
def test_what_is_missing_from_a_changelog_is_named(now: Extent, word: str | None) -> None:
    before = Extent("a", 0, 10)
    assert Extent.decode(before.encode()) == before
    what = now.lost_since(before)
    assert what is None if word is None else word in (what or "")


def test_deleted_state_stays_deleted(broker: BrokerProcess, tmp_path: Path) -> None:
    create(broker, "visits", "visits-totals")

    def toggle(message: Message, state: State) -> list[Output]:
        key = message.key or b""
        if key in state:
            del state[key]
            return [Output("visits-totals", b"out", key=key)]
        state[key] = b"in"
        return [Output("visits-totals", b"in", key=key)]

    for numbers in (range(KEYS), range(KEYS, 2 * KEYS), range(2 * KEYS, 3 * KEYS)):
        fill(broker, "visits", numbers)
        run_until(processor(broker, "visits", tmp_path), KEYS, toggle)
        shutil.rmtree(tmp_path / "visits-group")
    answers = Counter(read(broker, "visits-totals"))
    assert answers == {
        (b"%d" % key, word): number for key in range(KEYS) for word, number in ((b"in", 2), (b"out", 1))
    }


def test_a_changelog_that_forgets_is_refused(broker: BrokerProcess, tmp_path: Path) -> None:
    create(broker, "leaky")
    create(broker, "leaky-group-leaky-changelog", config={"cleanup.policy": "delete"})
    with pytest.raises(UsageError, match=r"cleanup\.policy"):
        processor(broker, "leaky", tmp_path).run(total)


MEMBER = """
import sys, time
from holdfast.client.processor import Output
from holdfast.client.state import StatefulProcessor
bootstrap, topic, directory, pause = sys.argv[1:]
def total(message, state):
    summed, count = map(int, (state.get(message.key) or b"0 0").split())
    state[message.key] = b"%d %d" % (summed + int(message.value), count + 1)
    time.sleep(float(pause))
    return [Output(topic + "-totals", state[message.key], key=message.key)]
StatefulProcessor(bootstrap, group=topic + "-group", topics=[topic], directory=directory, commit_seconds=0.1,
    config={"session.timeout.ms": 2000, "heartbeat.interval.ms": 300}).run(total)
"""


@pytest.mark.check
@pytest.mark.crash
def test_members_killed_and_stopped_count_each_message_once(broker: BrokerProcess, tmp_path: Path) -> None:
    """All of them use one directory: the one that takes over finds the cache of the one that died or sleeps."""
    create(broker, "hunted", "hunted-totals")
    fill(broker, "hunted", range(400))
    pause = threading.Event()

    def member() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", MEMBER, broker.bootstrap_servers, "hunted", str(tmp_path), "0.003"]
        return subprocess.Popen(command)

    def wait_for_more(more: int) -> None:
        wanted = min(400, len(read(broker, "hunted-totals")) + more)
        while len(read(broker, "hunted-totals")) < wanted:
            pause.wait(0.25)

    members = [member()]
    try:
        wait_for_more(30)
        members[0].kill()
        members[0].wait()
        members.append(member())
        wait_for_more(20)
        members[1].send_signal(signal.SIGSTOP)
        members.append(member())
        wait_for_more(50)
        members[1].send_signal(signal.SIGCONT)
        wait_for_more(400)
        for each in members[1:]:
            each.send_signal(signal.SIGTERM)
        assert [each.wait(30) for each in members[1:]] == [0, 0]
    finally:
        for each in members:
            each.kill()
            each.wait()
    assert Counter(read(broker, "hunted-totals")) == expected(400)


def test_a_changelog_that_the_broker_asked_hears_of_a_moment_later_is_waited_for(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a cluster, where one node creates a topic and another one is asked for its settings."""
    changelogs = Changelogs({"bootstrap.servers": broker.bootstrap_servers})
    asked = changelogs._admin.describe_configs

    def asked_too_early(*arguments: Any, **options: Any) -> Any:
        answer = asked(*arguments, **options)
        for future in answer.values():
            assert isinstance(future.exception(), KafkaException)
        monkeypatch.undo()
        create(broker, "heard-of-later", config={"cleanup.policy": "compact"})
        return answer

    monkeypatch.setattr(changelogs._admin, "describe_configs", asked_too_early)
    assert changelogs.setting("heard-of-later", "cleanup.policy") == "compact"

"""The examples as a user runs them: real processes and a real broker, killed in the middle where that is the point."""

from __future__ import annotations

import json
import random
import re
import signal
import socketserver
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.testing.apache import ApacheKafka
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.kafka_fixtures import unavailable
from holdfast.testing.postgres import NoPostgres, PostgresServer
from holdfast.testing.processes import die_with_parent

EXAMPLES = Path(__file__).parents[2] / "examples"
PARTITIONS = 3
WAIT_SECONDS_MAX = 120.0
QUICK_SESSION = ("--set", "session.timeout.ms=3000", "--set", "heartbeat.interval.ms=300")
"""Whoever was killed is missed after three seconds instead of three quarters of a minute."""

pytestmark = [
    pytest.mark.crash,
    pytest.mark.holdfast(
        settings={"group.initial.rebalance.delay.ms": "0", "group.min.session.timeout.ms": "500"}
    ),
    pytest.mark.check,
    pytest.mark.xdist_group("examples"),
]

RARELY = 0.25
"""For looks that read a whole topic, when nobody is to be killed the moment that they succeed."""


class Record(NamedTuple):
    key: bytes | None
    value: bytes
    headers: dict[str, bytes]


class Stage:
    """The broker, what tests put in and read out, and the programs they start."""

    def __init__(self, broker: BrokerProcess | ApacheKafka, directory: Path) -> None:
        self.broker = broker
        self._directory = directory
        self._programs: list[subprocess.Popen[str]] = []
        self._topics: list[str] = []
        self._lookers: dict[str, Consumer] = {}
        """By the group whose positions they look up, again and again."""

    def create(self, *topics: str) -> None:
        self._topics += topics
        admin = AdminClient({"bootstrap.servers": self.broker.bootstrap_servers})
        for future in admin.create_topics([NewTopic(each, PARTITIONS, 1) for each in topics]).values():
            future.result(60)

    def send(self, topic: str, messages: list[tuple[str | None, str]]) -> None:
        # Without idempotence a retried batch may land behind a later one, and the order is part of what tests expect.
        producer = Producer({"bootstrap.servers": self.broker.bootstrap_servers, "enable.idempotence": True})
        for key, value in messages:
            producer.produce(topic, value, key)
        assert producer.flush(60) == 0

    def read(self, topic: str) -> list[Record]:
        """Everything that is committed, partition by partition."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.broker.bootstrap_servers,
                "group.id": "looking-on",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 10,  # the end is told when a fetch comes back
            }
        )
        partitions = consumer.list_topics(topic, 60).topics[topic].partitions
        consumer.assign([TopicPartition(topic, each, 0) for each in partitions])
        found: dict[int, list[Record]] = {each: [] for each in partitions}
        left = set(partitions)
        while left:
            message: Any = consumer.poll(WAIT_SECONDS_MAX)
            assert message is not None, f"{topic} does not come to an end"
            error = message.error()
            if error is None:
                headers = {name: value or b"" for name, value in message.headers() or ()}
                found[message.partition()].append(Record(message.key(), message.value() or b"", headers))
            else:
                assert error.code() == KafkaError._PARTITION_EOF, error
                left.discard(message.partition())
        consumer.close()
        return [each for partition in sorted(found) for each in found[partition]]

    def has_caught_up(self, group: str, topic: str) -> bool:
        looker = self._lookers.get(group)
        if looker is None:
            looker = Consumer({"bootstrap.servers": self.broker.bootstrap_servers, "group.id": group})
            self._lookers[group] = looker
        asked = [TopicPartition(topic, each) for each in range(PARTITIONS)]
        return all(
            each.offset == looker.get_watermark_offsets(each, 60)[1] for each in looker.committed(asked, 60)
        )

    def start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        with (self._directory / "errors.txt").open("a") as errors:
            program = subprocess.Popen(
                [
                    sys.executable,
                    str(EXAMPLES / f"{name}.py"),
                    *arguments,
                    "--bootstrap-server",
                    self.broker.bootstrap_servers,
                ],
                cwd=self._directory,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                preexec_fn=die_with_parent(),
            )
        self._programs.append(program)
        return program

    def errors(self) -> str:
        return (self._directory / "errors.txt").read_text()

    def interrupt(self, program: subprocess.Popen[str]) -> None:
        """Ctrl-C, and the program ends as it should."""
        program.send_signal(signal.SIGINT)
        assert program.wait(WAIT_SECONDS_MAX) == 0, self.errors()

    def wait_until(self, is_so: Callable[[], bool], look_seconds: float = 0.05) -> None:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not is_so():
            for each in self._programs:
                assert each.poll() in (None, 0, -signal.SIGKILL), self.errors()
            assert time.monotonic() < deadline, self.errors()
            time.sleep(look_seconds)

    def close(self) -> None:
        for looker in self._lookers.values():
            looker.close()
        for each in self._programs:
            each.kill()
            each.wait()
            assert each.stdout is not None
            each.stdout.close()
        # A broker that tests share must not remember: what was created here, and what the programs created beside it.
        admin = AdminClient({"bootstrap.servers": self.broker.bootstrap_servers})
        ours = [each for each in admin.list_topics(timeout=60).topics if self._is_ours(each)]
        for future in admin.delete_topics(ours).values() if ours else ():
            future.result(60)

    def _is_ours(self, topic: str) -> bool:
        return any(
            topic in (each, f"{each}-dlt") or topic.endswith(f"-{each}-changelog") for each in self._topics
        )


@pytest.fixture
def our_stage(holdfast_broker: BrokerProcess, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(holdfast_broker, tmp_path)
    yield made
    made.close()


@pytest.fixture(
    params=[
        "holdfast",
        pytest.param("apache", marks=[pytest.mark.interop, pytest.mark.apache_kafka, pytest.mark.long]),
    ]
)
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(
        request.getfixturevalue("holdfast_broker" if request.param == "holdfast" else "apache_kafka"),
        tmp_path,
    )
    yield made
    made.close()


def kill(program: subprocess.Popen[str]) -> None:
    program.kill()
    assert program.wait(WAIT_SECONDS_MAX) == -signal.SIGKILL


def test_every_confirmed_order_arrives_whatever_is_killed(
    our_stage: Stage, holdfast_broker: BrokerProcess
) -> None:
    broker = holdfast_broker
    our_stage.create("orders")
    till = our_stage.start("orders_producer", "--spool", "till", "--pause", "0.002")
    assert till.stdout is not None
    confirmed = [till.stdout.readline().split()[1] for _ in range(40)]
    broker.crash()
    confirmed += [till.stdout.readline().split()[1] for _ in range(40)]
    kill(till)
    confirmed += [line.split()[1] for line in till.stdout.read().splitlines()]
    broker.restart()
    again = our_stage.start("orders_producer", "--spool", "till", "--count", "5", "--pause", "0")
    assert again.stdout is not None
    confirmed += [line.split()[1] for line in again.stdout.read().splitlines()]
    assert again.wait(WAIT_SECONDS_MAX) == 0, our_stage.errors()
    arrived = {each.headers["hf-id"]: json.loads(each.value)["id"] for each in our_stage.read("orders")}
    # One that was stored and not confirmed any more may be there as well.
    assert set(confirmed) <= set(arrived.values())
    assert len(set(arrived.values())) == len(arrived)


def test_the_till_ends_with_ctrl_c(our_stage: Stage) -> None:
    our_stage.create("orders")
    till = our_stage.start("orders_producer", "--spool", "till")
    assert till.stdout is not None
    assert till.stdout.readline().startswith("confirmed")
    our_stage.interrupt(till)
    assert "Traceback" not in our_stage.errors()


class Mailbox(socketserver.ThreadingTCPServer):
    """A mail server: knows nobody at invalid.example, and is busy twice before it takes one for busy.example."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Conversation)
        self.received: Counter[str] = Counter()
        self.put_off: Counter[str] = Counter()
        self.lock = threading.Lock()

    def answer(self, recipient: str) -> str:
        if recipient.endswith("@invalid.example"):
            return "550 no such mailbox"
        with self.lock:
            if recipient.endswith("@busy.example") and self.put_off[recipient] < 2:
                self.put_off[recipient] += 1
                return "451 busy, try again"
        return "250 ok"


class _Conversation(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Mailbox)
        recipient, is_data = "", False
        self._say("220 ready")
        for raw in self.rfile:
            line = raw.decode().rstrip("\r\n")
            if is_data:
                if line == ".":
                    is_data = False
                    with self.server.lock:
                        self.server.received[recipient] += 1
                    self._say("250 ok")
            elif line.lower().startswith("rcpt to:<"):
                recipient = line[9:].partition(">")[0]
                self._say(self.server.answer(recipient))
            elif line.lower() == "data":
                is_data = True
                self._say("354 go on")
            elif line.lower() == "quit":
                self._say("221 bye")
                return
            else:
                self._say("250 ok")

    def _say(self, line: str) -> None:
        self.wfile.write(f"{line}\r\n".encode())


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    with Mailbox() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_every_mail_is_sent_and_what_cannot_be_is_set_aside(stage: Stage, mailbox: Mailbox) -> None:
    stage.create("emails")
    good = [f"reader-{number}@example.org" for number in range(120)]
    busy = [f"busy-{number}@busy.example" for number in range(4)]
    wrong = [f"nobody-{number}@invalid.example" for number in range(4)]
    asked = [json.dumps({"to": to, "subject": "Hello"}) for to in (*good, *busy, *wrong)]
    stage.send("emails", [(None, each) for each in (*asked[:60], "no mail at all", *asked[60:])])
    arguments = ("--smtp", f"127.0.0.1:{mailbox.server_address[1]}", *QUICK_SESSION)
    first = stage.start("email_sender", *arguments)
    stage.wait_until(lambda: len(mailbox.received) >= 20)
    kill(first)
    second = stage.start("email_sender", *arguments)
    stage.wait_until(lambda: stage.has_caught_up("email-sender", "emails"))
    stage.interrupt(second)
    assert set(mailbox.received) == {*good, *busy}
    aside = {each.value.decode(): each.headers for each in stage.read("emails-dlt")}
    assert set(aside) == {"no mail at all", *asked[124:]}


def expected_averages(readings: list[tuple[str | None, str]]) -> dict[str, list[str]]:
    totals: dict[str, list[float]] = defaultdict(list)
    averages: dict[str, list[str]] = defaultdict(list)
    for sensor, reading in readings:
        assert sensor is not None
        totals[sensor].append(float(reading))
        averages[sensor].append(f"{sum(totals[sensor]) / len(totals[sensor]):.3f}")
    return averages


def test_averages_are_right_although_the_program_was_killed(stage: Stage) -> None:
    stage.create("readings", "averages")
    chance = random.Random(7)
    readings: list[tuple[str | None, str]] = [
        (f"sensor-{chance.randrange(6)}", str(chance.randrange(100))) for _ in range(3000)
    ]
    arguments = ("--directory", "state", *QUICK_SESSION)
    stage.send("readings", readings[:1000])
    first = stage.start("running_average", *arguments)
    stage.wait_until(lambda: len(stage.read("averages")) >= 200)
    stage.send("readings", readings[1000:])
    kill(first)
    second = stage.start("running_average", *arguments)
    stage.wait_until(lambda: len(stage.read("averages")) >= len(readings), RARELY)
    stage.interrupt(second)
    found: dict[str, list[str]] = defaultdict(list)
    for record in stage.read("averages"):
        found[(record.key or b"").decode()].append(record.value.decode())
    assert found == expected_averages(readings)


@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.long), "postgres"])
def bank(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield str(tmp_path / "bank.sqlite")
        return
    try:
        server = PostgresServer()
    except NoPostgres as missing:
        unavailable(str(missing))
    with server:
        yield server.url


def ask(database: str, question: str) -> list[tuple[Any, ...]]:
    """Rows of a database that a program writes to at the same time."""
    if database.startswith("postgresql://"):
        import psycopg

        with psycopg.connect(database) as connection:
            try:
                return connection.execute(question).fetchall()
            except psycopg.errors.UndefinedTable:
                return []
    with closing(sqlite3.connect(database, timeout=60)) as file:
        try:
            return file.execute(question).fetchall()
        except sqlite3.OperationalError:
            return []


def test_no_transfer_is_booked_twice_or_forgotten(stage: Stage, bank: str) -> None:
    stage.create("transfers")
    subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "sink", "migrate", "--database", bank], check=True, timeout=60
    )
    chance = random.Random(11)
    names = [f"client-{number}" for number in range(8)]
    transfers: list[dict[str, Any]] = []
    for number in range(3000):
        giver, taker = chance.sample(names, 2)
        transfers.append({"id": f"t-{number}", "from": giver, "to": taker, "cents": chance.randrange(1, 50)})
    too_much = {"id": "too-much", "from": names[0], "to": names[1], "cents": 10**9}
    everything = [json.dumps(each) for each in (*transfers, too_much)]
    stage.send("transfers", [(None, each) for each in (*everything, "no transfer")])
    first = stage.start("money_transfer", "--database", bank, *QUICK_SESSION)
    stage.wait_until(lambda: len(ask(bank, "select 1 from transfers")) >= 100)
    kill(first)
    second = stage.start("money_transfer", "--database", bank, *QUICK_SESSION)
    third = stage.start("money_transfer", "--database", bank, *QUICK_SESSION)
    stage.wait_until(lambda: len(ask(bank, "select 1 from transfers")) >= len(everything))
    stage.interrupt(second)
    stage.interrupt(third)
    booked = dict(ask(bank, "select id, is_booked from transfers"))
    assert len(ask(bank, "select 1 from transfers")) == len(booked) == len(everything)
    assert [name for name, is_booked in booked.items() if not is_booked] == ["too-much"]
    balances = dict.fromkeys(names, 100_000)
    for each in transfers:
        balances[each["from"]] -= each["cents"]
        balances[each["to"]] += each["cents"]
    assert dict(ask(bank, "select name, cents from accounts")) == balances
    # Set aside before its position moves on: once more, if the member was killed between the two.
    assert {each.value for each in stage.read("transfers-dlt")} == {b"no transfer"}


def test_words_are_counted_right_although_both_steps_were_killed(stage: Stage) -> None:
    stage.create("lines", "words", "counts")
    chance = random.Random(3)
    words = ["anchor", "compass", "élan", "lantern", "rope"]
    lines = [" ".join(chance.choices(words, k=6)) for _ in range(300)]
    stage.send("lines", [(None, each) for each in lines])
    count = ("count", "--directory", "state", *QUICK_SESSION)
    counter = stage.start("word_count", *count)
    splitter = stage.start("word_count", "split", *QUICK_SESSION)
    stage.wait_until(lambda: len(stage.read("counts")) >= 100)
    stage.send("lines", [(None, each) for each in lines])
    kill(splitter)
    kill(counter)
    splitter = stage.start("word_count", "split", *QUICK_SESSION)
    counter = stage.start("word_count", *count)
    expected = Counter(word for line in lines * 2 for word in line.split())
    stage.wait_until(lambda: len(stage.read("counts")) >= expected.total(), RARELY)
    stage.interrupt(splitter)
    stage.interrupt(counter)
    found: dict[str, list[int]] = defaultdict(list)
    for record in stage.read("counts"):
        found[(record.key or b"").decode()].append(int(record.value))
    assert found == {word: list(range(1, total + 1)) for word, total in expected.items()}


def test_the_index_names_every_example() -> None:
    index = (EXAMPLES / "README.md").read_text()
    listed = set(re.findall(r"\]\(([\w/]+\.(?:py|yaml))\)", index))
    there = {
        str(each.relative_to(EXAMPLES)) for each in EXAMPLES.rglob("*") if each.suffix in (".py", ".yaml")
    }
    assert listed == there - {"pipelines/run.py"}
    assert "pipelines/run.py" in index

"""What became of every message, told from outside: from the broker, the spool, the database and the process itself.

The judge believes nothing that a client of ours says but what it says to the user: on stderr and by the exit code. What
a spool kept is proven by the next process, which delivers it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from confluent_kafka import OFFSET_BEGINNING, KafkaError, TopicPartition
from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import Producer as RawProducer
from confluent_kafka.admin import AdminClient, NewTopic
from tests.endings.axes import WAYS, Combination
from tests.endings.producing import CHILD
from tests.endings.scene import MESSAGES, MINE, PRINTED, Job

from holdfast.client.database.store import open_database
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.flaky_link import Connection, Crossing, Direction, KafkaLink

PRODUCE: Final = 0
MESSAGE_BYTES_MAX: Final = 100_000
"""Of the topics: what is larger is refused."""
READ_SECONDS_MAX: Final = 60.0
PYTHON_COULD_NOT_FLUSH: Final = 120
"""The exit code of an interpreter whose stdout was gone when it ended."""
STOPPED: Final = (
    "return",
    "sigint",
    "sigterm",
    "sigterm-closes",
    "cancelled",
    "subprocess",
    "fork-idle",
    "fork-use",
    "stderr-closed",
    "stderr-broken",
)
"""Ways by which a client that runs a handler is told to stop: what was handled is committed then."""
_NUMBER = re.compile(rb"^<(\d+)>")
_SAID = re.compile(r"(\d+) messages? (?:was|were|had) not (?:been )?delivered")


class DeafLink(KafkaLink):
    """Lets every request through but those to produce, and notes whose did not arrive."""

    def __init__(self, root: str) -> None:
        self._root = root
        super().__init__()

    async def _passes(self, connection: Connection, direction: Direction, crossing: Crossing) -> bool:
        if direction == "requests" and crossing.api_key == PRODUCE:
            Path(self._root, connection.client_id or "", "in-flight").touch()
            return False
        return await super()._passes(connection, direction, crossing)


class Ended(NamedTuple):
    """How a program ended, and what is to be found of its messages."""

    job: Job
    how: str
    """The exit code, or `hung`."""
    stderr: str
    accepted: set[int]
    """What the client took, or what its handler finished."""
    arrived: Counter[int]
    """What is in the topic, or in that of the outputs, or in the database."""
    committed: int = 0
    """How far the group has read."""

    def file(self, name: str) -> str:
        try:
            return Path(self.job.path(name)).read_text()
        except FileNotFoundError:
            return ""


class World:
    """Brokers, topics and programs of one session."""

    def __init__(self, root: Path) -> None:
        self._root = root
        settings = {"group.initial.rebalance.delay.ms": "0", "auto.create.topics.enable": "false"}
        self._broker = BrokerProcess(str(root / "broker"), settings=settings)
        self._link = DeafLink(str(root))
        self._deaf = BrokerProcess(
            str(root / "deaf"),
            settings={**settings, "advertised.listeners": f"PLAINTEXT://{self._link.address}"},
            listen=f"{own_address()}:9092",
        )

    def __enter__(self) -> Self:
        self._broker.start()
        self._deaf.start()
        self._link.lead_to(self._deaf.bootstrap_servers)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._link.close()
        self._deaf.crash()
        self._broker.crash()

    def run(
        self, combinations: Sequence[Combination], at_a_time: int, times: int = 1
    ) -> dict[Combination, list[str]]:
        """The faults of each, run so many times."""
        jobs = [self._job(each, number) for number in range(times) for each in combinations]
        self._make_topics(jobs)
        self._fill([job for job in jobs if job.combination.is_member])
        run_nursery(jobs, at_a_time, self._broker.bootstrap_servers)
        arrived = self._read(self._broker, [topic for job in jobs for topic in topics_of(job)])
        found: dict[Combination, list[str]] = {each: [] for each in combinations}
        for job in jobs:
            found[job.combination] += faults(self._ended(job, arrived))
        return found

    def _job(self, each: Combination, number: int) -> Job:
        directory = self._root / (each.id if not number else f"{each.id}-{number}")
        directory.mkdir()
        return Job(*each, self._broker.bootstrap_servers, self._link.address, str(directory))

    def _make_topics(self, jobs: Sequence[Job]) -> None:
        silent = [job.topic for job in jobs if job.under_way == "in-flight" and not job.combination.is_member]
        for broker, topics in (
            (self._broker, [topic for job in jobs for topic in topics_of(job)]),
            (self._deaf, silent),
        ):
            admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
            config = {"max.message.bytes": str(MESSAGE_BYTES_MAX)}
            made = (
                admin.create_topics([NewTopic(topic, 1, 1, config=config) for topic in topics])
                if topics
                else {}
            )
            for future in made.values():
                future.result()

    def _fill(self, jobs: Sequence[Job]) -> None:
        """Messages to read, and databases to put them into."""
        producer = RawProducer({"bootstrap.servers": self._broker.bootstrap_servers})
        for job in jobs:
            for number in range(MESSAGES):
                producer.produce(job.topic, b"<%d>" % number, partition=0)
            if job.client == "DatabaseSink":
                shutil.copy(self._empty_database, job.path("sink.sqlite"))
        assert producer.flush(60) == 0, "the topics could not be filled"

    @cached_property
    def _empty_database(self) -> str:
        path = str(self._root / "empty.sqlite")
        database = open_database(path)
        database.connect()
        database.migrate()
        database.connection.execute("create table stored (number integer)")
        database.close()
        return path

    def _read(self, broker: BrokerProcess, topics: Sequence[str]) -> dict[str, Counter[int]]:
        found: dict[str, Counter[int]] = {topic: Counter() for topic in topics}
        consumer = RawConsumer(
            {
                "bootstrap.servers": broker.bootstrap_servers,
                "group.id": "judge",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 10,
            }
        )
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING) for topic in topics])
        left = set(topics)
        deadline = time.monotonic() + READ_SECONDS_MAX
        while left:
            assert time.monotonic() < deadline, f"{len(left)} topics cannot be read to their ends"
            for message in consumer.consume(1000, timeout=0.05):
                topic, error = str(message.topic()), message.error()
                if error is None:
                    found[topic][number_of(message.value() or b"")] += 1
                else:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    left.discard(topic)
        consumer.close()
        return found

    def _ended(self, job: Job, arrived: dict[str, Counter[int]]) -> Ended:
        ended = Ended(job, Path(job.path("ended")).read_text(), "", set(), arrived[job.topic])
        is_member = job.combination.is_member
        ended = ended._replace(
            stderr=ended.file("stderr"),
            accepted=set(map(int, ended.file("finished" if is_member else "accepted").split())),
        )
        if job.client == "DatabaseSink":
            stored, position = read_database(job)
            return ended._replace(arrived=stored, committed=position)
        if job.client == "Processor":
            ended = ended._replace(arrived=arrived[job.outputs])
        return ended._replace(committed=self._committed(job)) if is_member else ended

    def _committed(self, job: Job) -> int:
        consumer = RawConsumer(
            {
                "bootstrap.servers": self._broker.bootstrap_servers,
                "group.id": job.topic,
                "isolation.level": "read_uncommitted",  # a transaction that is open has committed nothing
            }
        )
        (place,) = consumer.committed([TopicPartition(job.topic, 0)], timeout=30)
        consumer.close()
        return max(0, int(place.offset))


def read_database(job: Job) -> tuple[Counter[int], int]:
    """What a sink has stored, and how far it says it is."""
    with closing(sqlite3.connect(job.path("sink.sqlite"))) as database:
        stored = Counter(number for (number,) in database.execute("select number from stored"))
        position = database.execute("select max(position) from holdfast_positions").fetchone()[0]
        return stored, max(0, position or 0)


def own_address() -> str:
    """One of the millions of addresses of this machine that no other process uses: every port of it is free."""
    number = os.getpid()
    return f"127.{1 + (number >> 16) % 250}.{(number >> 8) % 256}.{number % 256}"


def topics_of(job: Job) -> list[str]:
    return [job.topic, job.outputs] if job.client == "Processor" else [job.topic]


def number_of(value: bytes) -> int:
    found = _NUMBER.match(value)
    assert found is not None, value
    return int(found.group(1))


def run_nursery(jobs: Sequence[Job], at_a_time: int, bootstrap: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "tests.endings.nursery", str(at_a_time), bootstrap],
        input=json.dumps(jobs).encode(),
        check=True,
    )


# The verdict


def faults(ended: Ended) -> list[str]:
    """What was promised and not kept, and what the program said."""
    if ended.how == "hung":
        return [f"hung {ended.stderr}\n{ended.file('stacks')}"]
    code = int(ended.how)
    of_messages = _faults_of_reading if ended.job.combination.is_member else _faults_of_sending
    found = [*of_messages(ended, code), *_faults_of_child(ended), *_faults_of_things(ended)]
    return [*found, ended.stderr] if found and ended.stderr else found


def _faults_of_sending(ended: Ended, code: int) -> Iterable[str]:
    each = ended.job.combination
    missing = {number for number in ended.accepted if not ended.arrived[number] and number != CHILD}
    if not ended.accepted:
        yield "the program did not come so far as to send anything"
    if not missing:
        yield from _faults_of_success(ended, code)
        return
    if code == 0:
        yield f"{len(missing)} of {len(ended.accepted)} messages are lost, and the exit code is 0"
    elif not WAYS[each.way].is_mute and not each.is_killed and named(ended.stderr) < len(missing):
        yield f"{len(missing)} messages are lost, and {named(ended.stderr)} are spoken of"


def _faults_of_success(ended: Ended, code: int) -> Iterable[str]:
    """A program that lost nothing ends as it meant to, and cries no wolf."""
    each = ended.job.combination
    if code != each.meant and not (each.way == "stdout-broken" and code == PYTHON_COULD_NOT_FLUSH):
        yield f"nothing is lost, and the exit code is {code}"
    # A thread that is cut off by the end of the interpreter may say so.
    if each.meant == 0 and "Traceback" in ended.stderr and not each.way.startswith("daemon-"):
        yield "nothing is lost, and there is a traceback"


def _faults_of_reading(ended: Ended, code: int) -> Iterable[str]:
    """Whatever is not finished is not committed, and so is read again; what is stored with positions is stored once."""
    done = set(range(ended.committed))
    if not done <= ended.accepted:
        yield f"committed up to {ended.committed}, and {sorted(done - ended.accepted)} were not handled"
    if ended.job.client != "Consumer" and ended.arrived != Counter(done):
        yield f"committed up to {ended.committed}, and the results are those of {sorted(ended.arrived.elements())}"
    if ended.job.way in STOPPED and not ended.accepted <= done:
        yield f"stopped, and what was handled, {sorted(ended.accepted)}, is committed up to {ended.committed}"
    yield from _faults_of_success(ended, code)


def _faults_of_child(ended: Ended) -> Iterable[str]:
    child = ended.file("child")
    if not ended.job.way.startswith("fork-"):
        return
    if not child or child == "-9":
        yield "the forked child hung" if child else "no child was forked"
    elif CHILD in ended.accepted and not ended.arrived[CHILD] and child == "0":
        yield "the forked child's message is lost, and its exit code is 0"
    elif CHILD not in ended.accepted and child != "0" and ended.job.way == "fork-idle":
        yield f"the forked child sent nothing, and its exit code is {child}"


def _faults_of_things(ended: Ended) -> Iterable[str]:
    """What is the user's: files that were not flushed, functions that run at the end."""
    if ended.job.combination.is_killed:
        return
    if not ended.file("mine").startswith(MINE):
        yield "the user's file was not flushed"
    if not ended.file("atexit"):
        yield "the user's exit function did not run"
    # A forked child has what is in the buffers too.
    lines = set(ended.file("stdout").splitlines()) if ended.job.way != "stdout-broken" else {PRINTED}
    if lines != {PRINTED}:
        yield f"the user printed one line, and there is {sorted(lines)}"


def named(stderr: str) -> int:
    """How many messages the program said were not delivered."""
    return max(map(int, _SAID.findall(stderr)), default=0)


# A table for people


def table(results: dict[Combination, list[str]]) -> str:
    """One line per way and client: what held, and what did not, by what was under way."""
    lines = []
    for (client, way), together in _grouped(results).items():
        bad = {under_way: found for under_way, found in together.items() if found}
        said = "; ".join(
            f"{under_way}: {', '.join(each[:90].strip() for each in found)}"
            for under_way, found in bad.items()
        )
        lines.append(f"{client:14} {way:20} {len(together) - len(bad)}/{len(together)} {said}".rstrip())
    held = sum(not found for found in results.values())
    return "\n".join([*lines, f"{held} of {len(results)} combinations hold"])


def _grouped(results: dict[Combination, list[str]]) -> dict[tuple[str, str], dict[str, list[str]]]:
    grouped: dict[tuple[str, str], dict[str, list[str]]] = {}
    for each, found in results.items():
        grouped.setdefault((each.client, each.way), {})[each.under_way] = found
    return grouped

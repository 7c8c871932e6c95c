"""Our clients under chaos, real processes: killed, stopped and added, the broker killed, frozen and cut off. P, C, X.

A failure names its seed, and the directory with the histories and what every process said.
"""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support.chaos import Observer, Source, Swarm, await_end, check_at_least_once, check_positions
from tests.support.client_chaos import (
    ClientStorm,
    Crashing,
    Row,
    Shore,
    await_stored,
    check_copied,
    check_never_ahead,
    check_rows,
    check_spooled,
    clients,
    deduplicated,
    finished_by,
    read_spooled,
    stored_by,
    unclean,
)
from tests.support.client_chaos_member import TABLE, is_poison
from tests.support.history import Violation

from holdfast.client.database.store import open_database
from holdfast.client.producer import Guarantee
from holdfast.testing.kafka_fixtures import unavailable
from holdfast.testing.postgres import NoPostgres, PostgresServer

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900), pytest.mark.check]

TOPIC, TARGET, LETTERS, GROUP = "storm", "storm-copy", "storm-dlt", "storm"
PARTITIONS = 8
MEMBERS = 3
PER_SECOND = 400
WRITTEN_MIN = PARTITIONS * 10
"""Messages before the storm breaks loose: without them it would prove nothing."""
END_SECONDS_MAX = 90.0


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--chaos-kills"))


@pytest.fixture
def shore(tmp_path: Path) -> Iterator[Shore]:
    shore = Shore(tmp_path)
    shore.engine.create_topic(TOPIC, PARTITIONS)
    yield shore
    shore.close()


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    """One of its own, because it is killed."""
    try:
        server = PostgresServer()
    except NoPostgres as missing:
        unavailable(str(missing))
    with server:
        yield server


class Chaos:
    """A topic that is written to, a group of clients that reads it, a storm over both; then calm until all is done."""

    def __init__(
        self, shore: Shore, directory: Path, seed: int, server: Crashing | None = None, **options: Any
    ) -> None:
        wanted = {"bootstrap_servers": shore.bootstrap_servers, "group": GROUP, "topic": TOPIC, **options}
        self.swarm: Swarm = clients(directory, wanted)
        self.storm = ClientStorm(seed, self.swarm, shore, MEMBERS, server)
        self.source = Source(shore.bootstrap_servers, TOPIC, PARTITIONS, PER_SECOND)
        self.observer = Observer(shore.broker.bootstrap_servers, GROUP, TOPIC, PARTITIONS)

    def run(self, kills: int, await_all: Callable[[Chaos], None]) -> None:
        with ExitStack() as stack:
            stack.callback(self.swarm.end)
            for _ in range(MEMBERS):
                self.swarm.add()
            self.source.start()
            self.observer.start()
            self.source.await_acknowledged(WRITTEN_MIN)
            self.storm.rage_until(kills)
            self.source.finish()
            self.observer.finish()
            await_all(self)
            codes = self.swarm.end()
        print("\n".join(self.storm.log))
        assert not unclean(codes, self.swarm)
        written = sum(map(len, self.source.acknowledged.values()))
        print(f"{self.storm.killed} clients killed, {written} messages")
        assert written >= WRITTEN_MIN


def until_committed(chaos: Chaos) -> None:
    await_end(chaos.observer, chaos.swarm, chaos.source.ends())


def drain(shore: Shore, home: str) -> None:
    """Deliver what the dead have left, however many they are: a producer takes over a few at a time."""
    command = [sys.executable, "-m", "holdfast.cli", "spool", "drain", "--spool", home]
    command += ["--bootstrap-server", shore.bootstrap_servers]
    command += ["--timeout-ms", str(int(END_SECONDS_MAX * 1000))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=END_SECONDS_MAX * 2)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("guarantee", ["at-least-once", pytest.param("exactly-once", marks=pytest.mark.long)])
def test_every_message_reported_stored_arrives_in_order_and_once(
    guarantee: Guarantee, shore: Shore, tmp_path: Path, chance: random.Random, kills: int
) -> None:
    home = str(tmp_path / "home")
    swarm = clients(
        tmp_path,
        {
            "role": "producer",
            "bootstrap_servers": shore.bootstrap_servers,
            "topic": TOPIC,
            "home": home,
            "delivery": guarantee,
        },
    )
    storm = ClientStorm(chance.randrange(1 << 32), swarm, shore, MEMBERS)
    with ExitStack() as stack:
        stack.callback(swarm.end)
        for _ in range(MEMBERS):
            swarm.add()
        await_stored(swarm, WRITTEN_MIN)
        storm.rage_until(kills)
        codes = swarm.end()
    print("\n".join(storm.log))
    assert not unclean(codes, swarm)
    drain(shore, home)
    stored = stored_by(swarm)
    arrived = read_spooled(shore.bootstrap_servers, TOPIC, PARTITIONS)
    print(
        f"{storm.killed} producers killed, {sum(stored.values())} messages stored, "
        f"{sum(map(len, arrived.values()))} in the topic"
    )
    assert sum(stored.values()) >= WRITTEN_MIN
    check_spooled(stored, arrived, exactly_once=guarantee == "exactly-once")
    if any(len(deduplicated(*each)) < len(each[1]) for each in arrived.items()):
        # What at least once leaves to deduplication is what exactly once must not show.
        with pytest.raises(Violation, match="twice"):
            check_spooled(stored, arrived, exactly_once=True)


@pytest.mark.parametrize(
    ("assignor", "order"),
    [
        pytest.param("range", "none", marks=pytest.mark.long),
        ("cooperative-sticky", "key"),
        pytest.param("uniform", "partition", marks=pytest.mark.long),
    ],
)
def test_every_message_is_handled_and_no_position_is_ahead_of_finished_work(
    assignor: str, order: str, shore: Shore, tmp_path: Path, chance: random.Random, kills: int
) -> None:
    seed = chance.randrange(1 << 32)
    chaos = Chaos(shore, tmp_path, seed, role="consumer", assignor=assignor, order=order)
    chaos.run(kills, until_committed)
    events = chaos.swarm.events()
    check_at_least_once(events, chaos.source.acknowledged)
    check_positions(events, chaos.observer.seen)
    check_never_ahead(finished_by(chaos.swarm), chaos.observer.answered)


@pytest.mark.long
def test_a_consumer_that_commits_by_time_is_caught(
    shore: Shore, tmp_path: Path, chance: random.Random
) -> None:
    # HF301
    chaos = Chaos(shore, tmp_path, chance.randrange(1 << 32), role="hasty", assignor="range")
    chaos.run(1, until_committed)
    with pytest.raises(Violation, match="ahead"):
        check_never_ahead(finished_by(chaos.swarm), chaos.observer.answered)


@pytest.mark.parametrize("assignor", ["range", pytest.param("cooperative-sticky", marks=pytest.mark.long)])
def test_a_processor_copies_every_message_once(
    assignor: str, shore: Shore, tmp_path: Path, chance: random.Random, kills: int
) -> None:
    shore.engine.create_topic(TARGET, PARTITIONS)
    shore.engine.create_topic(LETTERS, PARTITIONS)
    seed = chance.randrange(1 << 32)
    chaos = Chaos(shore, tmp_path, seed, role="processor", assignor=assignor, target=TARGET)
    chaos.run(kills, until_committed)
    source = shore.engine.read(TOPIC, PARTITIONS)
    assert source == {
        index: [some[offset] for offset in sorted(some)] for index, some in chaos.source.acknowledged.items()
    }
    good, poison = divided(source)
    check_copied(good, shore.engine.read(TARGET, PARTITIONS))
    check_copied(poison, shore.engine.read(LETTERS, PARTITIONS))


def divided(source: Mapping[int, list[str]]) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """What is to be handled, and what is to be set aside."""
    good = {index: [each for each in values if not is_poison(each)] for index, values in source.items()}
    return good, {index: [each for each in values if is_poison(each)] for index, values in source.items()}


def check_stored(chaos: Chaos, shore: Shore, url: str) -> None:
    """Every message is in the table once, or set aside: there perhaps twice, by a sink that died on it."""
    written = chaos.source.acknowledged
    good = {
        index: {offset: each for offset, each in some.items() if not is_poison(each)}
        for index, some in written.items()
    }
    check_rows(good, rows_of(url))
    aside = shore.engine.read(LETTERS, PARTITIONS)
    for index, some in written.items():
        assert set(aside[index]) == {each for each in some.values() if is_poison(each)}


def prepare(url: str) -> None:
    database = open_database(url)
    database.connect()
    database.migrate()
    database.run(f"create table {TABLE} (part integer, off bigint, value text)", {})
    database.close()


def until_stored(url: str) -> Callable[[Chaos], None]:
    def wait(chaos: Chaos) -> None:
        deadline = time.monotonic() + END_SECONDS_MAX
        ends = {(TOPIC, index): end for index, end in chaos.source.ends().items()}
        database = open_database(url)
        database.connect()
        while True:
            stands = {key: each.position for key, each in database.positions(GROUP, ends).items()}
            if stands == ends:
                break
            chaos.swarm.require_alive()
            assert time.monotonic() < deadline, f"the sink stands at {stands} and not at {ends}"
            time.sleep(0.1)
        database.close()

    return wait


def rows_of(url: str) -> list[Row]:
    database = open_database(url)
    database.connect()
    rows = [Row(*each) for each in database.run(f"select part, off, value from {TABLE}", {}).fetchall()]
    database.close()
    return rows


@pytest.mark.parametrize("pipeline", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_sink_into_postgresql_stores_every_message_once(
    pipeline: bool, postgres: PostgresServer, shore: Shore, tmp_path: Path, chance: random.Random, kills: int
) -> None:
    prepare(postgres.url)
    shore.engine.create_topic(LETTERS, PARTITIONS)
    seed = chance.randrange(1 << 32)
    wanted = {"role": "sink", "assignor": "cooperative-sticky", "database": postgres.url}
    chaos = Chaos(shore, tmp_path, seed, postgres, pipeline=pipeline, **wanted)
    chaos.run(kills, until_stored(postgres.url))
    check_stored(chaos, shore, postgres.url)


@pytest.mark.long
def test_a_sink_into_sqlite_stores_every_message_once(
    shore: Shore, tmp_path: Path, chance: random.Random, kills: int
) -> None:
    url = str(tmp_path / "sink.db")
    prepare(url)
    shore.engine.create_topic(LETTERS, PARTITIONS)
    seed = chance.randrange(1 << 32)
    chaos = Chaos(shore, tmp_path, seed, role="sink", assignor="range", database=url)
    chaos.run(kills, until_stored(url))
    check_stored(chaos, shore, url)
    with sqlite3.connect(url) as connection:
        assert connection.execute("pragma integrity_check").fetchone() == ("ok",)

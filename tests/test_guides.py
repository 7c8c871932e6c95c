"""The guides hold: every program in them runs, every command in them and in the examples exists."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import OFFSET_END, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from tests.support.caught_up import has_caught_up

from holdfast.testing.broker import BrokerProcess
from holdfast.testing.kafka_fixtures import unavailable
from holdfast.testing.postgres import NoPostgres, PostgresServer
from holdfast.testing.processes import die_with_parent
from holdfast.testing.schema_registry import SchemaRegistry

ROOT = Path(__file__).parents[1]
CLIENTS = (
    "send-without-losing",
    "process-without-losing",
    "exactly-once-into-postgresql",
    "processors-and-state",
    "reading-topics",
)
GUIDES = [ROOT / "docs" / "guides" / f"{name}.md" for name in CLIENTS]
RUNNING = ROOT / "docs" / "guides" / "running-the-broker.md"
TOPICS = re.compile(r"holdfast topics create --topic (\S+) --partitions (\d+)")
"""A guide says which topics its programs need, and they get no others."""
FILLED = {"orders", "payments"}
ADDRESS = "postgresql://app@localhost/shop"
WAIT_SECONDS_MAX = 100.0
LOOK_SECONDS = 0.2


def programs(guide: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", guide.read_text(), re.DOTALL | re.MULTILINE)


def fill(bootstrap_servers: str, guide: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    made = admin.create_topics([NewTopic(name, int(count), 1) for name, count in TOPICS.findall(guide)])
    for future in made.values():
        future.result(60)
    for topic in made.keys() & FILLED:
        send(bootstrap_servers, topic, range(30))


def send(bootstrap_servers: str, topic: str, numbers: Iterable[int]) -> None:
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    for number in numbers:
        order = {"id": number, "customer": f"customer-{number % 5}"}
        producer.produce(topic, json.dumps(order), str(number))
    assert producer.flush(60) == 0


@pytest.fixture
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    """A PostgreSQL for the guide that needs one."""
    try:
        server = PostgresServer()
    except NoPostgres as missing:
        unavailable(str(missing))
    with server:
        migrate(server.url)
        yield server.url


def migrate(url: str, directory: Path | None = None) -> None:
    command = [sys.executable, "-m", "holdfast.cli", "sink", "migrate", "--database", url]
    subprocess.run(command, check=True, timeout=60, cwd=directory, stdout=subprocess.DEVNULL)


@pytest.mark.check
@pytest.mark.holdfast(settings={"group.initial.rebalance.delay.ms": "0"})
@pytest.mark.parametrize("guide", GUIDES, ids=lambda each: each.stem)
def test_every_program_of_a_guide_runs(
    guide: Path,
    holdfast_broker: BrokerProcess,
    holdfast_schema_registry: SchemaRegistry,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    addresses = {
        "localhost:9092": holdfast_broker.bootstrap_servers,
        "http://localhost:8081": holdfast_schema_registry.url,
    }
    if ADDRESS in guide.read_text():
        addresses[ADDRESS] = request.getfixturevalue("database")
        migrate("shop.sqlite", tmp_path)
    fill(holdfast_broker.bootstrap_servers, guide.read_text())
    found = programs(guide)
    assert found
    for text in found:
        for written, real in addresses.items():
            text = text.replace(written, real)
        run(text, holdfast_broker, tmp_path)


def run(
    text: str,
    broker: BrokerProcess,
    directory: Path,
    *,
    is_done: Callable[[], bool] | None = None,
    code: int = 0,
) -> str:
    """To its end; a program that has none is interrupted when there is nothing left to do for its group."""
    errors = directory / "errors.txt"
    with errors.open("w") as log:
        program = subprocess.Popen(
            [sys.executable, "-c", text],
            cwd=directory,
            stdout=subprocess.DEVNULL,
            stderr=log,
            preexec_fn=die_with_parent(),
        )
    try:
        groups = re.findall(r'group="([^"]+)"', text)
        topics = re.findall(r'(?:topics=\[|@app.handler\()"([^"]+)"', text)
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        has_ended = is_done or (
            lambda: all(has_caught_up(broker.bootstrap_servers, group, topics) for group in groups)
        )
        while program.poll() is None and groups:
            assert time.monotonic() < deadline, f"{text}\n{errors.read_text()}"
            if has_ended():
                program.send_signal(signal.SIGINT)
                break
            time.sleep(LOOK_SECONDS)
        assert program.wait(WAIT_SECONDS_MAX) == code, f"{text}\n{errors.read_text()}"
        return errors.read_text()
    finally:
        program.kill()
        program.wait()


@pytest.mark.check
@pytest.mark.holdfast(settings={"group.initial.rebalance.delay.ms": "0"})
def test_a_database_restored_from_an_earlier_backup_gets_every_order_once(
    holdfast_broker: BrokerProcess, database: str, tmp_path: Path
) -> None:
    """Where the log no longer holds what is to be read again, the program stops and says so."""
    guide = (ROOT / "docs" / "guides" / "exactly-once-into-postgresql.md").read_text()
    assert "restored from a backup that is older than the broker's retention" in guide
    program = programs(ROOT / "docs" / "guides" / "exactly-once-into-postgresql.md")[0]
    for written, real in (("localhost:9092", holdfast_broker.bootstrap_servers), (ADDRESS, database)):
        program = program.replace(written, real)

    def sales() -> list[int]:
        with psycopg.connect(database) as connection:
            return [number for (number,) in connection.execute("select id from sales order by id")]

    def restore() -> None:
        subprocess.run(["psql", "-q", "-v", "ON_ERROR_STOP=1", "-d", database, "-f", backup], check=True)
        assert sales() == list(range(30))

    def has_all() -> bool:
        """Half of them are in a backup that is made meanwhile."""
        if not backup.exists() and len(sales()) == 30:
            subprocess.run(["pg_dump", "--clean", "-f", backup, database], check=True)
            send(holdfast_broker.bootstrap_servers, "orders", range(30, 60))
        return len(sales()) >= 60

    backup = tmp_path / "backup.sql"
    with psycopg.connect(database) as connection:  # the program does it too, but is asked before it has
        connection.execute("create table sales (id bigint, customer text)")
    fill(holdfast_broker.bootstrap_servers, guide)
    for _ in range(2):
        run(program, holdfast_broker, tmp_path, is_done=has_all)
        assert sales() == list(range(60))
        restore()
    admin = AdminClient({"bootstrap.servers": holdfast_broker.bootstrap_servers})
    ends = [TopicPartition("orders", partition, OFFSET_END) for partition in range(3)]
    for future in admin.delete_records(ends).values():
        future.result(60)
    assert "CommittedOffsetLost" in run(program, holdfast_broker, tmp_path, is_done=lambda: False, code=1)
    assert sales() == list(range(30))


def test_every_guide_ends_with_what_it_does_not_protect_against() -> None:
    for guide in (*GUIDES, RUNNING):
        headings = re.findall(r"^## (.*)$", guide.read_text(), re.MULTILINE)
        assert headings[-1] == "What it does not protect against", guide.name


def test_the_broker_does_say_what_its_guide_quotes() -> None:
    table = RUNNING.read_text().partition("| it says |")[2].partition("\n\n")[0]
    quoted = [words for row in table.splitlines()[2:] for words in re.findall("`([^`]+)`", row.split("|")[1])]
    assert len(quoted) > 10
    sources = [file.read_text() for file in (ROOT / "src" / "holdfast" / "broker").rglob("*.py")]
    for words in quoted:
        assert any(words in source for source in sources), words


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Commands with their flags."""
    for line in re.findall(r"(?<![\w/])holdfast ((?:[a-z-]+ ?)+(?:[^`#\n|]*))", text):
        words = line.split()
        name = " ".join(
            words[: next((i for i, word in enumerate(words) if not re.fullmatch("[a-z-]+", word)), None)]
        )
        yield name, [word.partition("=")[0] for word in words if word.startswith("--")]


@pytest.mark.parametrize(
    "page",
    [
        *sorted((ROOT / "docs" / "guides").glob("*.md")),
        *sorted((ROOT / "examples").glob("*.py")),
        ROOT / "examples" / "README.md",
        ROOT / "README.md",
        ROOT / "docs" / "quick-start.md",
        ROOT / "docs" / "UPGRADING.md",
    ],
    ids=lambda each: each.name,
)
def test_every_command_in_guides_and_examples_exists(page: Path) -> None:
    reference = (ROOT / "docs" / "CLI.md").read_text()
    pattern = re.compile(r"^## holdfast ([a-z -]+)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
    sections: dict[str, str] = dict(pattern.findall(reference))
    common = reference.partition("## Common flags")[2].partition("\n## ")[0]
    for name, flags in commands(page.read_text()):
        known = [each for each in sections if name == each or name.startswith(f"{each} ")]
        if not flags and not known:
            continue  # a sentence about holdfast
        assert known, f"{page.name}: holdfast {name}"
        for flag in flags:
            assert f"`{flag}`" in sections[max(known, key=len)] + common, (
                f"{page.name}: holdfast {name} {flag}"
            )

"""The command run as its users run it: a process, against a broker.

`bootstrap_servers` is the one place that decides which broker: HOLDFAST_TEST_BOOTSTRAP names one that runs
already (Apache Kafka, say); otherwise ours is started. Modules whose commands must behave alike on Apache Kafka
put `engine_address` in its place, and every test of theirs runs twice.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator

import pytest
from tests.support.forked import open_process

Result = subprocess.CompletedProcess[bytes]
RUN_TIMEOUT_S = 60
Run = Callable[..., Result]
LIBRARY_LINE = re.compile(rb"%\d\|\d+\.\d+\|[A-Z]+\|rdkafka#")
"""How librdkafka logs to standard error."""
QUICK_GROUPS = {"group.initial.rebalance.delay.ms": "0"}
OUR_BROKER_LATER = pytest.mark.parametrize(
    "engine_address",
    [
        pytest.param("holdfast", marks=pytest.mark.long),
        pytest.param("apache", marks=pytest.mark.apache_kafka),
    ],
    indirect=True,
)
"""Each line costs a JVM: `make check` holds our words against those of Kafka's tool on one of the engines."""


@pytest.fixture(scope="session")
def our_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One broker for all tests here: each uses topics of its own."""
    given = os.environ.get("HOLDFAST_TEST_BOOTSTRAP")
    if given:
        yield given
        return
    from holdfast.testing.broker import BrokerProcess

    directory = tmp_path_factory.mktemp("cli") / "holdfast"
    with BrokerProcess(str(directory), settings=QUICK_GROUPS) as broker:
        yield broker.bootstrap_servers


@pytest.fixture(scope="session")
def bootstrap_servers(our_address: str) -> str:
    return our_address


@pytest.fixture(scope="session", params=["holdfast", pytest.param("apache", marks=pytest.mark.apache_kafka)])
def engine_address(request: pytest.FixtureRequest) -> str:
    """Both engines, one after the other."""
    if os.environ.get("HOLDFAST_TEST_BOOTSTRAP") or request.param == "holdfast":
        return str(request.getfixturevalue("our_address"))
    return str(request.getfixturevalue("apache_kafka").bootstrap_servers)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "holdfast.cli", *arguments]


def environment(**settings: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "HOLDFAST_BOOTSTRAP_SERVER"}
    return kept | {"COLUMNS": "200"} | settings


@pytest.fixture
def run_anywhere() -> Run:
    """Run the command without a broker in its environment."""

    def run(*arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> Result:
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with open_process(command(*arguments), env=environment(**(env or {})), **streams) as process:
            try:
                output, errors = process.communicate(stdin, timeout=RUN_TIMEOUT_S)
            except BaseException:
                process.kill()
                raise
        return Result(arguments, process.returncode, output, errors)

    return run


@pytest.fixture
def run(run_anywhere: Run, bootstrap_servers: str) -> Run:
    """Run the command against the broker."""

    def run_there(*arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> Result:
        settings = {"HOLDFAST_BOOTSTRAP_SERVER": bootstrap_servers} | (env or {})
        return run_anywhere(*arguments, stdin=stdin, env=settings)

    return run_there


@pytest.fixture
def run_here_anywhere(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Run the command within this process, which is many times as fast; `serve` is not among its commands.

    What clients of earlier tests log here meanwhile is not the command's; that a command lets nothing of librdkafka's
    through is seen where it runs as a process.
    """
    from holdfast.cli import exits
    from holdfast.cli.app import run_command

    monkeypatch.delenv("HOLDFAST_BOOTSTRAP_SERVER", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def run_inside(*arguments: str) -> Result:
        capfdbinary.readouterr()
        code = exits.run(lambda: run_command(arguments))
        captured = capfdbinary.readouterr()
        said = b"".join(
            line for line in captured.err.splitlines(keepends=True) if not LIBRARY_LINE.match(line)
        )
        return Result(arguments, code, captured.out, said)

    return run_inside


@pytest.fixture
def run_here(run_here_anywhere: Run, bootstrap_servers: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command against the broker, within this process."""
    monkeypatch.setenv("HOLDFAST_BOOTSTRAP_SERVER", bootstrap_servers)
    return run_here_anywhere


@pytest.fixture
def start(bootstrap_servers: str) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start the command against the broker and leave it running; it is ended with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(*arguments: str) -> subprocess.Popen[bytes]:
        process = open_process(
            command(*arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(HOLDFAST_BOOTSTRAP_SERVER=bootstrap_servers),
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def make_topic(run: Run) -> Iterator[Callable[..., str]]:
    """Create topics with names of their own, and delete them afterwards."""
    made: list[str] = []

    def make(*flags: str, prefix: str = "cli") -> str:
        name = f"{prefix}-{uuid.uuid4().hex[:12]}"
        result = run("topics", "create", "--topic", name, *flags)
        assert result.returncode == 0, result.stderr
        made.append(name)
        return name

    yield make
    if made and os.environ.get("HOLDFAST_TEST_BOOTSTRAP"):  # our own broker goes with its directory
        run("topics", "delete", "--topic", "|".join([*made, ""]), "--if-exists")


@pytest.fixture
def topic(make_topic: Callable[..., str]) -> str:
    """A topic with one partition."""
    return make_topic("--partitions", "1")


@pytest.fixture
def dead_address() -> Iterator[str]:
    """An address where nobody listens, and nobody else can: it stays taken."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
def silent_listener() -> Iterator[socket.socket]:
    """A socket that accepts connections and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening


@pytest.fixture
def silent_address(silent_listener: socket.socket) -> str:
    return f"127.0.0.1:{silent_listener.getsockname()[1]}"

"""What systemd is told, heard by a socket of the test's own in its place."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest
from tests.support.forked import open_process

from holdfast.broker.server.run import tell_alive
from holdfast.supervisor import Supervisor
from holdfast.testing.broker import BrokerProcess

WAIT_SECONDS_MAX: Final = 60.0
WATCHDOG_USEC: Final = "40000"
Heard = Callable[[], dict[str, str]]


def listening(address: str) -> tuple[socket.socket, Heard]:
    ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ear.bind(address.replace("@", "\0", 1))
    ear.settimeout(WAIT_SECONDS_MAX)

    def heard() -> dict[str, str]:
        """The next datagram, by name."""
        return dict(line.split("=", 1) for line in ear.recv(4096).decode().splitlines())

    return ear, heard


@pytest.fixture(params=["a path", "an abstract name"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "notify") if request.param == "a path" else f"@holdfast-test-{uuid.uuid4().hex}"


def test_a_broker_says_when_it_listens_lives_and_stops(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ear, heard = listening(address)
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    monkeypatch.setenv("WATCHDOG_USEC", WATCHDOG_USEC)
    broker = BrokerProcess(str(tmp_path / "data"))
    with closing(ear):
        process = broker.begin_start()
        try:
            assert heard()["STATUS"].startswith("opening the data")
            ready = heard()
            assert ready["READY"] == "1"
            # Whoever waited for it may connect at once.
            host, port = ready["STATUS"].removeprefix("serving on ").rsplit(":", 1)
            socket.create_connection((host, int(port)), WAIT_SECONDS_MAX).close()
            for _ in range(3):
                assert heard() == {"WATCHDOG": "1"}
            process.send_signal(signal.SIGTERM)
            while (said := heard()) == {"WATCHDOG": "1"}:
                pass
            assert said == {"STOPPING": "1", "STATUS": "stopping"}
            assert process.wait(WAIT_SECONDS_MAX) == 0
        finally:
            process.kill()
            process.wait()
        ear.settimeout(0)
        with pytest.raises(BlockingIOError):  # nothing after that, least of all that it lives
            heard()


async def test_a_loop_that_is_held_up_falls_silent(tmp_path: Path) -> None:
    ear, heard = listening(str(tmp_path / "notify"))
    with closing(ear):
        supervisor = Supervisor({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": WATCHDOG_USEC})
        assert supervisor.alive_every_s == pytest.approx(0.02)
        telling = asyncio.create_task(tell_alive(supervisor))
        while not _has_word(ear):
            await asyncio.sleep(0)
        heard()
        time.sleep(5 * supervisor.alive_every_s)  # the loop stands still, and with it its word
        assert not _has_word(ear)
        while not _has_word(ear):
            await asyncio.sleep(0.001)
        telling.cancel()


def _has_word(ear: socket.socket) -> bool:
    return bool(select.select([ear], [], [], 0)[0])


@pytest.mark.parametrize(
    ("environment", "every"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "60000000"}, 0.0),  # nobody to be told
        ({"NOTIFY_SOCKET": "/nowhere"}, 0.0),
        ({"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "60000000"}, 30.0),
        ({"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}, 0.0),
        ({"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "soon"}, 0.0),
    ],
)
def test_how_often_a_sign_of_life_is_wanted(environment: dict[str, str], every: float) -> None:
    assert Supervisor(environment).alive_every_s == every


def test_a_supervisor_that_is_away_or_behind_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    away = Supervisor({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    with caplog.at_level(logging.WARNING):
        away.ready("serving")
        away.alive()
    (line,) = caplog.messages
    assert "READY=1" in line
    # One that has not read for long: a sign of life does not wait for it.
    ear, _ = listening(str(tmp_path / "notify"))
    with closing(ear):
        for _ in range(2000):
            away.alive("x" * 300)
        assert len(ear.recv(4096)) < 300


@pytest.mark.check
def test_an_exporter_is_ready_when_it_has_looked(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    ear, heard = listening(address)
    command = ["-m", "holdfast.cli", "exporter", "--bootstrap-server", "127.0.0.1:1", "--listen", "0"]
    flags = ["--every", "100ms", "--connect-timeout-ms", "1000"]
    environment = {**os.environ, "NOTIFY_SOCKET": address, "WATCHDOG_USEC": WATCHDOG_USEC}
    with closing(ear):
        process = open_process([sys.executable, *command, *flags], env=environment, stderr=subprocess.DEVNULL)
        try:
            assert heard()["READY"] == "1"
            assert heard() == {"WATCHDOG": "1"}
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_SECONDS_MAX) == 130
        finally:
            process.kill()
            process.wait()

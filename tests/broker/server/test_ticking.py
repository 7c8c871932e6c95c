"""The server's clock: whatever an action of a timer does, the next deadline is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.broker.server.server import Server
from holdfast.config.broker import BrokerConfig


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
async def server(tmp_path: Path, said: list[str]) -> AsyncIterator[Server]:
    settings = {"node.id": "1", "log.dirs": str(tmp_path / "data"), "listeners": "PLAINTEXT://127.0.0.1:0"}
    server = Server(BrokerConfig.load(settings)[0], said.append)
    await server.start()
    yield server
    await server.stop()


def broken() -> None:
    raise OSError(116, "Stale file handle")


async def test_a_timer_that_raises_is_told_and_later_ones_still_come(server: Server, said: list[str]) -> None:
    ran: list[str] = []
    over = asyncio.Event()
    timers, now_ms = server.node.timers, server.now().monotonic_ms
    timers.at(now_ms, broken)
    timers.at(now_ms, lambda: ran.append("same time"))
    timers.at(now_ms + 20, broken)
    timers.at(now_ms + 40, over.set)
    await asyncio.wait_for(over.wait(), 30)
    assert ran == ["same time"]
    told = [line for line in said if line.startswith("defect in the timer broken:")]
    assert len(told) == 2
    assert "Stale file handle" in told[0]
    assert __file__ in told[0]


async def test_a_tick_that_raises_is_not_the_last(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    over = asyncio.Event()
    failures: list[BaseException] = []
    server.loop.set_exception_handler(lambda loop, context: failures.append(context["exception"]))
    tick = server.node.tick

    def tick_badly(now: object) -> None:
        monkeypatch.setattr(server.node, "tick", tick)
        broken()

    monkeypatch.setattr(server.node, "tick", tick_badly)
    server.node.timers.at(server.now().monotonic_ms, over.set)
    await asyncio.wait_for(over.wait(), 30)
    assert [type(failure) for failure in failures] == [OSError]

"""The loop while a sink is away: it reads the ledgers again when they can be read, and tries as long as it may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.pipeline.definition.model import ParquetSink, PipelineDefinition, Source
from holdfast.pipeline.engine import running
from holdfast.pipeline.engine.deployment import Deployment
from holdfast.pipeline.engine.home import Home
from holdfast.pipeline.engine.known_sinks import KnownSinks
from holdfast.pipeline.engine.progress import Event, Retrying
from holdfast.pipeline.engine.running import RETRIES_MAX, Loop, Stop
from holdfast.pipeline.sinks.base import SinkUnavailable


class AwayWorkshop:
    """A sink that fails one batch, and then cannot even be asked for its ledger for some time."""

    def __init__(self, looks_in_vain: int) -> None:
        self.ledgers: dict[str, Any] = {}
        self.sinks: dict[str, Any] = {}
        self.at_sink = ""
        self.looks = 0
        self.looks_in_vain = looks_in_vain

    def read_ledgers(self) -> None:
        self.looks += 1
        if self.looks <= self.looks_in_vain:
            raise SinkUnavailable(f"away, look {self.looks}")


class EmptySource:
    def look(self, ledgers: Any) -> dict[Any, Any]:
        return {}

    def beginning(self, logs: Any) -> dict[Any, Any]:
        return {}


class Run:
    """The loop alone: no session, no cluster."""

    def __init__(self, home: Home, looks_in_vain: int) -> None:
        definition = PipelineDefinition(
            name="orders",
            source=Source(topics=("orders",), bootstrap="127.0.0.1:1"),
            sinks=(ParquetSink(path="unused", name="main"),),
        )
        self.events: list[Event] = []
        self.workshop = AwayWorkshop(looks_in_vain)
        self.batches = 0
        self.stop = Stop()
        session: Any = None
        self.loop = Loop(Deployment.of(definition), home, session, {}, self.stop, self.events.append)
        given: Any = self.workshop
        self.loop.workshop = given
        self.loop.known = KnownSinks(home, self.loop.deployed.canonical)

    def one_batch(self, logs: Any, until: Any) -> bool:
        self.batches += 1
        if self.batches == 1:
            raise SinkUnavailable("the connection broke")
        self.stop.ask("enough")
        return False

    def reasons(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, Retrying)]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "BACK_OFF_MS", (1,))


def repeat(run: Run, interval_ms: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    source: Any = EmptySource()
    monkeypatch.setattr(run.loop, "_one_batch", run.one_batch)
    run.loop._repeat(source, interval_ms)


def test_a_run_that_goes_on_waits_for_a_sink_however_long_it_is_away(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = 2 * RETRIES_MAX
    with Home(str(tmp_path / "home"), "orders") as home:
        run = Run(home, away)
        repeat(run, 1, monkeypatch)
    assert run.reasons() == ["the connection broke", *(f"away, look {n}" for n in range(1, away + 1))]
    assert run.workshop.looks == away + 1  # and no batch was tried before they were read
    assert run.batches == 2


def test_a_run_that_ends_gives_up_after_its_retries(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Home(str(tmp_path / "home"), "orders") as home:
        run = Run(home, 2 * RETRIES_MAX)
        with pytest.raises(SinkUnavailable, match=f"away, look {RETRIES_MAX}"):
            repeat(run, None, monkeypatch)
    assert len(run.reasons()) == RETRIES_MAX
    assert run.batches == 1


def test_a_run_that_ends_goes_on_with_a_sink_that_is_back_in_time(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Home(str(tmp_path / "home"), "orders") as home:
        run = Run(home, RETRIES_MAX - 1)
        repeat(run, None, monkeypatch)
    assert run.batches == 2
    assert run.workshop.looks == RETRIES_MAX

"""Groups under chaos, real processes: members killed, stopped and added while the broker itself is killed. C1-C4, X.

A failure names its seed and, where a rule was broken, the file and line of the event that broke it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support.chaos import (
    BROKER_SETTINGS,
    SPARE,
    Observer,
    Source,
    Storm,
    Swarm,
    await_end,
    check_at_least_once,
    check_positions,
)

from holdfast.testing.broker import BrokerProcess
from holdfast.testing.engines import Engine

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900), pytest.mark.check]

TOPIC, TARGET, GROUP = "chaos", "chaos-copy", "chaos"
PARTITIONS = 12
MEMBERS = 8
PER_SECOND = 600


@pytest.fixture
def chaos_seconds(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--chaos-seconds"))


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(str(tmp_path / "data"), settings=BROKER_SETTINGS) as broker:
        yield broker


class Chaos:
    """A topic that is written to, a group that reads it, and a storm over both; then calm until all is read."""

    def __init__(
        self, broker: BrokerProcess, directory: Path, seed: int, members: int, **options: Any
    ) -> None:
        self.broker = broker
        self.engine = Engine("holdfast", broker.bootstrap_servers)
        self.engine.create_topic(TOPIC, PARTITIONS)
        wanted = {"bootstrap_servers": broker.bootstrap_servers, "group": GROUP, "topic": TOPIC, **options}
        ids = [f"copier-{index}" for index in range(members + SPARE)] if "target" in options else []
        self.swarm = Swarm(directory, wanted, ids)
        self.storm = Storm(seed, self.swarm, broker, members)
        self.source = Source(broker.bootstrap_servers, TOPIC, PARTITIONS, PER_SECOND)
        self.observer = Observer(broker.bootstrap_servers, GROUP, TOPIC, PARTITIONS)
        self._members = members

    def run(self, seconds: float) -> None:
        with ExitStack() as stack:
            stack.callback(self.swarm.end)
            for _ in range(self._members):
                self.swarm.add()
            self.source.start()
            self.observer.start()
            self.storm.rage(seconds)
            self.source.finish()
            self.observer.finish()
            await_end(self.observer, self.swarm, self.source.ends())
        print("\n".join(self.storm.log))
        check_positions(self.swarm.events(), self.observer.seen)
        assert sum(map(len, self.source.acknowledged.values())) > PARTITIONS * 10
        assert "is offline" not in self.broker.log()
        assert self.swarm.resets() == []


@pytest.mark.parametrize(
    ("protocol", "assignor"),
    [
        pytest.param("classic", "range", marks=pytest.mark.long),
        ("classic", "cooperative-sticky"),
        ("consumer", "uniform"),
    ],
)
def test_every_message_is_processed_and_no_position_goes_back(
    protocol: str,
    assignor: str,
    broker: BrokerProcess,
    tmp_path: Path,
    chance: random.Random,
    chaos_seconds: float,
) -> None:
    seed = chance.randrange(1 << 32)
    chaos = Chaos(broker, tmp_path, seed, MEMBERS, protocol=protocol, assignor=assignor)
    chaos.run(chaos_seconds)
    check_at_least_once(chaos.swarm.events(), chaos.source.acknowledged)


def test_a_transactional_copy_job_copies_every_message_once(
    broker: BrokerProcess, tmp_path: Path, chance: random.Random, chaos_seconds: float
) -> None:
    seed = chance.randrange(1 << 32)
    chaos = Chaos(broker, tmp_path, seed, 4, protocol="classic", assignor="range", target=TARGET)
    chaos.engine.create_topic(TARGET, PARTITIONS)
    chaos.run(chaos_seconds)
    source = chaos.engine.read(TOPIC, PARTITIONS)
    assert source == {
        index: [some[offset] for offset in sorted(some)] for index, some in chaos.source.acknowledged.items()
    }
    target = chaos.engine.read(TARGET, PARTITIONS)
    for index in range(PARTITIONS):
        assert target[index] == source[index], f"partition {index}, histories in {tmp_path}"

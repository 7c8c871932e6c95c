"""A leader that is cut off, on three Apache Kafka brokers: in namespaces, and behind proxies."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.lab.engines import Engines, NotOnThisMachine
from holdfast.lab.experiment import Outcome, run_experiment
from holdfast.lab.experiments import EXPERIMENTS
from holdfast.testing.kafka_fixtures import require_apache_kafka
from holdfast.testing.networks import NetworkKind

pytestmark = [pytest.mark.long, pytest.mark.java]


@pytest.mark.parametrize("network", ["namespaces", "proxy"])
def test_a_claim_about_a_split_holds_however_it_is_made(network: NetworkKind, tmp_path: Path) -> None:
    require_apache_kafka()
    with Engines(tmp_path, network=network) as engines:
        for risk in ("HF102", "HF209"):
            try:
                result = run_experiment(EXPERIMENTS[risk], engines, "kafka")
            except NotOnThisMachine as missing:
                pytest.skip(str(missing))
            assert (result.outcome, result.reasons, result.network) == (Outcome.HELD, (), network)

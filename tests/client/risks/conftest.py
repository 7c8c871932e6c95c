"""What the risks HF101 to HF109 and HF301 to HF311 need beside their experiments.

The two halves of each, a plain client that loses and one of ours that does not, are experiments of the lab
(`holdfast.lab.experiments`, run by tests/lab/test_experiments.py). Here is what they do not show: other ways into the
same loss, what our clients say, and settings they refuse.

    test_sending.py      HF101 to HF105
    test_replicated.py   HF102, HF103 with a leader that dies, on three Apache Kafka brokers
    test_committing.py   HF306, HF309
    test_starting.py     HF305
    test_settings.py     HF301, HF305, HF310
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.testing.broker import BrokerProcess
from holdfast.testing.risks import SETTINGS, Scene


@pytest.fixture(scope="session")
def risky_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(str(tmp_path_factory.mktemp("risks") / "broker"), settings=SETTINGS) as broker:
        yield broker


@pytest.fixture
def here(risky_broker: BrokerProcess) -> Iterator[Scene]:
    """The broker that all these tests share; each has topics and groups of its own, and leaves the broker running."""
    scene = Scene(risky_broker)
    try:
        yield scene
    finally:
        scene.restore()

"""The risks HF101 to HF109 and HF301 to HF311, each in two halves.

`test_hfNNN_…_plain_client_…` fails if the loss or the duplicate does not show with a plain confluent-kafka client that
is set as the risk says; `test_hfNNN_…_ours_…` fails if it shows with ours in the same situation. `test_every_risk.py`
sees to it that none is missing.

    HF101  test_sending.py       a send whose result nobody looks at
    HF102  test_sending.py       confirmed without being stored: a broker that dies (acks=0)
           test_replicated.py    a leader that dies before its followers have it (acks=1), three Apache Kafka brokers
    HF103  test_sending.py       a delivery time-out that is shorter than a broker's restart
           test_replicated.py    ... than the election of a new leader
    HF104  test_sending.py       messages in the memory of a process that dies
    HF105  test_sending.py       a full buffer while the broker is away
    HF106  test_sending.py       an answer that comes too late: the message is sent again
    HF107  test_sending.py       a message that is refused for good
    HF108  test_transactions.py  a writer that was replaced and does not know it
    HF109  test_transactions.py  two writes that belong together, and a death between them
    HF301  test_committing.py    positions committed by time
    HF302  test_committing.py    positions committed while threads still work
    HF303  test_committing.py    a position that passes a failed message
    HF304  test_starting.py      partitions that were added
    HF305  test_starting.py      positions that have vanished
    HF306  test_committing.py    a message that always fails
    HF307  test_rebalancing.py   partitions that move while their messages are handled
    HF308  test_rebalancing.py   work that takes longer than max.poll.interval.ms
    HF309  test_committing.py    the last commit
    HF310  test_transactions.py  messages that were taken back
    HF311  test_transactions.py  a side effect and its position
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

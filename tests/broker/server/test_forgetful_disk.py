"""A broker on a mounted file system that forgets what was not flushed, and whose kernel answers `syncfs` by itself.

Turns with several files and a stop with many are where a flush of the whole file system would be cheaper. Here it
would flush nothing, so what is acknowledged or left by a clean stop must have been flushed file by file.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from holdfast.broker.node.node import FLUSH_ALL_ABOVE
from holdfast.broker.server.flusher import ALL_AT_ONCE_FROM
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.forgetful_mount import ForgetfulMount, why_not
from holdfast.testing.wire_client import WireClient
from holdfast.wire.api_keys import CREATE_TOPICS, LIST_OFFSETS, PRODUCE
from holdfast.wire.batch import make_batch

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
SEEDS = 3
ROUNDS = 6
LATEST = -1


def create_topic(client: WireClient, partitions: int) -> None:
    topic = {
        "name": "t",
        "num_partitions": partitions,
        "replication_factor": 1,
        "assignments": [],
        "configs": [],
    }
    (made,) = client.ask(CREATE_TOPICS, 5, {"topics": [topic], "timeout": 5000}).topics
    assert made.error_code == 0, made


def produce(client: WireClient, partitions: Iterable[int], acks: int) -> None:
    """One request: what it dirties is flushed in one turn."""
    batch = make_batch([b"x" * 5000], timestamp=1_700_000_000_000)
    data = [{"index": index, "records": batch} for index in partitions]
    fields = {
        "transactional_id": None,
        "acks": acks,
        "timeout": 30_000,
        "topic_data": [{"name": "t", "partition_data": data}],
    }
    answer = client.ask(PRODUCE, 9, fields)
    assert [one.error_code for one in answer.responses[0].partition_responses] == [0] * len(data)


def ends(client: WireClient, partitions: int) -> dict[int, int]:
    wanted = [{"partition_index": index, "timestamp": LATEST} for index in range(partitions)]
    fields = {"replica_id": -1, "isolation_level": 0, "topics": [{"name": "t", "partitions": wanted}]}
    answer = client.ask(LIST_OFFSETS, 4, fields)
    return {one.partition_index: one.offset for one in answer.topics[0].partitions}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_a_turn_with_several_files_acknowledged_survives_power_loss(tmp_path: Path, seed: int) -> None:
    partitions = ALL_AT_ONCE_FROM + 1
    with ForgetfulMount(tmp_path / "disk", seed) as mount:
        data_dir = str(mount.directory)
        with BrokerProcess(data_dir, prefix=mount.as_after_a_boot()) as broker:
            with WireClient(broker.bootstrap_servers) as client:
                create_topic(client, partitions)
                for _ in range(ROUNDS):
                    produce(client, range(partitions), acks=-1)
            broker.crash()
        mount.lose_power()
        with (
            BrokerProcess(data_dir, prefix=mount.as_after_a_boot()) as broker,
            WireClient(broker.bootstrap_servers) as client,
        ):
            assert ends(client, partitions) == dict.fromkeys(range(partitions), ROUNDS)


def test_what_a_clean_stop_left_survives_power_loss(tmp_path: Path) -> None:
    partitions = FLUSH_ALL_ABOVE // 2
    with ForgetfulMount(tmp_path / "disk") as mount:
        data_dir = str(mount.directory)
        settings = {"holdfast.flush": "os"}
        with BrokerProcess(data_dir, settings=settings, prefix=mount.as_after_a_boot()) as broker:
            with WireClient(broker.bootstrap_servers) as client:
                create_topic(client, partitions)
                produce(client, range(partitions), acks=1)
            assert broker.stop() == 0
        mount.lose_power()
        with (
            BrokerProcess(data_dir, settings=settings, prefix=mount.as_after_a_boot()) as broker,
            WireClient(broker.bootstrap_servers) as client,
        ):
            assert ends(client, partitions) == dict.fromkeys(range(partitions), 1)

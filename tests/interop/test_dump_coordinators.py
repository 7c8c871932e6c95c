"""Kafka's DumpLogSegments reads the coordinators' topics we wrote, and says the same of them as our own."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.testing.apache import DUMP_LOG, run_tool
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.kafka_fixtures import require_apache_kafka

pytestmark = [pytest.mark.check, pytest.mark.java]

DEADLINE_S = 60.0
SETTINGS = {
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
}


def consumer(servers: str, group: str, **settings: Any) -> Consumer:
    defaults = {
        "bootstrap.servers": servers,
        "group.id": group,
        "auto.offset.reset": "earliest",
        "log_level": 0,
    }
    return Consumer({**defaults, "enable.auto.commit": False, **settings})


def poll_until_all_read(members: Sequence[Consumer]) -> None:
    """Until every member has read something and committed it."""
    waiting = dict(enumerate(members))
    deadline = time.monotonic() + DEADLINE_S
    while waiting:
        assert time.monotonic() < deadline, f"members {list(waiting)} have read nothing"
        for number, member in enumerate(members):
            message = member.poll(0.05)
            if message is not None and message.error() is None and number in waiting:
                member.commit(message=message, asynchronous=False)
                del waiting[number]


def run_groups(servers: str) -> None:
    """One group of each kind: classic, static, by the consumer protocol, by expression, and of both protocols."""
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "classic": ("words", {}),
        "static": ("words", {"group.instance.id": "one"}),
        "consumer": ("words", {"group.protocol": "consumer"}),
        "expression": ("^wor.*", {"group.protocol": "consumer", "group.instance.id": "two"}),
    }
    for group, (topic, settings) in kinds.items():
        member = consumer(servers, group, **settings)
        member.subscribe([topic])
        poll_until_all_read([member])
        member.close()
    new, old = consumer(servers, "both", **{"group.protocol": "consumer"}), consumer(servers, "both")
    new.subscribe(["words"])
    poll_until_all_read([new])
    old.subscribe(["words"])
    poll_until_all_read([new, old])
    old.close()
    new.close()


def run_transactions(servers: str) -> None:
    """One that commits with a position, one that aborts."""
    member = consumer(servers, "copying")
    member.subscribe(["words"])
    poll_until_all_read([member])
    producer = Producer({"bootstrap.servers": servers, "transactional.id": "copier", "log_level": 0})
    producer.init_transactions(DEADLINE_S)
    producer.begin_transaction()
    producer.produce("copies", b"copied", partition=0)
    position = [TopicPartition("words", 0, 1, metadata="half way")]
    producer.send_offsets_to_transaction(position, member.consumer_group_metadata())
    producer.commit_transaction(DEADLINE_S)
    producer.begin_transaction()
    producer.produce("copies", b"dropped", partition=0)
    producer.flush(DEADLINE_S)
    producer.abort_transaction(DEADLINE_S)
    member.close()


@pytest.fixture(scope="module")
def data_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a broker left behind after groups and transactions of every kind."""
    require_apache_kafka()
    directory = tmp_path_factory.mktemp("dumped") / "holdfast"
    with BrokerProcess(str(directory), settings=SETTINGS) as broker:
        servers = broker.bootstrap_servers
        admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
        for made in admin.create_topics([NewTopic("words", 2, 1), NewTopic("copies", 1, 1)]).values():
            made.result(DEADLINE_S)
        producer = Producer({"bootstrap.servers": servers, "log_level": 0})
        for number in range(200):
            producer.produce("words", b"word %d" % number, partition=number % 2)
        assert producer.flush(DEADLINE_S) == 0
        run_groups(servers)
        run_transactions(servers)
        admin.delete_consumer_groups(["classic"])["classic"].result(DEADLINE_S)
        assert broker.stop() == 0
    return directory


def logs(directory: Path, partition: str) -> str:
    return ",".join(sorted(str(path) for path in (directory / partition).glob("*.log")))


def dumped_by_both(directory: Path, partition: str, decoder: str) -> list[str]:
    """The lines, which Kafka's tool and ours must agree on."""
    arguments = ["--files", logs(directory, partition), decoder]
    theirs = run_tool(DUMP_LOG, *arguments)
    assert not theirs.stderr, theirs.stderr.decode()
    ours = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "dump-log", *arguments],
        capture_output=True,
        check=True,
        timeout=60,
    )
    lines = theirs.stdout.decode().splitlines()
    assert ours.stdout.decode().splitlines() == lines
    return lines


def test_groups_and_committed_offsets_are_decoded(data_directory: Path) -> None:
    lines = dumped_by_both(data_directory, "__consumer_offsets-0", "--offsets-decoder")
    kinds = set(re.findall(r'key: \{"type":"(\d+)"', "\n".join(lines)))
    assert kinds == {"1", "2", "3", "5", "6", "7", "8", "16"}
    (removed,) = (line for line in lines if '"group":"classic"}} payload: <DELETE>' in line)
    assert '{"type":"2",' in removed
    text = "\n".join(lines)
    assert (
        '"group":"copying","topic":"words","partition":0}} payload: {"version":"4","data":{"offset":1,'
        in text
    )
    assert '"metadata":"half way' in text
    assert '"subscription":{"topics":["words"]' in text
    assert '"groupInstanceId":"one"' in text
    assert '"regularExpression":"(^wor.*)"' in text
    assert re.search(
        r'"classicMemberMetadata":\{"sessionTimeoutMs":\d+,"supportedProtocols":\[\{"name":"range"', text
    )
    assert " endTxnMarker: COMMIT coordinatorEpoch: " in text


def test_transactions_are_decoded(data_directory: Path) -> None:
    lines = dumped_by_both(data_directory, "__transaction_state-0", "--transaction-log-decoder")
    states = re.findall(
        r'key: \{"type":"0","data":\{"transactionalId":"copier"\}\} payload: .*"transactionStatus":(\d)',
        "\n".join(lines),
    )
    # Empty, then ongoing, prepare and complete commit, then ongoing, prepare and complete abort.
    assert re.fullmatch("0+1+241+35", "".join(states))


def test_markers_stand_in_the_partition(data_directory: Path) -> None:
    lines = dumped_by_both(data_directory, "copies-0", "--print-data-log")
    markers = re.findall(r"endTxnMarker: (\w+) ", "\n".join(lines))
    assert markers == ["COMMIT", "ABORT"]

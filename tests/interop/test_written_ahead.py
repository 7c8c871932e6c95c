"""A segment that ends in zeros, as a killed broker leaves it: Kafka's tool and Apache Kafka itself read all of it.

The tool then complains, as it does of a preallocated segment of Kafka's own that is in use.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.testing.apache import DUMP_LOG, run_tool
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.kafka_fixtures import require_apache_kafka, running_apache_kafka

pytestmark = [pytest.mark.check, pytest.mark.java]

MESSAGES = 20
NAME = f"{0:020d}.log"


def create(bootstrap_servers: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
    admin.create_topics([NewTopic("t", 1, 1)])["t"].result(30)


def send(bootstrap_servers: str, *values: bytes) -> None:
    """One after the other, each when the one before is acknowledged."""
    producer = Producer({"bootstrap.servers": bootstrap_servers, "linger.ms": 0, "log_level": 0})
    for value in values:
        producer.produce("t", value, partition=0)
        assert producer.flush(30) == 0


@pytest.fixture(scope="module")
def segment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log file of a partition that was flushed message by message when its broker was killed."""
    require_apache_kafka()
    directory = tmp_path_factory.mktemp("killed") / "holdfast"
    with BrokerProcess(str(directory)) as broker:
        create(broker.bootstrap_servers)
        send(broker.bootstrap_servers, *(b"value %d" % number for number in range(MESSAGES)))
        broker.crash()
    path = directory / "t-0" / NAME
    assert path.read_bytes().endswith(bytes(4096))
    return path


def test_the_dump_tool_reads_every_batch_and_ends_at_the_zeros(segment: Path) -> None:
    done = run_tool(DUMP_LOG, "--print-data-log", "--files", str(segment), check=False)
    text = done.stdout.decode()
    assert re.findall(r" payload: value (\d+)$", text, re.M) == [str(number) for number in range(MESSAGES)]
    assert set(re.findall(r" isvalid: (\w+)", text)) == {"true"}
    assert b"Found record size 0" in done.stderr


@pytest.mark.long
def test_apache_kafka_cuts_the_zeros_off_and_goes_on(segment: Path) -> None:
    with running_apache_kafka() as kafka:
        create(kafka.bootstrap_servers)
        send(kafka.bootstrap_servers, b"makes the file")
        kafka.kill()
        theirs = kafka.data_dir / "t-0" / NAME
        shutil.copyfile(segment, theirs)
        kafka.start()
        send(kafka.bootstrap_servers, b"value %d" % MESSAGES)
        settings = {"bootstrap.servers": kafka.bootstrap_servers, "group.id": "g", "log_level": 0}
        consumer = Consumer({**settings, "enable.auto.commit": False})
        consumer.assign([TopicPartition("t", 0, 0)])
        found = consumer.consume(MESSAGES + 1, timeout=30)
        consumer.close()
        assert [message.value() for message in found] == [
            b"value %d" % number for number in range(MESSAGES + 1)
        ]
        assert theirs.stat().st_size < segment.stat().st_size

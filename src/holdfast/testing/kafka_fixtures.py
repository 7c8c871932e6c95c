"""What tests need to run beside Apache Kafka: one broker of it per session, and a clear word when it cannot run.

On a developer's machine without Java or Maven these tests are skipped and say what to install; where the
environment variable CI is set they fail instead, because there both are promised.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NoReturn

import pytest

from holdfast.testing.apache import SHORT_LIVED_JVM, ApacheKafka, ApacheKafkaUnavailable, jars

XDIST_GROUP: Final = "apache-kafka"
"""Tests of this group run in one worker (`--dist loadgroup`), so that one JVM broker serves them all."""

COORDINATORS: Final[Mapping[str, str]] = {
    "offsets.topic.num.partitions": "3",
    "transaction.state.log.num.partitions": "3",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "200",
    "group.consumer.heartbeat.interval.ms": "300",
    "group.consumer.min.heartbeat.interval.ms": "50",
    "group.consumer.min.session.timeout.ms": "300",
    "group.consumer.assignment.interval.ms": "0",
    "offsets.retention.check.interval.ms": "1000",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
    # A machine that is busy for longer than Kafka's nine seconds must not fence its only broker.
    "broker.session.timeout.ms": "60000",
}
"""What groups and transactions wait for, in tenths of a second; for Apache Kafka and the broker beside it alike."""

PROPERTIES: Final[Mapping[str, str]] = {
    **COORDINATORS,
    # Scripts that delete a topic look for what remains; Kafka's default of a minute is longer than any of them.
    "log.segment.delete.delay.ms": "1000",
}
HEAP_OPTIONS: Final = ("-Xmx512M", "-Xms256M")
"""Tests hold little data, and two cores are shared with everything else."""


def require_apache_kafka() -> None:
    """Make sure Java and Kafka's jars are here; skips the test, or fails it in CI, with the reason."""
    try:
        jars()
    except ApacheKafkaUnavailable as error:
        unavailable(str(error))


def unavailable(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"CI promises Java and Maven: {reason}", pytrace=False)
    pytest.skip(reason)


@contextmanager
def running_apache_kafka(properties: Mapping[str, str] | None = None) -> Iterator[ApacheKafka]:
    """A small Apache Kafka for tests, gone at the end."""
    require_apache_kafka()
    broker = ApacheKafka(
        {**PROPERTIES, **(properties or {})}, heap_options=HEAP_OPTIONS, jvm_options=SHORT_LIVED_JVM
    )
    with broker:
        yield broker

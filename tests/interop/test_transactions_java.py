"""Kafka's own transactional programs and its tool for transactions, with the same answers on both engines. X."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from tests.support.transaction_clients import PRODUCERS, Refused

from holdfast.testing.apache import (
    CONSOLE_CONSUMER,
    MESSAGE_COPIER,
    TRANSACTIONS,
    VERIFIABLE_PRODUCER,
    run_tool,
)
from holdfast.testing.engines import Engine, Scenario

pytestmark = pytest.mark.check

OnBoth = Callable[[Scenario], Any]


def copier(engine: Engine) -> Any:
    """Two instances of Kafka's transactional copier copy a partition each, aborting at random."""
    source = engine.create_topic("copier-source", 2)
    target = engine.create_topic("copier-target", 2)
    written = {index: [f"{index}-{number}" for number in range(40)] for index in range(2)}
    engine.write(source, written)

    def copy(instance: int) -> None:
        run_tool(
            MESSAGE_COPIER,
            *("--broker-list", engine.bootstrap_servers, "--transactional-id", f"copier-{instance}"),
            *("--input-topic", source, "--input-partition", str(instance), "--output-topic", target),
            *("--consumer-group", "copier", "--transaction-size", "7", "--enable-random-aborts"),
            "--use-group-metadata",
        )

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(copy, instance) for instance in range(2)]:
            done.result()
    engine.await_decided(target)
    copied = sorted(value for some in engine.read(target, 2).values() for value in some)
    assert copied == sorted(value for some in written.values() for value in some)
    return {"committed": engine.committed("copier"), "copied": len(copied)}


def test_kafka_s_transactional_copier_copies_every_message_once(on_both: OnBoth) -> None:
    assert on_both(copier) == {"committed": {"copier-source-0": 40, "copier-source-1": 40}, "copied": 80}


def console(engine: Engine) -> Any:
    """Kafka's console consumer of either isolation level on what a librdkafka producer wrote."""
    topic = engine.create_topic("console-levels", 1)
    with closing(PRODUCERS["confluent-kafka"](engine.bootstrap_servers, "console-levels")) as producer:
        for end in ("commit", "abort", "commit again"):
            producer.begin()
            producer.send(topic, 0, end.replace(" ", "-"))
            producer.flush()
            producer.abort() if end == "abort" else producer.commit()
    seen = {}
    for level, count in (("read_committed", 2), ("read_uncommitted", 3)):
        done = run_tool(
            CONSOLE_CONSUMER,
            *("--bootstrap-server", engine.bootstrap_servers, "--topic", topic, "--from-beginning"),
            *("--isolation-level", level, "--max-messages", str(count), "--timeout-ms", "30000"),
        )
        seen[level] = done.stdout.decode().split()
    return seen


def test_the_console_consumer_honours_its_isolation_level(on_both: OnBoth) -> None:
    assert on_both(console) == {
        "read_committed": ["commit", "commit-again"],
        "read_uncommitted": ["commit", "abort", "commit-again"],
    }


class TransactionsTool:
    """kafka-transactions, and its tables as rows without what differs from run to run."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, *arguments: str, check: bool = False) -> list[list[str]]:
        address = self._engine.bootstrap_servers
        done = run_tool(TRANSACTIONS, "--bootstrap-server", address, *arguments, check=check)
        text = (done.stdout + done.stderr).decode()
        return [line.split() for line in text.splitlines() if line.strip()]


def columns(rows: list[list[str]], *names: str) -> list[list[str]]:
    """These columns of a table, rows in order."""
    head = rows[0]
    return sorted([row[head.index(name)] for name in names] for row in rows[1:])


def the_tool(engine: Engine) -> Any:
    """List, describe, look for hanging ones, and end one from outside; its producer learns of it."""
    tool = TransactionsTool(engine)
    topic = engine.create_topic("tool-txn", 2)
    seen: dict[str, Any] = {}
    with closing(
        PRODUCERS["confluent-kafka"](engine.bootstrap_servers, "tool-txn", timeout_ms=50_000)
    ) as producer:
        producer.begin()
        producer.send(topic, 0, "a")
        producer.send(topic, 1, "b")
        producer.flush()
        listed = columns(tool("list"), "TransactionalId", "Coordinator", "TransactionState")
        seen["listed"] = [row for row in listed if row[0] == "tool-txn"]
        described = tool("describe", "--transactional-id", "tool-txn")
        seen["described"] = columns(
            described,
            "TransactionalId",
            "ProducerEpoch",
            "TransactionState",
            "TransactionTimeoutMs",
            "TopicPartitions",
        )
        producers = tool("describe-producers", "--topic", topic, "--partition", "1")
        seen["producers"] = columns(
            producers, "ProducerEpoch", "LastSequence", "CurrentTransactionStartOffset"
        )
        hanging = tool("find-hanging", "--broker-id", "1", "--max-transaction-timeout", "1")[1:]
        seen["hanging"] = [
            row for row in hanging if row[0] == topic
        ]  # other tests leave some to the same engine
        forced = tool("forceTerminateTransaction", "--transactionalId", "tool-txn")
        seen["forced"] = [re.sub(r"\d{3,}", "<n>", " ".join(row)) for row in forced]
        try:
            producer.commit()
        except Refused as refused:
            seen["refused"] = str(refused)
        seen["after"] = columns(tool("describe", "--transactional-id", "tool-txn"), "TransactionState")
        seen["unknown"] = [" ".join(row) for row in tool("describe", "--transactional-id", "nobody")][:1]
    return {**seen, "committed": engine.read(topic, 2)}


@pytest.mark.long
def test_the_tool_for_transactions_shows_and_ends_them(on_both: OnBoth) -> None:
    seen = on_both(the_tool)
    assert seen["listed"] == [["tool-txn", "1", "Ongoing"]]
    assert seen["refused"]
    assert seen["committed"] == {0: [], 1: []}


def idempotent_java(engine: Engine) -> Any:
    """Kafka's Java producer beside a transaction of librdkafka's in the same partition."""
    topic = engine.create_topic("java-beside", 1)
    with closing(PRODUCERS["confluent-kafka"](engine.bootstrap_servers, "java-beside")) as producer:
        producer.begin()
        producer.send(topic, 0, "in a transaction")
        producer.flush()
        run_tool(
            VERIFIABLE_PRODUCER,
            *("--bootstrap-server", engine.bootstrap_servers, "--topic", topic, "--max-messages", "5"),
        )
        before = engine.read(topic)[0]
        producer.abort()
    engine.await_decided(topic)
    return {"before": before, "after": engine.read(topic)[0]}


def test_what_a_java_producer_writes_waits_for_the_transaction_before_it(on_both: OnBoth) -> None:
    assert on_both(idempotent_java) == {"before": [], "after": ["0", "1", "2", "3", "4"]}

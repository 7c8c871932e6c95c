"""Open transactions: who holds a partition's readers back, and until when retention will wait for them.

A transaction within its own time-out is at work. One past it should have been aborted by its coordinator. One that a
partition has open and no coordinator knows of hangs: nobody will ever end it, and no read_committed reader passes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from holdfast.doctor.findings import Finding, Fix, Severity, finding
from holdfast.doctor.findings import Place as Spot
from holdfast.doctor.live_cluster_rules import shown, spell
from holdfast.doctor.live_snapshot import OpenProducer, Snapshot, TransactionFacts, named, plain, quoted

DEFAULT_LONGEST_MS: Final = 15 * 60_000
"""transaction.max.timeout.ms of brokers that were told nothing: no transaction of a live producer lasts longer."""


def transaction_findings(snapshot: Snapshot) -> Iterator[Finding]:
    by_producer = {each.producer_id: each for each in snapshot.transactions or ()}
    for transaction in snapshot.transactions or ():
        yield from _overdue(transaction, snapshot)
    for producer in snapshot.open_producers:
        known = by_producer.get(producer.producer_id)
        if known is None or producer.place not in known.places:
            yield from _hanging(producer, snapshot)
    yield from _longer_than_retention(snapshot)


def _overdue(transaction: TransactionFacts, snapshot: Snapshot) -> Iterator[Finding]:
    if transaction.start_ms is None:
        return
    open_ms = snapshot.time_ms - transaction.start_ms
    if open_ms <= transaction.timeout_ms:
        return
    yield finding(
        "HF411",
        Spot(resource=f"transactional id {plain(transaction.transactional_id)}"),
        f"producer {transaction.producer_id} has had its transaction open for {spell(open_ms)}, past its time-out "
        f"of {spell(transaction.timeout_ms)} ({transaction.state}), in {shown([named(e) for e in transaction.places])}",
        fix=Fix(
            f"holdfast transactions abort --transactional-id {quoted(transaction.transactional_id)}",
            "command",
        ),
    )


def _hanging(producer: OpenProducer, snapshot: Snapshot) -> Iterator[Finding]:
    if snapshot.transactions is None or any("transactions" in gap.what for gap in snapshot.gaps):
        return  # whether a coordinator knows it, nobody could say
    longest = max(
        (
            each.settings.number("transaction.max.timeout.ms") or DEFAULT_LONGEST_MS
            for each in snapshot.brokers.values()
            if each.settings is not None
        ),
        default=DEFAULT_LONGEST_MS,
    )
    silent_ms = snapshot.time_ms - producer.last_timestamp_ms
    if silent_ms <= longest:
        return
    topic, partition = producer.place
    retention = snapshot.topics[topic].retention_ms
    left = "" if retention is None else _left(producer, retention, snapshot.time_ms)
    yield finding(
        "HF411",
        Spot(resource=f"topic {plain(topic)}"),
        f"{named(producer.place)}: producer {producer.producer_id} has had a transaction open from offset "
        f"{producer.start_offset} for {spell(silent_ms)}, and no coordinator will end it{left}",
        severity=Severity.ERROR,
        fix=Fix(
            f"holdfast transactions abort --topic {quoted(topic)} --partition {partition} "
            f"--start-offset {producer.start_offset}",
            "command",
        ),
    )


def _left(producer: OpenProducer, retention_ms: int, now_ms: int) -> str:
    left_ms = producer.last_timestamp_ms + retention_ms - now_ms
    if left_ms <= 0:
        return "; retention has passed it"
    return f"; retention passes it in {spell(left_ms)} at most"


def _longer_than_retention(snapshot: Snapshot) -> Iterator[Finding]:
    """A transaction that may legally stay open longer than its messages are kept."""
    shortest: defaultdict[str, list[int]] = defaultdict(list)
    for transaction in snapshot.transactions or ():
        for topic in dict.fromkeys(topic for topic, _ in transaction.places):
            live = snapshot.topics.get(topic)
            if (
                live is not None
                and live.retention_ms is not None
                and transaction.timeout_ms > live.retention_ms
            ):
                shortest[transaction.transactional_id].append(live.retention_ms)
    for transactional_id, retentions in sorted(shortest.items()):
        yield finding(
            "HF411",
            Spot(resource=f"transactional id {plain(transactional_id)}"),
            f"its time-out is longer than a topic it writes to keeps messages ({spell(min(retentions))})",
            severity=Severity.WARNING,
            fix=Fix("transaction.timeout.ms well below retention.ms", "settings"),
        )

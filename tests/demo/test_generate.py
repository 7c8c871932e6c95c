"""Sample data is the same for the same seed, and its results are what a plain program finds in it."""

from __future__ import annotations

import datetime
import itertools
import json
from collections import defaultdict
from typing import Any

import pytest

from holdfast.demo.generate import KINDS, GeneratedMessage, GenerateSettings, Generator
from holdfast.errors import UsageError

GOLDEN = {
    "orders": "50b7929a6732dbda9b89096489fa16d42c2d51464eb303169a3024e38698d1dd",
    "activity": "3357a26652ce6ff3bd2540e6fac8de57e25f217295f27be596c442cef5dfe7f0",
    "logs": "57ba4210ff73de98468721eafd6fccce9df2ce1eba718a6601041cd1d5455087",
    "changes": "dd8c11ac0c5d58b718cc0de9780abd04b073c8aa9ed09c9cd1953ca901848123",
    "payments": "f3c3c086b085b66d00e16ed7352f6ad693ea3355b3a2e9d7683fbf142afbc590",
}
"""SHA-256 of 3000 messages with a bit of everything: published figures rest on these bytes."""
MIXED: dict[str, Any] = {"malformed": 0.05, "duplicates": 0.1, "late": 0.1, "disorder_ms": 2000}


def generated(kind: str, **settings: Any) -> tuple[list[GeneratedMessage], dict[str, Any]]:
    generator = Generator(GenerateSettings(kind, **settings))
    return list(generator), generator.summary()


def parsed(message: GeneratedMessage) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(message.value)
    except ValueError:
        return None
    return value


def time_of(event: dict[str, Any]) -> datetime.datetime:
    return datetime.datetime.fromisoformat(event["at"])


def events_of(messages: list[GeneratedMessage]) -> list[dict[str, Any]]:
    """Each event once, in the order they came."""
    seen: dict[bytes, dict[str, Any]] = {}
    for message in messages:
        event = parsed(message)
        if event is not None:
            seen.setdefault(message.value, event)
    return list(seen.values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_bytes_everywhere(kind: str) -> None:
    assert generated(kind, count=3000, **MIXED)[1]["sha256"] == GOLDEN[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_gives_other_events(kind: str) -> None:
    assert generated(kind, count=50)[0] != generated(kind, count=50, seed=1)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_more_messages_begin_with_the_same_ones(kind: str) -> None:
    assert generated(kind, count=500, **MIXED)[0] == generated(kind, count=900, **MIXED)[0][:500]


@pytest.mark.parametrize("kind", KINDS)
def test_the_summary_counts_what_came(kind: str) -> None:
    messages, summary = generated(kind, count=5000, **MIXED)
    whole = [message for message in messages if parsed(message) is not None]
    assert summary["messages"] == len(messages) == 5000
    assert summary["bytes"] == sum(len(message.value) for message in messages)
    assert summary["malformed"] == len(messages) - len(whole)
    assert summary["events"] + summary["duplicates"] == len(whole)
    assert 150 < summary["malformed"] < 350
    assert 350 < summary["duplicates"] < 650
    assert 250 < summary["late"] < 650
    assert all(b"\n" not in message.value for message in messages)


@pytest.mark.parametrize("kind", ["orders", "payments"])
def test_late_events_are_late_and_others_are_not(kind: str) -> None:
    messages, summary = generated(kind, count=3000, late=0.1, disorder_ms=2000, late_by_ms=3_600_000)
    newest = None
    late = 0
    for event in events_of(messages):
        at = time_of(event)
        if newest is not None and newest - at > datetime.timedelta(hours=1) - datetime.timedelta(seconds=3):
            late += 1
            assert newest - at <= datetime.timedelta(hours=2)
            continue
        assert newest is None or newest - at <= datetime.timedelta(seconds=2)
        newest = at if newest is None else max(newest, at)
    assert late == summary["late"] > 200


def test_orders_come_to_the_amount_told() -> None:
    messages, summary = generated("orders", count=4000, **MIXED)
    orders = events_of(messages)
    cents = sum(round(order["amount"] * 100) for order in orders)
    assert summary["results"]["orders"] == len(orders)
    assert summary["results"]["amount"] == f"{cents // 100}.{cents % 100:02}"
    assert summary["results"]["customers"] == len({order["customer"] for order in orders})
    assert [order["id"] for order in orders] == list(range(1, len(orders) + 1))


@pytest.mark.parametrize("mixed", [{}, MIXED])
def test_sessions_with_a_gap_of_half_an_hour_are_those_told(mixed: dict[str, Any]) -> None:
    messages, summary = generated("activity", count=20_000, spacing_ms=2000, keys=20, **mixed)
    newest = time_of(events_of(messages)[0])
    times: dict[str, list[datetime.datetime]] = defaultdict(list)
    for event in events_of(messages):
        at = time_of(event)
        newest = max(newest, at)
        if newest - at < datetime.timedelta(minutes=30):  # late ones belong to no session
            times[event["user"]].append(at)
    gap = datetime.timedelta(minutes=30)
    sessions = sum(
        1 + sum(later - earlier > gap for earlier, later in itertools.pairwise(sorted(each)))
        for each in times.values()
    )
    assert summary["results"]["sessions"] == sessions
    assert summary["results"]["users"] == len(times)
    assert sessions > len(times) > 20


def test_errors_are_those_told_and_come_in_bursts() -> None:
    messages, summary = generated("logs", count=20_000, **MIXED)
    by_minute: dict[tuple[str, str], list[bool]] = defaultdict(list)
    errors: dict[str, int] = defaultdict(int)
    for event in events_of(messages):
        is_error = event["level"] == "ERROR"
        by_minute[event["service"], event["at"][:16]].append(is_error)
        errors[event["service"]] += is_error
    assert summary["results"]["errors_by_service"] == {
        name: count for name, count in sorted(errors.items()) if count
    }
    shares = [sum(each) / len(each) for each in by_minute.values() if len(each) > 20]
    assert any(share > 0.3 for share in shares)
    assert sum(share < 0.1 for share in shares) > len(shares) / 2


def test_changes_fold_into_the_rows_told() -> None:
    messages, summary = generated("changes", count=20_000, keys=300, **MIXED)
    rows: dict[int, dict[str, Any]] = {}
    for change in events_of(messages):
        before = rows.get(change["id"])
        assert (before is None) == (change["op"] == "insert")
        if change["op"] == "delete":
            del rows[change["id"]]
        else:
            rows[change["id"]] = change
    cents = sum(round(row["balance"] * 100) for row in rows.values())
    assert summary["results"]["rows"] == len(rows)
    assert summary["results"]["balance"] == f"{cents // 100}.{cents % 100:02}"


def test_frauds_are_those_told() -> None:
    messages, summary = generated("payments", count=20_000, **MIXED)
    before: dict[str, dict[str, Any]] = {}
    frauds = 0
    for payment in events_of(messages):
        last = before.get(payment["card"])
        if last and last["amount"] < 1 and payment["amount"] > 500:
            frauds += time_of(payment) - time_of(last) <= datetime.timedelta(minutes=1)
        before[payment["card"]] = payment
    assert summary["results"]["frauds"] == frauds > 20


@pytest.mark.check
def test_what_is_remembered_does_not_grow_with_the_number_of_messages() -> None:
    import tracemalloc

    peaks = []
    for count in (20_000, 60_000):
        tracemalloc.start()
        generator = Generator(GenerateSettings("activity", count=count, spacing_ms=10_000, **MIXED))
        for _ in generator:
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "ordres"}, "there is no 'ordres'"),
        ({"kind": "orders", "late": 1.5}, "late is a part of the messages, from 0 to 1"),
        ({"kind": "orders", "late": 0.6, "malformed": 0.6}, "together they are more than all"),
        ({"kind": "orders", "keys": 0}, "one key at least"),
    ],
)
def test_what_cannot_be_made_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Generator(GenerateSettings(**settings))

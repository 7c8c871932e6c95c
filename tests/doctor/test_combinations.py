"""Clients and topics that are each in order by themselves, and lose messages together."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.doctor.client_defaults import Client, Role
from holdfast.doctor.client_settings import UNKNOWN, ClientSettings, Setting, make_settings
from holdfast.doctor.combinations import TopicFacts, across_clients, against_topics
from holdfast.doctor.files import add_combined
from holdfast.doctor.findings import Examination, Finding, Location, Severity, finding


def client(role: Role, kind: Client, file: str = "f", **written: Any) -> ClientSettings:
    settings = [
        Setting(name.replace("_", "."), value, Location(file, line))
        for line, (name, value) in enumerate(written.items(), 1)
    ]
    return make_settings(role, kind, Location(file), settings)


def topic(factor: int | None = 3, **settings: str) -> TopicFacts:
    dotted = {name.replace("_", "."): value for name, value in settings.items()}
    return TopicFacts("orders", Location(resource="topic orders"), factor, dotted)


def ids(findings: list[Finding]) -> list[tuple[str, Severity]]:
    return [(found.id, found.severity) for found in findings]


@pytest.mark.parametrize(
    ("acks", "minimum", "factor", "expected"),
    [
        ("all", "2", 3, []),
        ("all", "1", 3, [("HF202", Severity.ERROR)]),
        ("1", "2", 3, [("HF102", Severity.ERROR)]),
        ("1", "1", 3, []),
        ("all", "1", 1, []),
        ("all", "1", None, []),
        (UNKNOWN, "1", 3, []),
    ],
)
def test_acks_against_the_minimum_and_the_replicas(
    acks: Any, minimum: str, factor: int | None, expected: list[tuple[str, Severity]]
) -> None:
    producer = client("producer", Client.JAVA, acks=acks)
    found = list(against_topics([producer], [topic(factor, min_insync_replicas=minimum)]))
    assert ids(found) == expected


@pytest.mark.parametrize(
    ("size", "limit", "too_large"),
    [
        (5_000_000, "1048588", True),
        (1_048_576, "1048588", False),
        (None, "1048588", False),
        (None, "1000", True),
    ],
)
def test_sizes_along_the_way(size: int | None, limit: str, too_large: bool) -> None:
    written: dict[str, Any] = {} if size is None else {"max_request_size": size}
    producer = client("producer", Client.JAVA, **written)
    found = list(against_topics([producer], [topic(None, max_message_bytes=limit)]))
    assert [each.id for each in found] == ["HF208"] * too_large


def test_a_compacted_topic_makes_reordering_an_error() -> None:
    producer = client("producer", Client.LIBRDKAFKA)
    compacted = topic(None, cleanup_policy="compact,delete")
    (found,) = against_topics([producer], [compacted])
    assert (found.id, found.severity) == ("HF106", Severity.ERROR)
    examination = Examination()
    examination.add([finding("HF106", found.place, "milder")])
    add_combined(examination, [found])
    assert examination.findings == [found]
    add_combined(examination, [finding("HF106", found.place, "milder")])
    assert examination.findings == [found]


def test_one_transactional_id_in_two_files_is_told_at_both() -> None:
    clients = [client("producer", Client.JAVA, name, transactional_id="t") for name in ("a", "b")]
    found = list(across_clients(clients))
    assert [(each.id, each.place.file) for each in found] == [("HF108", "a"), ("HF108", "b")]
    assert "b:1" in found[0].found
    assert list(across_clients(clients[:1])) == []


@pytest.mark.parametrize(
    ("kind", "aborted_is_read"), [(Client.JAVA, True), (Client.LIBRDKAFKA, False), (Client.AIOKAFKA, True)]
)
def test_who_reads_what_was_aborted_by_default(kind: Client, aborted_is_read: bool) -> None:
    writes = client("producer", Client.JAVA, transactional_id="t")
    found = list(across_clients([writes, client("consumer", kind, "c")]))
    assert [each.id for each in found] == ["HF310"] * aborted_is_read

"""The numbers of spools in topics: gaps, repeats, what the files still hold, and what they say was delivered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from tests.support.fake_cluster import LIST_OFFSETS

from holdfast.audit import record_walk, spool
from holdfast.audit.decoding import SourceDecoder
from holdfast.audit.model import AuditError, Fate, Finding, Report, Verdict
from holdfast.audit.source import look, walk
from holdfast.audit.spool import SpoolFiles, SpoolWatch, audit_spools, read_spools
from holdfast.audit.spool_numbers import Line
from holdfast.client.producer import Producer
from holdfast.errors import UsageError
from holdfast.pipeline.definition.model import Source
from holdfast.reader import Cluster
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.engines import QUIET, wait_until

if TYPE_CHECKING:
    from .conftest import World

SPOOL = "0123456789abcdef"


def send(
    world: World, numbers: Sequence[int], *, partition: int = 0, spool: str = SPOOL, topic: str = "orders"
) -> None:
    headers = [(("hf-id", f"{spool}:{partition}:{number}".encode()),) for number in numbers]
    world.send([b"v"] * len(numbers), partition=partition, topic=topic, headers=headers)


def one(report: Report, fate: Fate) -> Finding:
    (found,) = [each for each in report.findings if each.fate is fate]
    return found


def test_what_was_stored_before_its_partition_was_known_is_followed_through_all_of_them(world: World) -> None:
    for partition, numbers in enumerate([(0, 1, 5), (2, 4)]):
        headers = [
            (("hf-id", f"{SPOOL}:0000000a:orders:{partition}:u{number}".encode()),) for number in numbers
        ]
        world.send([b"v"] * len(numbers), partition=partition, headers=headers)
    report = audit_spools(world.settings, topics=["orders"])
    found = one(report, Fate.LOST)
    assert (found.count, found.keys) == (1, (f"{SPOOL}:u:3",))


def test_numbers_without_a_gap_are_proven_and_repeats_recognised(world: World) -> None:
    send(world, range(50))
    send(world, range(40, 60))
    send(world, range(7), spool="ff00ff00ff00ff00")
    send(world, range(9), partition=1)
    world.send([b"plain"])
    report = audit_spools(world.settings, topics=["orders"])
    assert report.verdict is Verdict.PROVEN, report.reasons
    assert (report.mode, report.subject) == ("spool", "orders")
    assert [account.fates for account in report.partitions] == [
        {"output": 67, "duplicate": 10},
        {"output": 9},
    ]
    assert {account.name for account in report.sinks} == {f"spool {SPOOL}", "spool ff00ff00ff00ff00"}
    assert "1 records of orders have no hf-id: no spool sent them" in report.notes
    assert "behind the last numbers of 2 spools" in report.unproven[0].what
    assert Report.from_json(report.as_json()) == report


def test_a_gap_is_lost_and_named_by_its_numbers(world: World) -> None:
    send(world, [0, 1, 2, 5, 6, 9])
    found = one(audit_spools(world.settings, topics=["orders"]), Fate.LOST)
    assert (found.count, found.sink) == (4, f"spool {SPOOL}")
    assert found.keys[:2] == (f"{SPOOL}:0:3", f"{SPOOL}:0:4")
    assert "numbers 3-4, 7-8 of the spool" in found.detail


def test_a_line_that_begins_late_has_lost_its_head(world: World) -> None:
    send(world, [4, 5])
    assert "numbers 0-3" in one(audit_spools(world.settings, topics=["orders"]), Fate.LOST).detail


def test_a_topic_that_lost_its_head_is_inconclusive(world: World) -> None:
    send(world, [0, 1, 2])
    send(world, [3, 4, 5])
    world.cluster.topics["orders"].partitions[0].log_start = 3
    report = audit_spools(world.settings, topics=["orders"])
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "numbers 0 to 2" in report.reasons[0]


def test_gaps_of_a_compacted_topic_are_inconclusive(world: World) -> None:
    send(world, [0, 1])
    world.cluster.topics["orders"].partitions[0].log_end = 4
    send(world, [4, 5])
    report = audit_spools(world.settings, topics=["orders"])
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "compacted away, or lost" in report.reasons[0]


def test_numbers_that_come_behind_greater_ones_are_told(world: World) -> None:
    send(world, [0, 1, 3, 2, 4])
    found = one(audit_spools(world.settings, topics=["orders"]), Fate.ALTERED)
    assert (found.ranges, found.count) == (((3, 3),), 1)


def test_headers_that_are_no_numbers_are_inconclusive(world: World) -> None:
    send(world, [0, 1])
    world.send([b"v"], headers=[(("hf-id", b"from elsewhere"),)])
    report = audit_spools(world.settings, topics=["orders"])
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "1 records of orders" in report.reasons[0]


def test_a_topic_without_any_number_proves_nothing(world: World) -> None:
    world.send([b"v"])
    assert audit_spools(world.settings, topics=["orders"]).verdict is Verdict.INCONCLUSIVE


@pytest.fixture
def told_of_six(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spool's files say that six messages were delivered."""
    line = Line(SPOOL, "orders", 0)
    files = SpoolFiles({line: 6}, {line: 6}, spools=[SPOOL])
    monkeypatch.setattr(spool, "read_spools", lambda directories: files)


@pytest.mark.usefixtures("told_of_six")
def test_markers_of_what_was_delivered_are_waited_for(world: World) -> None:
    """A spool that delivers exactly once is told so before Apache Kafka writes them."""
    send(world, range(6))
    log = world.cluster.topics["orders"].partitions[0]
    log.last_stable = 4

    def mark(fields: dict[str, Any]) -> None:
        log.last_stable = None

    keep = [lambda fields: None] * 2
    world.cluster.script(LIST_OFFSETS, *keep, mark)
    report = audit_spools(world.settings, topics=["orders"])
    assert report.verdict is Verdict.PROVEN, report.reasons
    assert report.partitions[0].fates == {"output": 6}


@pytest.mark.usefixtures("told_of_six")
def test_numbers_behind_an_open_transaction_are_not_lost(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_walk, "DECIDED_SECONDS_MAX", 0.05)
    send(world, [0, 2])
    send(world, [3, 4, 5])
    world.cluster.topics["orders"].partitions[0].last_stable = 2
    report = audit_spools(world.settings, topics=["orders"])
    assert one(report, Fate.LOST).keys == (f"{SPOOL}:0:1",)
    assert report.partitions[0].fates == {"output": 2, "lost": 1, "pending": 3}
    (gap,) = [each for each in report.unproven if each.is_gap]
    assert (
        f"{gap.what}: {gap.why}" == f"whether numbers 3-5 of {Line(SPOOL, 'orders', 0)} are in the topic: "
        "it holds 3 offsets behind a transaction that is still open"
    )


def test_whoever_walks_a_source_sees_gaps_from_the_scopes_start_on(world: World) -> None:
    send(world, [0, 1, 2, 4, 5])
    send(world, [0, 1, 2], partition=1)
    world.send([b"v"], topic="plain")
    for topic, start, expected in (
        ("orders", 0, "numbers 3 of the spool"),
        ("orders", 3, ""),
        ("plain", 0, ""),
    ):
        watch = SpoolWatch()
        with Cluster(world.settings) as cluster:
            logs = look(cluster, [topic])
            spans = {place: (min(start, ends.end), ends.end) for place, ends in logs.items()}
            decoder = SourceDecoder(Source(topics=(topic,)))
            examined = watch.examine(walk(cluster, spans, logs, decoder=decoder, observers=[watch]))
        assert [each.fate for each in examined.findings] == ([Fate.LOST] if expected else [])
        assert not any(each.is_gap for each in examined.unproven)
        assert all(expected in each.detail for each in examined.findings)


# ------------------------------------------------------------------- with the spool's files


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(str(tmp_path_factory.mktemp("spools") / "broker")) as process:
        yield process


def create(broker: BrokerProcess, topic: str, **config: str) -> AdminClient:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, **QUIET})
    settings = {name.replace("_", "."): value for name, value in config.items()}
    admin.create_topics([NewTopic(topic, 2, 1, config=settings)])[topic].result(30)
    return admin


def audit(broker: BrokerProcess, home: Path, *topics: str) -> Report:
    settings = {"bootstrap.servers": broker.bootstrap_servers}
    return audit_spools(settings, topics=topics, spools=[str(home)])


def written_down(home: Path) -> None:
    """Wait until the files know what was delivered: they are told about once a second."""
    wait_until(lambda: not read_spools([str(home)]).left, "the progress is written")


def test_what_the_files_say_was_delivered_is_there_or_lost(broker: BrokerProcess, tmp_path: Path) -> None:
    admin = create(broker, "bills")
    home = tmp_path / "spool"
    with Producer(broker.bootstrap_servers, spool=str(home)) as producer:
        for number in range(100):
            producer.send("bills", b"%d" % number, key=b"%d" % number)
        producer.flush()
        written_down(home)
        proven = audit(broker, home)
        assert proven.verdict is Verdict.PROVEN, proven.reasons
        assert sum(account.fates["output"] for account in proven.partitions) == 100
        # The cluster forgets what it has acknowledged.
        admin.delete_topics(["bills"])["bills"].result(30)
        create(broker, "bills")
        lost = audit(broker, home)
    assert {each.fate for each in lost.findings} == {Fate.LOST}
    assert sum(each.count for each in lost.findings) == 100
    assert "the spool was told that they were delivered" in lost.findings[0].detail


@pytest.mark.check
def test_what_was_refused_for_good_is_named_and_not_lost(broker: BrokerProcess, tmp_path: Path) -> None:
    create(broker, "small", max_message_bytes="2000")
    home = tmp_path / "spool"
    with Producer(broker.bootstrap_servers, spool=str(home)) as producer:
        producer.send("small", b"fits", key=b"k", partition=0)
        producer.send("small", b"x" * 5000, key=b"k", partition=0)
        producer.send("small", b"fits too", key=b"k", partition=0)
        assert producer.flush().refused_count == 1
        written_down(home)
        report = audit(broker, home, "small")
        assert report.verdict is Verdict.PROVEN, report.reasons
        assert report.partitions[0].fates == {"output": 2, "dead_letter": 1}
        assert any("were refused and are kept aside" in note for note in report.notes)
    # Whoever does not see the files cannot know that: for them it is missing.
    found = one(audit_spools({"bootstrap.servers": broker.bootstrap_servers}, topics=["small"]), Fate.LOST)
    assert "refused and kept aside, if so only its files know" in found.detail


def test_what_nobody_has_taken_yet_is_pending(broker: BrokerProcess, tmp_path: Path) -> None:
    create(broker, "waiting")
    nowhere = Producer("127.0.0.1:1", spool=str(tmp_path / "spool"))
    try:
        for number in range(3):
            nowhere.send("waiting", b"%d" % number, partition=1)
        home = [str(tmp_path / "spool")]
        wait_until(lambda: list(read_spools(home).stored.values()) == [3], "they are stored")
        waiting = audit(broker, tmp_path / "spool", "waiting")
        assert waiting.verdict is Verdict.PROVEN, waiting.reasons
        assert waiting.scope.pending == 3
    finally:
        nowhere.close(timeout=0)


def test_topics_that_were_not_read_are_a_gap(broker: BrokerProcess, tmp_path: Path) -> None:
    create(broker, "one")
    create(broker, "two")
    home = tmp_path / "spool"
    with Producer(broker.bootstrap_servers, spool=str(home)) as producer:
        producer.send("one", b"1")
        producer.send("two", b"2")
        producer.flush()
        written_down(home)
        assert audit(broker, home).verdict is Verdict.PROVEN
        report = audit(broker, home, "one")
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "what the spools sent to two: not audited; add --topic" in report.reasons[0]


def test_directories_that_hold_no_spool_are_said(world: World, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such directory"):
        audit_spools(world.settings, spools=[str(tmp_path / "none")])
    with pytest.raises(AuditError, match="the spools name no topic"):
        audit_spools(world.settings, spools=[str(tmp_path)])

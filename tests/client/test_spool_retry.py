"""What was set aside and is sent once more: each message is in one place or in the other, and arrives once."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError
from tests.support.fake_producer import FakeCluster, Stored, Verdict
from tests.support.faulty_files import FaultyFiles

from holdfast.client.spool import deliverer as deliverer_module
from holdfast.client.spool import idempotent, transactional, writer
from holdfast.client.spool.drain import Drain, Drained
from holdfast.client.spool.home import SpoolHome
from holdfast.client.spool.peek import SpoolPeek
from holdfast.client.spool.sender import SpooledSender
from holdfast.client.spool.transactional import PROGRESS_TOPIC
from holdfast.real import RealRandomness

SETTINGS = {"bootstrap.servers": "fake"}


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster({"orders": 1, PROGRESS_TOPIC: 1})


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, progress_topic: None) -> Iterator[FaultyFiles]:
    for module in (idempotent, transactional):
        monkeypatch.setattr(module, "BROKEN_SECONDS", 0.0)
    monkeypatch.setattr(deliverer_module, "PROGRESS_SECONDS", 0.02)
    # A group for each message: a crash between any two of them.
    monkeypatch.setattr(writer, "GROUP_BYTES_MAX", 1)
    files = FaultyFiles()
    yield files
    files.mend()


def bad(topic: str, partition: int, message: Stored) -> Verdict | None:
    is_bad = topic == "orders" and (message.value or b"").startswith(b"bad")
    return Verdict(KafkaError.INVALID_RECORD) if is_bad else None


def leave_refused(files: FaultyFiles, cluster: FakeCluster, home: Path, guarantee: str) -> str:
    """The id of a spool that has set aside five messages of eight."""
    cluster.refuse(bad)
    sender = SpooledSender(
        files,
        str(home),
        RealRandomness(),
        SETTINGS,
        1 << 30,
        is_exactly_once=guarantee == "exactly-once",
        make=cluster.make,
    )
    for number in range(8):
        value = b"%d" % number if number in (1, 4, 6) else b"bad%d" % number
        sender.send("orders", 0, None, value, (), -1, 30.0)
    assert sender.flush(30) == 0
    sender.close()
    return sender.id


def retry(files: FaultyFiles, cluster: FakeCluster, home: Path) -> list[Drained]:
    spools = SpoolHome(files, str(home), RealRandomness())
    draining = Drain(
        files,
        spools,
        RealRandomness(),
        SETTINGS,
        say=lambda line: None,
        is_over=lambda: False,
        make=cluster.make,
    )
    return list(draining.run(spools.ids(), 30.0, retry_refused=True))


@pytest.mark.parametrize("guarantee", ["at-least-once", "exactly-once"])
def test_what_brokers_take_now_arrives_and_the_rest_stays_with_its_reason(
    files: FaultyFiles, cluster: FakeCluster, tmp_path: Path, guarantee: str
) -> None:
    spool_id = leave_refused(files, cluster, tmp_path, guarantee)
    cluster.refuse(
        lambda topic, partition, message: (
            Verdict(KafkaError.INVALID_RECORD) if message.value in (b"bad2", b"bad5") else None
        )
    )
    assert retry(files, cluster, tmp_path) == [Drained(spool_id, 3, 2, 0, None)]
    assert cluster.values("orders") == [b"1", b"4", b"6", b"bad0", b"bad3", b"bad7"]
    peek = SpoolPeek(files, f"{tmp_path}/{spool_id}")
    assert [each.message.value for each in peek.refused()] == [b"bad2", b"bad5"]
    assert peek.state(spool_id, is_in_use=False).refused == 2
    cluster.refuse(lambda topic, partition, message: None)
    assert retry(files, cluster, tmp_path) == [Drained(spool_id, 2, 0, 0, None)]
    assert len({message.id for message in cluster.log("orders")}) == len(cluster.log("orders")) == 8
    assert SpoolHome(files, str(tmp_path), RealRandomness()).ids() == [], "nothing in it is of use to anybody"


@pytest.mark.parametrize("guarantee", ["at-least-once", "exactly-once"])
def test_a_process_that_ends_in_between_leaves_each_message_in_one_place(
    files: FaultyFiles, cluster: FakeCluster, tmp_path: Path, guarantee: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_refused(files, cluster, tmp_path, guarantee)
    cluster.refuse(lambda topic, partition, message: None)
    stored = 0
    store_again: Callable[..., Any] = writer.SpoolWriter._store_again

    def stop_soon(self: Any, refused: Any) -> None:
        nonlocal stored
        stored += 1
        if stored == 3:
            files.fail("write", errno.EIO, ".spool")
        store_again(self, refused)

    monkeypatch.setattr(writer.SpoolWriter, "_store_again", stop_soon)
    (first,) = retry(files, cluster, tmp_path)
    files.mend()
    assert (first.refused, stored) == (3, 3)
    (second,) = retry(files, cluster, tmp_path)
    assert (second.refused, second.left) == (0, 0)
    assert cluster.values("orders") == [b"1", b"4", b"6", b"bad0", b"bad2", b"bad3", b"bad5", b"bad7"]


def test_a_spool_that_we_may_not_touch_is_named_and_holds_up_no_other(
    files: FaultyFiles, cluster: FakeCluster, tmp_path: Path
) -> None:
    """Of another user, perhaps: its lock cannot be opened."""
    forbidden = leave_refused(files, cluster, tmp_path, "at-least-once")
    files.fail("lock", errno.EACCES, f"{forbidden}/lock")
    other = leave_refused(files, cluster, tmp_path, "at-least-once")
    assert other != forbidden
    cluster.refuse(lambda topic, partition, message: None)
    drained = {each.id: each for each in retry(files, cluster, tmp_path)}
    assert (drained[other].delivered, drained[other].problem) == (5, None)
    assert drained[forbidden].refused == 5
    assert "Permission denied" in (drained[forbidden].problem or "")

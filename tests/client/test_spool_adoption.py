"""Spools of dead owners: delivered their owners' way, by somebody, whatever is wrong with one of them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from tests.support.fake_producer import FakeCluster, FakeProducer, Verdict
from tests.support.faulty_files import FaultyFiles

from holdfast.client.spool import sender as sender_module
from holdfast.client.spool.home import SpoolHome
from holdfast.client.spool.sender import SpooledSender
from holdfast.client.spool.transactional import PROGRESS_TOPIC
from holdfast.real import RealRandomness
from holdfast.testing.engines import wait_until

Open = Callable[..., SpooledSender]


class Cluster(FakeCluster):
    """Of which no producer can be made while `is_refusing`."""

    is_refusing = False

    def make(self, settings: dict[str, Any]) -> FakeProducer:
        if self.is_refusing:
            raise KafkaException(KafkaError(KafkaError._INVALID_ARG, "no producer can be made"))
        return super().make(settings)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster({"orders": 1, PROGRESS_TOPIC: 1})


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def open_sender(
    tmp_path: Path,
    cluster: Cluster,
    files: FaultyFiles,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    progress_topic: None,
) -> Iterator[Open]:
    monkeypatch.setattr(sender_module, "LOOK_AFTER_SECONDS", 0.02)
    monkeypatch.setattr(sender_module, "ADOPT_SECONDS", 0.02)
    monkeypatch.setattr(sender_module, "LEFT_SECONDS", 0.5)
    opened: list[SpooledSender] = []

    def open_one(**options: Any) -> SpooledSender:
        sender = SpooledSender(
            files,
            str(tmp_path / "home"),
            RealRandomness(),
            {"bootstrap.servers": "fake"},
            1 << 30,
            say=said.append,
            make=cluster.make,
            **options,
        )
        opened.append(sender)
        return sender

    yield open_one
    files.mend()
    cluster.is_refusing = False
    for sender in opened:
        if not sender._is_closing:
            sender.close()


def send(sender: SpooledSender, value: bytes) -> None:
    sender.send("orders", 0, None, value, (), -1, 30.0).wait_stored(30)


def left_by_the_dead(open_sender: Open, cluster: FakeCluster, count: int) -> list[str]:
    """The ids of so many spools, each with a message of its id that is not delivered, in order."""
    cluster.away()
    dead = [open_sender() for _ in range(count)]
    for sender in dead:
        send(sender, sender.id.encode())
    for sender in dead:
        sender.close()
    return sorted(sender.id for sender in dead)


def has_arrived(cluster: FakeCluster, *spool_ids: str) -> bool:
    return {each.encode() for each in spool_ids} <= set(cluster.values("orders"))


def test_what_was_committed_by_a_killed_owner_is_not_sent_again_by_one_that_works_otherwise(
    open_sender: Open, cluster: Cluster, tmp_path: Path
) -> None:
    killed = open_sender(is_exactly_once=True)
    for number in range(20):
        send(killed, b"%d" % number)
    assert killed.flush(30) == 0
    killed.close()
    # What it had not come to write down when it was killed; the brokers know.
    (tmp_path / "home" / killed.id / "progress").unlink()
    other = open_sender()
    send(other, b"of the other")
    assert other.flush(30) == 0
    assert sorted(value or b"" for value in cluster.values("orders")) == sorted(
        [*(b"%d" % number for number in range(20)), b"of the other"]
    )
    assert other.id != killed.id


def test_a_spool_that_is_all_delivered_is_gone_on_with_in_another_manner(open_sender: Open) -> None:
    first = open_sender(is_exactly_once=True)
    send(first, b"0")
    assert first.flush(30) == 0
    first.close()
    assert open_sender().id == first.id


@pytest.mark.parametrize("file", ["delivery", "0", "lock"])
def test_a_spool_that_cannot_be_read_holds_up_none_behind_it_and_is_delivered_when_it_can(
    open_sender: Open, cluster: Cluster, files: FaultyFiles, file: str
) -> None:
    first, second, third = left_by_the_dead(open_sender, cluster, 3)
    if file == "lock":
        files.fail("lock", errno.EACCES, f"{first}/lock")
    else:
        files.fail("read", errno.EIO, f"{first}/{file}")
    cluster.back()
    assert open_sender().id == second
    wait_until(lambda: has_arrived(cluster, second, third), "those behind it are delivered")
    assert not has_arrived(cluster, first)
    files.mend()
    wait_until(lambda: has_arrived(cluster, first), "it was not kept locked")


def test_a_producer_that_cannot_be_made_ends_no_housekeeping(
    open_sender: Open, cluster: Cluster, said: list[str]
) -> None:
    send(open_sender(), b"of the living")
    dead = open_sender()
    cluster.away()
    send(dead, dead.id.encode())
    cluster.is_refusing = True
    dead.close()
    wait_until(lambda: any("no producer can be made" in line for line in said), "it is told")
    cluster.is_refusing = False
    cluster.back()
    wait_until(lambda: has_arrived(cluster, dead.id), "it is tried again")


def test_an_adopted_spool_that_failed_is_let_go_of_and_taken_again(
    open_sender: Open, cluster: Cluster, files: FaultyFiles, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, first, second = left_by_the_dead(open_sender, cluster, 3)
    monkeypatch.setattr(sender_module, "ADOPTED_MAX", 1)
    files.fail("write", errno.EIO, f"{first}/refused")
    cluster.refuse(
        lambda topic, partition, message: (
            Verdict(KafkaError.INVALID_RECORD) if message.value == first.encode() else None
        )
    )
    cluster.back()
    assert open_sender().id == own
    wait_until(
        lambda: any(first in line and "nothing more is delivered" in line for line in said), "it failed"
    )
    wait_until(lambda: has_arrived(cluster, second), "it stands in nobody's way")
    files.mend()
    cluster.refuse(lambda topic, partition, message: None)
    wait_until(lambda: has_arrived(cluster, first), "it was not kept locked")


def test_a_delivered_spool_that_cannot_be_removed_is_not_kept_locked(
    open_sender: Open, cluster: Cluster, files: FaultyFiles, said: list[str]
) -> None:
    living = open_sender()
    send(living, b"of the living")
    files.fail("rename", errno.EIO, ".gone")
    left_by_the_dead(open_sender, cluster, 1)
    cluster.back()
    wait_until(lambda: any(".gone" in line for line in said), "it was delivered, and could not be removed")
    files.mend()
    home = SpoolHome(files, living._home.path, RealRandomness())
    wait_until(lambda: home.ids() == [living.id], "it is removed")

"""A spool knows its cluster: at another one it waits, sends nothing, and says so; a copy of it is known for one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_producer import FakeCluster

from holdfast.client.delivery import Delivery
from holdfast.client.errors import DeliveryStopped
from holdfast.client.spool import deliverer as deliverer_module
from holdfast.client.spool import idempotent, transactional
from holdfast.client.spool import sender as sender_module
from holdfast.client.spool.identity import read_identity
from holdfast.client.spool.peek import SpoolPeek
from holdfast.client.spool.sender import SpooledSender
from holdfast.client.spool.transactional import PROGRESS_TOPIC
from holdfast.real import RealFileSystem, RealRandomness
from holdfast.testing.engines import wait_until

Open = Callable[..., SpooledSender]


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster({"orders": 1, PROGRESS_TOPIC: 1})


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def open_sender(
    home: Path,
    cluster: FakeCluster,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    progress_topic: None,
) -> Iterator[Open]:
    for module in (idempotent, transactional):
        monkeypatch.setattr(module, "BROKEN_SECONDS", 0.0)
        monkeypatch.setattr(module, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(deliverer_module, "PROGRESS_SECONDS", 0.02)
    monkeypatch.setattr(sender_module, "LOOK_AFTER_SECONDS", 0.02)
    monkeypatch.setattr(sender_module, "ADOPT_SECONDS", 0.02)
    opened: list[SpooledSender] = []

    def open_one(bootstrap: str = "fake", at: FakeCluster = cluster, **options: Any) -> SpooledSender:
        settings = {"bootstrap.servers": bootstrap}
        sender = SpooledSender(
            RealFileSystem(),
            str(home),
            RealRandomness(),
            settings,
            1 << 30,
            say=said.append,
            make=at.make,
            **options,
        )
        opened.append(sender)
        return sender

    yield open_one
    for sender in opened:
        if not sender._is_closing:
            sender.close()


def send(sender: SpooledSender, value: bytes) -> Delivery:
    return sender.send("orders", 0, None, value, (), -1, 30.0)


def identity_of(home: Path, sender: SpooledSender) -> Any:
    return read_identity(RealFileSystem(), str(home / sender.id))


@pytest.mark.parametrize("is_exactly_once", [False, True])
def test_at_another_cluster_the_spool_waits_and_says_so(
    open_sender: Open, cluster: FakeCluster, home: Path, said: list[str], is_exactly_once: bool
) -> None:
    sender = open_sender(is_exactly_once=is_exactly_once)
    send(sender, b"0").wait(30)
    wait_until(lambda: identity_of(home, sender).cluster_id == "the-cluster", "it is known whose it is")
    sender.close()
    cluster.cluster_id = "another"
    sender = open_sender(is_exactly_once=is_exactly_once)
    waiting = [send(sender, b"%d" % number) for number in range(1, 4)]
    wait_until(lambda: any("belong to cluster another" in line for line in said), "it is said")
    wait_until(lambda: (home / sender.id / "waiting.json").exists(), "it is noted")
    assert not any(delivery.is_settled for delivery in waiting)
    assert cluster.values("orders") == [b"0"]
    peek = SpoolPeek(RealFileSystem(), str(home / sender.id))
    wait_until(lambda: peek.state(sender.id, is_in_use=True).left == 3, "all of it is stored")
    state = peek.state(sender.id, is_in_use=True)
    assert state.cluster_id == "the-cluster"
    for (line,) in (state.waiting, sender.waiting):
        assert "belong to cluster another" in line
    cluster.cluster_id = "the-cluster"
    for delivery in waiting:
        delivery.wait(30)
    assert cluster.values("orders") == [b"0", b"1", b"2", b"3"]
    assert sum("belong to cluster another" in line for line in said) == 1
    wait_until(lambda: not (home / sender.id / "waiting.json").exists(), "nothing waits any more")


def test_what_another_cluster_confirmed_is_sent_to_the_right_one_again(
    open_sender: Open, cluster: FakeCluster, home: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = open_sender()
    send(sender, b"0").wait(30)
    wait_until(lambda: sender._own.deliverer._notes.progress.prefix > 0, "it is written down")
    monkeypatch.setattr(deliverer_module, "PROGRESS_SECONDS", 1000.0)
    # Somebody else answers at the address, and nobody has looked yet.
    mine, cluster.logs = cluster.logs, {}
    sender._own.deliverer._save_due = float("inf")
    cluster.cluster_id = "another"
    for number in range(1, 40):
        send(sender, b"%d" % number).wait(30)
    assert len(cluster.values("orders")) == 39
    sender._own.deliverer._save_due = 0.0
    wait_until(lambda: any("belong to cluster another" in line for line in said), "it is noticed")
    late = send(sender, b"40")
    cluster.logs = mine
    cluster.cluster_id = "the-cluster"
    late.wait(30)
    assert sender.flush(30) == 0
    assert cluster.values("orders") == [b"%d" % number for number in range(41)]


def test_the_cluster_that_was_sent_to_first_is_the_right_one_whoever_answers_when_that_is_written_down(
    open_sender: Open, cluster: FakeCluster, home: Path, said: list[str]
) -> None:
    sender = open_sender()
    sender._own.deliverer._save_due = float("inf")
    send(sender, b"0").wait(30)
    cluster.cluster_id = "another"
    sender._own.deliverer._save_due = 0.0
    wait_until(lambda: any("belong to cluster another" in line for line in said), "it is noticed")
    assert identity_of(home, sender).cluster_id == "the-cluster"
    sender.close()
    assert sender._own.deliverer.left == 1, "nobody knows who has it"


def test_spools_that_are_left_behind_are_adopted_only_at_their_own_cluster(
    open_sender: Open, cluster: FakeCluster, home: Path
) -> None:
    other = FakeCluster({"orders": 1})
    other.cluster_id = "another"
    first = open_sender("first")
    send(first, b"0").wait(30)
    wait_until(lambda: identity_of(home, first).cluster_id is not None, "it is known whose it is")
    cluster.away()
    send(first, b"for the first").wait_stored(30)
    first.close()
    second = open_sender("second", other)
    assert second.id != first.id
    send(second, b"for the second").wait(30)
    wait_until(lambda: identity_of(home, second).cluster_id == "another", "it is known whose it is")
    second._adopt()
    assert second._adopted == []
    # By another name, it is the same cluster.
    third = open_sender("renamed")
    cluster.back()
    send(third, b"of the third").wait(30)
    wait_until(lambda: b"for the first" in cluster.values("orders"), "it is adopted")
    assert other.values("orders") == [b"for the second"]


def test_each_address_of_a_home_counts_its_own_partitions(
    open_sender: Open, cluster: FakeCluster, home: Path
) -> None:
    other = FakeCluster({"orders": 7})
    for name, at in (("first", cluster), ("second", other)):
        sender = open_sender(name, at)
        sender.send("orders", None, b"key", b"value", (), -1, 30.0).wait(30)
        sender.close()
    assert json.loads((home / "topics.json").read_bytes()) == {
        "@first": {"orders": 1},
        "@second": {"orders": 7},
    }


def copy_back(home: Path, copy: Path) -> None:
    shutil.rmtree(home)
    shutil.copytree(copy, home)


@pytest.mark.parametrize("is_exactly_once", [False, True])
def test_a_spool_that_is_put_back_from_an_older_copy_gives_no_id_twice(
    open_sender: Open, cluster: FakeCluster, home: Path, tmp_path: Path, is_exactly_once: bool
) -> None:
    sender = open_sender()
    send(sender, b"0").wait(30)
    sender.close()
    shutil.copytree(home, tmp_path / "copy")
    for values in ([b"1", b"2"], [b"3", b"4", b"5"]):
        sender = open_sender()
        for value in values:
            send(sender, value).wait(30)
        sender.close()
        copy_back(home, tmp_path / "copy")
    ids = {message.id: message.value or b"" for message in cluster.log("orders")}
    assert sorted(ids.values()) == [b"0", b"1", b"2", b"3", b"4", b"5"]


@pytest.mark.parametrize("restarts", [0, 2])
@pytest.mark.parametrize("is_live", [False, True], ids=["copied-when-closed", "copied-while-in-use"])
def test_an_exactly_once_spool_that_is_an_older_copy_stops_however_much_it_stored_since(
    open_sender: Open, cluster: FakeCluster, home: Path, tmp_path: Path, restarts: int, is_live: bool
) -> None:
    sender = open_sender(is_exactly_once=True)
    send(sender, b"0").wait(30)
    if not is_live:
        sender.close()
    shutil.copytree(home, tmp_path / "copy")
    if not is_live:
        sender = open_sender(is_exactly_once=True)
    for number in range(1, 6):
        send(sender, b"%d" % number).wait(30)
    sender.close()
    copy_back(home, tmp_path / "copy")
    cluster.away()
    for _ in range(restarts):
        sender = open_sender(is_exactly_once=True)
        for number in range(4):
            send(sender, b"new %d" % number).wait_stored(30)
        sender.close()
    sender = open_sender(is_exactly_once=True)
    delivery = send(sender, b"new")
    delivery.wait_stored(30)
    cluster.back()
    with pytest.raises(DeliveryStopped, match=r"older copy of this spool.*holdfast spool renew"):
        delivery.wait(30)
    assert cluster.values("orders") == [b"%d" % number for number in range(6)]

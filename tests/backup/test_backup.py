"""Backups of a running broker, and directories restored from them."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from tests.support.tiers import by_tier
from tests.support.whole_cluster import WholeCluster, assert_same, rows, seen_by_clients

from holdfast.backup import copying
from holdfast.backup.copying import Copier
from holdfast.backup.outside import beyond_restored
from holdfast.backup.repository import Backup, BackupError, Repository
from holdfast.backup.restoring import EPOCHS_SKIPPED, Restorer
from holdfast.broker.server.embed import Broker
from holdfast.client import Producer as SpoolingProducer
from holdfast.errors import DataDirectoryError, UsageError
from holdfast.manifest.directory import read_directories
from holdfast.real import RealFileSystem
from holdfast.testing.kafka_fixtures import COORDINATORS

pytestmark = pytest.mark.check


def back_up(data: Path, to: Path) -> tuple[Backup, int]:
    return Copier(Repository(str(to)), lambda line: None).back_up([str(data)])


def restore(repository: Path, *targets: Path, number: int | None = None, skip_offsets: int = 0) -> Backup:
    store = Repository(str(repository))
    backup = store.load(number)
    Restorer(store, backup, [str(each) for each in targets], skip_offsets, lambda line: None).restore()
    return backup


def broker_on(data: Path) -> Broker:
    return Broker(str(data), settings=COORDINATORS)


def flushed(cluster: WholeCluster, data: Path) -> None:
    """Wait until the recovery points tell of everything that was acknowledged."""
    ends = cluster.ends()
    while True:
        found = read_directories([str(data)], is_running=True)
        points = {
            f"{topic}-{index}": files.recovery_point for (topic, index), files in found.partitions.items()
        }
        if all(points.get(name, 0) >= end for name, end in ends.items()):
            return


def test_a_restored_backup_of_a_running_broker_is_what_clients_saw(tmp_path: Path) -> None:
    with broker_on(tmp_path / "data") as broker:
        cluster = WholeCluster(broker.bootstrap_servers)
        cluster.fill()
        flushed(cluster, tmp_path / "data")
        expected = seen_by_clients(broker.bootstrap_servers)
        first, copied = back_up(tmp_path / "data", tmp_path / "backups")
        assert copied == first.bytes > 1 << 20
        cluster.send("segments", 10)
        again, copied_again = back_up(tmp_path / "data", tmp_path / "backups")
        assert again.number == 2
        assert copied_again < copied / 10
    backup = restore(tmp_path / "backups", tmp_path / "restored", number=1)
    with broker_on(tmp_path / "restored") as broker:
        seen = seen_by_clients(broker.bootstrap_servers)
        # That a transaction's markers are written is noted without a flush: a start may write one again.
        for ends in (seen["ends"], expected["ends"]):
            del ends["transactions-0"], ends["transactions-1"]
        assert_same(seen, expected)
        assert broker.server is not None
        image = broker.server.node.metadata.image
        assert all(
            partition.leader_epoch > EPOCHS_SKIPPED
            for topic in image.topics.values()
            for partition in topic.partitions
        )
    assert beyond_restored(Repository(str(tmp_path / "backups")), backup, [], []) == ([], [])


def small_backup(tmp_path: Path, messages: int = 20) -> Path:
    data = tmp_path / "data"
    with broker_on(data) as broker:
        cluster = WholeCluster(broker.bootstrap_servers)
        cluster.create("orders", 2)
        cluster.send("orders", messages, partitions=2)
        flushed(cluster, data)
        back_up(data, tmp_path / "backups")
        cluster.send("orders", 4, messages, partitions=2)
    return tmp_path / "backups"


def test_a_consumer_beyond_the_restored_end_is_told_of_the_cut(tmp_path: Path) -> None:
    backups = small_backup(tmp_path)
    # A second run of the lost cluster: without the skipped epochs, the restored one would give out the same.
    with broker_on(tmp_path / "data") as broker:
        WholeCluster(broker.bootstrap_servers).send("orders", 4, 50, partitions=2)
        message = read_at(broker, TopicPartition("orders", 0, 13))
        assert message.error() is None
        position = TopicPartition("orders", 0, 14, leader_epoch=message.leader_epoch())
    restore(backups, tmp_path / "restored")
    with broker_on(tmp_path / "restored") as broker:
        WholeCluster(broker.bootstrap_servers).send("orders", 20, 100, partitions=2)
        # New messages have the offsets of lost ones, and none of them is taken for what follows those.
        assert read_at(broker, position).error() is not None
        assert read_at(broker, TopicPartition("orders", 0, 14)).error() is None


def read_at(broker: Broker, position: TopicPartition) -> Message:
    settings = {"group.id": "g", "auto.offset.reset": "error", "enable.auto.commit": False}
    consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, **settings})
    consumer.assign([position])
    message = consumer.poll(30)
    consumer.close()
    assert message is not None
    return message


def test_no_offset_is_given_twice_where_some_are_skipped(tmp_path: Path) -> None:
    restore(small_backup(tmp_path), tmp_path / "restored", skip_offsets=1000)
    for number in range(2):
        with broker_on(tmp_path / "restored") as broker:
            cluster = WholeCluster(broker.bootstrap_servers)
            cluster.send("orders", 2, 100, partitions=2)
            found = rows(broker.bootstrap_servers, [TopicPartition("orders", 0)], "read_committed")
            assert [row[2] for row in found] == [*range(10), *range(1010, 1011 + number)]


def test_no_producer_id_is_given_twice(tmp_path: Path) -> None:
    restore(small_backup(tmp_path), tmp_path / "restored")
    with broker_on(tmp_path / "data") as broker, broker_on(tmp_path / "restored") as restored:
        assert broker.server is not None
        assert restored.server is not None
        gone = broker.server.node.metadata.image.next_producer_id
        producer = Producer({"bootstrap.servers": restored.bootstrap_servers, "enable.idempotence": True})
        producer.produce("orders", b"x")
        assert producer.flush(30) == 0
        assert restored.server.node.metadata.image.next_producer_id - 1000 > gone


@pytest.mark.parametrize("where", ["segment", "metadata", "document"])
def test_a_damaged_backup_is_refused(tmp_path: Path, where: str) -> None:
    backups = small_backup(tmp_path)
    backup = Repository(str(backups)).load()
    name = {
        "segment": next(each for each in backup.partitions if each.segments).segments[0].file,
        "metadata": backup.metadata,
        "document": "backups/1.json",
    }[where]
    path = backups / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(BackupError):
        restore(backups, tmp_path / "restored")
    with pytest.raises(DataDirectoryError), broker_on(tmp_path / "restored"):
        if where != "segment":  # nothing was begun
            raise DataDirectoryError


def test_a_restore_needs_an_empty_directory_and_as_many_as_there_were(tmp_path: Path) -> None:
    backups = small_backup(tmp_path)
    with pytest.raises(UsageError, match="not empty"):
        restore(backups, tmp_path / "data")
    with pytest.raises(UsageError, match="1 log directories"):
        restore(backups, tmp_path / "a", tmp_path / "b")
    with pytest.raises(UsageError, match="has no backup 7"):
        restore(backups, tmp_path / "a", number=7)


def test_a_repository_belongs_to_one_node(tmp_path: Path) -> None:
    backups = small_backup(tmp_path)
    with broker_on(tmp_path / "other"):
        pass
    with pytest.raises(UsageError, match="has backups of node 1 of cluster"):
        back_up(tmp_path / "other", backups)
    with pytest.raises(UsageError, match="no repository of backups"):
        back_up(tmp_path / "data", tmp_path / "other")


def test_a_directory_without_checkpoints_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    small_backup(tmp_path)
    (tmp_path / "data" / "recovery-point-offset-checkpoint").unlink()
    with pytest.raises(DataDirectoryError, match="no checkpoint tells how far it is flushed"):
        back_up(tmp_path / "data", tmp_path / "more")


def test_old_backups_go_with_the_files_that_only_they_have(tmp_path: Path) -> None:
    backups = small_backup(tmp_path, messages=600)
    with broker_on(tmp_path / "data") as broker:
        cluster = WholeCluster(broker.bootstrap_servers)
        cluster.admin.delete_topics(["orders"])["orders"].result(30)
        back_up(tmp_path / "data", backups)
    repository = Repository(str(backups))
    assert repository.remove(keep=1) == [1]
    assert not [path for path in backups.rglob("*.log") if "metadata" not in str(path)]
    restore(backups, tmp_path / "restored")


@pytest.mark.quick
@pytest.mark.parametrize("error", [errno.EXDEV, errno.EOPNOTSUPP])
def test_where_blocks_cannot_be_shared_bytes_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    data = random.Random(error).randbytes(300_000)
    (tmp_path / "source").write_bytes(data)

    def refuse(*given: object) -> int:
        raise OSError(error, "refused")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(copying, "COPY_BYTES", 65_536)
    fs = RealFileSystem()
    with (
        closing(fs.open(str(tmp_path / "source"), "read")) as source,
        closing(fs.open(str(tmp_path / "target"), "create")) as target,
    ):
        copying.copy_range(source, target, 0, 100_000)
        copying.copy_range(source, target, 100_000, len(data) + 1)  # it was cut meanwhile
        assert target.pread(len(data) + 1, 0) == data


def test_a_disk_that_fails_is_no_reason_to_copy_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, backups = tmp_path / "data", tmp_path / "backups"
    with broker_on(data) as broker:
        WholeCluster(broker.bootstrap_servers).create("orders")

    def is_full(*given: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with broker_on(data) as broker:
        cluster = WholeCluster(broker.bootstrap_servers)
        cluster.send("orders", 10)
        flushed(cluster, data)
        with monkeypatch.context() as patched:
            patched.setattr(os, "copy_file_range", is_full)
            with pytest.raises(BackupError, match=f"{backups}: No space.*run it again"):
                back_up(data, backups)
        backup, _ = back_up(data, backups)
    assert backup.number == 1
    with pytest.raises(UsageError, match="lies in the log directory"):
        back_up(data, data / "backups")
    with pytest.raises(UsageError, match="lies in the repository"):
        restore(backups, backups / "restored")


@pytest.mark.quick
def test_messages_of_a_spool_that_are_lost_are_named(tmp_path: Path) -> None:
    data, spool = tmp_path / "data", tmp_path / "spool"
    with broker_on(data) as broker:
        cluster = WholeCluster(broker.bootstrap_servers)
        cluster.create("orders")

        def send(count: int) -> None:
            with SpoolingProducer(broker.bootstrap_servers, spool=str(spool)) as producer:
                for number in range(count):
                    producer.send("orders", f"{number}".encode())

        send(5)
        flushed(cluster, data)
        backup, _ = back_up(data, tmp_path / "backups")
        beyond, _ = beyond_restored(Repository(str(tmp_path / "backups")), backup, [], [str(spool)])
        assert beyond == []
        send(3)
    beyond, _ = beyond_restored(Repository(str(tmp_path / "backups")), backup, [], [str(spool)])
    assert [(each.partition, each.position, each.restored) for each in beyond] == [("orders-0", 8, 5)]
    assert "messages 5 to 7 were delivered and are lost" in beyond[0].advice


@pytest.mark.long
def test_several_directories_are_restored_to_as_many(tmp_path: Path) -> None:
    data, restored = [
        [str(tmp_path / f"{name}{number}") for number in range(2)] for name in ("data", "restored")
    ]
    with Broker(",".join(data), settings=COORDINATORS) as broker:
        cluster = WholeCluster(broker.bootstrap_servers)
        cluster.create("orders", 6)
        cluster.send("orders", 60, partitions=6)
        ends = cluster.ends()
        points: dict[str, int] = {}
        while any(points.get(name, 0) < end for name, end in ends.items()):
            found = read_directories(data, is_running=True).partitions
            points = {f"{topic}-{index}": files.recovery_point for (topic, index), files in found.items()}
        expected = seen_by_clients(broker.bootstrap_servers)
        waits: list[float] = []
        Copier(Repository(str(tmp_path / "backups")), lambda line: None, waits.append).back_up(data)
        assert len(waits) == 1
    backup = restore(tmp_path / "backups", *map(Path, restored))
    assert {each.directory for each in backup.partitions} == {each for each, _ in backup.directories}
    with Broker(",".join(restored), settings=COORDINATORS) as broker:
        assert_same(seen_by_clients(broker.bootstrap_servers), expected)


KILLED = """
import os, signal, sys
from holdfast.backup import copying, outside, restoring
from holdfast.cli import backup, restore
from holdfast.cli.app import run_command
from holdfast.real import RealFile

flush = RealFile.flush
afters = [int(each) for each in sys.argv[1].split(",")]

def flush_or_die(self):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    flush(self)

RealFile.flush = flush_or_die
for left in afters:
    child = os.fork()
    if not child:
        os._exit(run_command(sys.argv[2:]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def run_killed(afters: str, *arguments: str) -> list[int]:
    """Run a command again and again, killed at the flush of that number each time; returns the exit codes."""
    command = [sys.executable, "-c", KILLED, afters, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.splitlines() if line.lstrip("-").isdecimal()]


def test_a_backup_and_a_restore_go_on_after_a_kill_anywhere(tmp_path: Path) -> None:
    is_long = by_tier(quick=0, check=0, long=1)
    data, backups, target = tmp_path / "data", tmp_path / "backups", tmp_path / "restored"
    with broker_on(data) as broker:
        cluster = WholeCluster(broker.bootstrap_servers)
        cluster.create("orders", 8)
        cluster.send("orders", 400, partitions=8)
        flushed(cluster, data)
        expected = seen_by_clients(broker.bootstrap_servers)
        at = "0,1,2,3,4,4,5,10000" if is_long else "1,4,10000"
        codes = run_killed(at, "backup", str(data), str(backups))
    assert codes.count(-signal.SIGKILL) >= (4 if is_long else 2)
    assert codes[-1] == 0
    at = "0,1,2,3,6,12,20,30" if is_long else "3,30"
    codes = run_killed(at, "restore", str(backups), str(target))
    assert codes == [-signal.SIGKILL] * len(at.split(","))
    with pytest.raises(DataDirectoryError, match="holdfast restore"), broker_on(target):
        pass
    assert run_killed("10000", "restore", str(backups), str(target)) == [0]
    with broker_on(target) as broker:
        assert_same(seen_by_clients(broker.bootstrap_servers), expected)


def test_the_command_line_backs_up_lists_and_restores(tmp_path: Path) -> None:
    backups = small_backup(tmp_path)
    listed = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "restore", str(backups), "--list", "--output", "json"],
        capture_output=True,
        check=True,
    )
    assert [each["backup"] for each in json.loads(listed.stdout)] == [1]
    shutil.rmtree(tmp_path / "data")
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "restore", str(backups), str(tmp_path / "data")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "holdfast serve --data-dir" in done.stdout

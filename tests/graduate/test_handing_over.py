"""What a hand-over refuses, recovers, mends and says."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import pytest
from tests.graduate.conftest import Stopped

from holdfast import Broker
from holdfast.broker.metadata.image import Resource, ResourceType
from holdfast.config.properties import parse_properties
from holdfast.errors import CorruptLog, DataDirectoryError, DataDirectoryLocked, HoldfastError, UsageError
from holdfast.graduate import handing_over
from holdfast.graduate.handing_over import Refused, graduate, prepare
from holdfast.manifest.directory import read_directories
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.engines import Engine


def test_what_cannot_be_handed_over_is_refused_by_name_and_nothing_changes(stopped: Stopped) -> None:
    before = stopped.tree()
    for request, error, words in (
        (stopped.asking(kafka_version="3.9"), UsageError, "earlier versions do not read"),
        (stopped.asking(listen=("0.0.0.0", 9092)), UsageError, "--advertise"),
        (stopped.asking(output=stopped.paths[0] + "/out"), UsageError, "lies in the log directory"),
        (stopped.asking(log_dirs=stopped.paths[:1]), DataDirectoryError, "is not among|metadata log"),
        (stopped.asking(log_dirs=("/nowhere",)), DataDirectoryError, "there is no directory"),
        (stopped.asking(user="nobody-of-that-name"), UsageError, "no such user"),
    ):
        with pytest.raises(error, match=words):
            graduate(request)
    os.makedirs(f"{stopped.paths[0]}/lost+found")
    with pytest.raises(Refused, match="below the mount point"):
        graduate(stopped.request)
    os.rmdir(f"{stopped.paths[0]}/lost+found")
    logs = [Path(path, "orders-0/00000000000000000000.log") for path in stopped.paths]
    log = next(path for path in logs if path.exists())
    sound = log.read_bytes()
    log.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(CorruptLog, match="checksum"):
        graduate(stopped.request)
    log.write_bytes(sound)
    assert stopped.tree() == before


def test_a_wrong_directory_does_not_become_a_cluster(stopped: Stopped, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataDirectoryError, match="no log directory of holdfast"):
        graduate(stopped.asking(log_dirs=(str(tmp_path / "empty"),)))
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_full_disk_is_named_and_what_was_begun_is_taken_back(
    stopped: Stopped, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stopped.tree()

    def is_full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(handing_over, "write_atomically", is_full)
        with pytest.raises(Refused, match=r"out cannot be written to: No space.*nothing was changed"):
            graduate(stopped.request)
    assert stopped.tree() == before
    left = iter(range(3))

    def fills_up() -> None:
        if next(left, None) is None:
            is_full()

    with pytest.raises(HoldfastError, match=r"stopped half way.*--undo"):
        graduate(stopped.request, tick=fills_up)
    assert stopped.tree() != before
    handing_over.undo(stopped.output)
    assert stopped.tree() == before


def test_a_hand_over_with_another_output_is_refused(stopped: Stopped) -> None:
    graduate(stopped.request)
    after = stopped.tree()
    with pytest.raises(UsageError, match="with another --output"):
        graduate(stopped.asking(output=f"{stopped.output}-2"))
    assert stopped.tree() == after
    handing_over.undo(stopped.output)


def test_a_running_node_is_prepared_and_not_handed_over(tmp_path: Path) -> None:
    data, output = str(tmp_path / "data"), str(tmp_path / "out")
    with Broker(data) as broker:
        Engine("holdfast", broker.bootstrap_servers).create_topic("orders")
        prepare([data], output)
        with pytest.raises(DataDirectoryLocked, match="prepare"):
            graduate(handing_over.Request((data,), ("127.0.0.1", 1), ("127.0.0.1", 2), output))


@pytest.mark.check
def test_what_an_unclean_stop_left_is_recovered_first(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    broker = BrokerProcess(data).start()
    engine = Engine("holdfast", broker.bootstrap_servers)
    engine.create_topic("orders")
    engine.write("orders", {0: map(str, range(100))})
    broker.crash()
    request = handing_over.Request((data,), ("127.0.0.1", 1), ("127.0.0.1", 2), str(tmp_path / "out"))
    with pytest.raises(Refused, match="not clean"):
        graduate(request, is_dry_run=True)
    said: list[str] = []
    outcome = graduate(request, say=said.append)
    assert outcome.manifest.records == 100
    assert any("recovers the logs first" in line for line in said)


def test_settings_are_translated_and_what_has_no_counterpart_is_named(stopped: Stopped) -> None:
    given = {
        "log.retention.hours": "24",
        "holdfast.flush.threads": "4",
        "listeners": "PLAINTEXT://127.0.0.1:9092",
        "log.dirs": "/elsewhere",
        "offsets.topic.replication.factor": "1",
    }
    outcome = graduate(stopped.asking(given=given, advertised=("broker.example", 9092)))
    written = parse_properties(Path(stopped.output, "server.properties").read_text())
    assert written["log.retention.hours"] == "24"
    assert written["log.dirs"] == ",".join(stopped.paths)
    assert written["listeners"] == "PLAINTEXT://127.0.0.1:19092,CONTROLLER://127.0.0.1:19093"
    assert written["advertised.listeners"].startswith("PLAINTEXT://broker.example:9092,")
    assert written["auto.create.topics.enable"] == "false"
    assert written["transaction.state.log.min.isr"] == "1"
    assert not [name for name in written if name.startswith("holdfast.")]
    said = "\n".join(outcome.without_counterpart)
    for name in ("holdfast.flush (default group)", "holdfast.clock.settle.ms", "holdfast.flush.threads=4"):
        assert name in said
    assert any("clients knew this node as" in note for note in outcome.notes)


def test_our_settings_are_taken_out_and_kafka_flushes_before_it_acknowledges(stopped: Stopped) -> None:
    graduate(stopped.request)
    image = read_directories(stopped.paths, is_running=False).image
    assert image.brokers[1].fenced
    assert image.settings(Resource(ResourceType.BROKER, "")) == {"log.flush.interval.messages": "1"}
    assert image.settings(Resource(ResourceType.TOPIC, "orders")) == {
        "retention.ms": "86400000",
        "flush.messages": str(2**63 - 1),
    }
    assert image.settings(Resource(ResourceType.TOPIC, "prices")) == {"cleanup.policy": "compact"}
    back = Path(stopped.output, handing_over.WAY_BACK_FILE).read_text().splitlines()
    assert back == [
        "holdfast configs alter --entity-type topics --entity-name orders --add-config holdfast.flush=os",
        "holdfast configs alter --entity-type topics --entity-name prices --add-config flush.messages=500",
    ]


def test_a_node_that_left_flushing_to_the_system_is_not_made_to_flush(stopped: Stopped) -> None:
    graduate(stopped.asking(given={"holdfast.flush": "os"}))
    image = read_directories(stopped.paths, is_running=False).image
    assert image.settings(Resource(ResourceType.BROKER, "")) == {}
    assert image.settings(Resource(ResourceType.TOPIC, "prices"))["flush.messages"] == "500"


def test_what_retention_put_off_for_the_clocks_sake_is_named(
    stopped: Stopped, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert graduate(stopped.request, is_dry_run=True).put_off == []
    ahead = time.time_ns() + 30 * 86_400_000 * 1_000_000
    monkeypatch.setattr(time, "time_ns", lambda: ahead)
    found = graduate(stopped.request, is_dry_run=True).put_off
    assert [(each.topic, each.partition, each.first_offset, each.end_offset) for each in found] == [
        ("orders", 0, 0, 300),
        ("orders", 2, 0, 1),
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="files are given to others by root alone")
def test_files_are_given_to_the_user_that_kafka_runs_as_and_back(stopped: Stopped) -> None:
    before = stopped.tree()
    graduate(stopped.asking(user="nobody"))
    owners = {owner for _, owner, _, _ in stopped.tree().values()}
    assert owners == {65534}
    handing_over.undo(stopped.output)
    assert stopped.tree() == before


def test_a_foreign_directory_on_another_file_system_is_refused(stopped: Stopped) -> None:
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat(stopped.paths[0]).st_dev:
        pytest.skip("one file system alone")
    output = f"/dev/shm/holdfast-{os.getpid()}"
    try:
        with pytest.raises(Refused, match="another file system"):
            graduate(stopped.asking(output=output))
        shutil.rmtree(f"{stopped.paths[0]}/notes")
        before = stopped.tree()
        graduate(stopped.asking(output=output))
        assert not os.path.exists(f"{stopped.paths[0]}/holdfast.session")
        handing_over.undo(output)
        assert stopped.tree() == before
    finally:
        shutil.rmtree(output, ignore_errors=True)

"""Trouble with the disk under a real process: clear words, the right exit code, and nothing acknowledged is lost."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from holdfast.errors import ExitCode
from holdfast.testing.broker import BrokerDied, BrokerProcess
from holdfast.testing.wire_client import CLOSED, WireClient
from holdfast.wire.api_keys import FETCH, PRODUCE
from holdfast.wire.batch import iterate_records, make_batch, read_header

CreateTopic = Callable[..., None]
StartBroker = Callable[..., BrokerProcess]


def produce(broker: BrokerProcess, value: bytes, topic: str = "t", partition: int = 0) -> Any:
    """The partition's answer to one message with acks=all, or CLOSED."""
    batch = make_batch([value], timestamp=time.time_ns() // 1_000_000)
    data = [{"index": partition, "records": batch}]
    fields = {"acks": -1, "timeout": 30_000, "topic_data": [{"name": topic, "partition_data": data}]}
    with WireClient(broker.bootstrap_servers) as client:
        answer = client.ask(PRODUCE, 9, fields)
    return answer if isinstance(answer, str) else answer.responses[0].partition_responses[0]


def fetch(broker: BrokerProcess, offset: int, topic: str = "t", partition: int = 0) -> Any:
    wanted = {
        "partition": partition,
        "fetch_offset": offset,
        "partition_max_bytes": 1 << 20,
        "current_leader_epoch": -1,
        "last_fetched_epoch": -1,
    }
    fields = {
        "max_wait": 0,
        "min_bytes": 1,
        "max_bytes": 1 << 20,
        "session_epoch": -1,
        "topics": [{"topic": topic, "partitions": [wanted]}],
    }
    with WireClient(broker.bootstrap_servers) as client:
        return client.ask(FETCH, 12, fields).responses[0].partitions[0]


def values(broker: BrokerProcess, topic: str = "t", partition: int = 0) -> list[bytes | None]:
    """Everything a reader finds in a partition."""
    found: list[bytes | None] = []
    while data := fetch(broker, len(found), topic, partition).records:
        while len(data) >= 61 and len(data) >= (size := read_header(data).size):
            found += [record.value for record in iterate_records(data[:size])]
            data = data[size:]
    return found


def fill(broker: BrokerProcess, count: int, **where: Any) -> list[bytes]:
    sent = []
    for number in range(count):
        sent.append(b"%d %s" % (number, b"x" * 200))
        done = produce(broker, sent[-1], **where)
        assert done.error_code is ErrorCode.none
    return sent


def segment_of(broker: BrokerProcess, which: int = -1, partition: int = 0) -> Path:
    return sorted(Path(broker.data_dir, f"t-{partition}").glob("*.log"))[which]


# Directories that cannot be used


def test_a_second_process_on_one_directory_is_told_so_and_the_first_goes_on(
    broker: BrokerProcess, create_topic: CreateTopic
) -> None:
    create_topic(broker, "t")
    second = subprocess.run(
        [
            sys.executable,
            "-m",
            "holdfast.cli",
            "serve",
            "--data-dir",
            broker.data_dir,
            "--listen",
            "127.0.0.1:0",
        ],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == ExitCode.USAGE
    assert b"in use by another broker" in second.stderr
    assert broker.data_dir.encode() in second.stderr
    assert b"Traceback" not in second.stderr
    assert produce(broker, b"still here").base_offset == 0


def test_the_lock_goes_with_the_process_however_it_ends(broker: BrokerProcess) -> None:
    for _ in range(3):
        broker.crash()
        broker.start()
    assert broker.stop() == 0
    broker.start()


@pytest.mark.parametrize("what", ["a file", "under a file", "no such place"])
@pytest.mark.check
def test_a_directory_that_cannot_be_made_is_an_error_of_usage(tmp_path: Path, what: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    path = {"a file": file, "under a file": file / "data", "no such place": Path("/proc/holdfast-test")}[what]
    died = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "serve", "--data-dir", str(path), "--listen", "127.0.0.1:0"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert died.returncode == ExitCode.USAGE, died.stderr
    assert str(path).encode() in died.stderr
    assert b"Traceback" not in died.stderr


def in_namespace(script: str) -> tuple[str, ...]:
    """A command before the broker's that prepares a file system of its own for it; skips where that is forbidden."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    user = () if os.geteuid() == 0 else ("--map-root-user",)
    command = ("unshare", *user, "--mount", "sh", "-c", f'{script} && exec "$0" "$@"')
    tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"this machine does not let a process mount: {tried.stderr.decode().strip()}")
    return command


def test_a_directory_that_cannot_be_written_is_an_error_of_usage(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    prefix = in_namespace(f"mount --bind {data} {data} && mount -o remount,bind,ro {data}")
    with pytest.raises(BrokerDied) as died, BrokerProcess(str(data), prefix=prefix):
        pass
    assert "exited with 2" in str(died.value)
    assert "Read-only file system" in str(died.value)
    assert "Traceback" not in str(died.value)


# A disk that fills up, turns read-only, or refuses to grow a file


def test_a_full_disk_refuses_messages_and_takes_them_again_when_there_is_room(
    tmp_path: Path, create_topic: CreateTopic
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    # The name is a way in from outside the namespace: /proc/<pid>/root.
    prefix = in_namespace(f"mount -t tmpfs -o size=4m none {data}")
    with BrokerProcess(str(data), prefix=prefix) as broker:
        create_topic(broker, "t")
        sent = fill(broker, 3)
        ballast = Path(f"/proc/{broker.pid}/root{data}/ballast")
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))
        refused = 0
        for _ in range(30):
            done = produce(broker, b"y" * 3000)
            refused += done.error_code is ErrorCode.kafka_storage_error
            if done.error_code is ErrorCode.none:
                sent.append(b"y" * 3000)
        assert refused > 20
        assert broker.has_said(r"ERROR log directory \S+ refuses writes: .*No space left.* bytes are free")
        assert values(broker) == sent, "readers are served all the while"
        ballast.unlink()
        sent.append(b"room again")
        assert produce(broker, b"room again").error_code is ErrorCode.none
        assert values(broker) == sent
        broker_is_up(broker)


def broker_is_up(broker: BrokerProcess) -> None:
    with WireClient(broker.bootstrap_servers) as client:
        assert client.is_alive()


def produce_or_closed(broker: BrokerProcess, value: bytes) -> Any:
    try:
        return produce(broker, value)
    except OSError:
        return CLOSED


def test_a_write_that_the_system_refuses_takes_the_directory_offline_and_keeps_what_was_acknowledged(
    start_broker: StartBroker, create_topic: CreateTopic
) -> None:
    """A limit on the size of files stands in for a disk that fails in the middle of a write: no root needed."""
    if shutil.which("prlimit") is None:
        pytest.skip("prlimit is not installed")
    broker = start_broker(prefix=("prlimit", "--fsize=60000"))
    create_topic(broker, "t")
    sent: list[bytes] = []
    answer: Any = None
    for number in range(400):
        answer = produce_or_closed(broker, b"%d %s" % (number, b"w" * 300))
        if answer == CLOSED or answer.error_code is not ErrorCode.none:
            break
        sent.append(b"%d %s" % (number, b"w" * 300))
    else:
        pytest.fail("the limit was never met")
    assert len(sent) > 100
    assert answer == CLOSED or answer.error_code is ErrorCode.kafka_storage_error
    assert broker.has_said(r"log directory \S+ is offline until restart")
    assert broker.wait() == 1, "what its supervisor goes by"
    repaired = BrokerProcess(broker.data_dir)
    with repaired:
        assert values(repaired) == sent
        assert produce(repaired, b"goes on").base_offset == len(sent)


# Damage found at the next start


@pytest.fixture
def filled(broker: BrokerProcess, create_topic: CreateTopic) -> tuple[BrokerProcess, list[bytes]]:
    """Two partitions of small segments; the first is going to be damaged."""
    create_topic(broker, "t", partitions=2, internal_segment_bytes="2000", holdfast_write_ahead_bytes="0")
    sent = fill(broker, 30)
    assert fill(broker, 3, partition=1)
    assert len(list(Path(broker.data_dir, "t-0").glob("*.log"))) > 2
    return broker, sent


def checkpointed(broker: BrokerProcess) -> None:
    """Wait until recovery points are on disk, then kill."""
    path = Path(broker.data_dir, "recovery-point-offset-checkpoint")
    deadline = time.monotonic() + 10
    while "t 0 30" not in path.read_text(encoding="ascii") and time.monotonic() < deadline:
        os.sched_yield()
    assert "t 0 30" in path.read_text(encoding="ascii")
    broker.crash()


Filled = tuple[BrokerProcess, list[bytes]]


def test_garbage_behind_the_last_batch_is_cut_and_kept_and_told(filled: Filled) -> None:
    broker, sent = filled
    broker.crash()
    with segment_of(broker).open("ab") as file:
        file.write(b"torn write " * 20)
    broker.start()
    assert values(broker) == sent
    assert re.search(r"t-0/\d+\.log: cut 220 bytes", broker.log())
    kept = list(Path(broker.data_dir, "t-0").glob("*.cut"))
    assert [path.read_bytes() for path in kept] == [b"torn write " * 20]
    assert produce(broker, b"next").base_offset == 30


@pytest.mark.parametrize("which", [-1, -2])
def test_damage_in_the_middle_takes_one_partition_offline_and_the_others_serve(
    filled: Filled, which: int
) -> None:
    broker, _ = filled
    broker.crash()
    path = segment_of(broker, which)
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0x10
    path.write_bytes(content)
    # Without recovery points everything is verified, as after a long time without a checkpoint.
    Path(broker.data_dir, "recovery-point-offset-checkpoint").unlink()
    for _ in range(2):
        broker.start()
        assert produce(broker, b"x").error_code is ErrorCode.kafka_storage_error
        assert fetch(broker, 0).error_code is ErrorCode.kafka_storage_error
        assert produce(broker, b"x", partition=1).error_code is ErrorCode.none
        assert re.search(rf"partition t-0 is offline: {path}: damaged at \d+ \(offset \d+\)", broker.log())
        assert path.read_bytes() == content, "nothing was changed"
        broker.crash()
    content[len(content) // 3] ^= 0x10
    path.write_bytes(content)
    broker.start()
    assert len(values(broker)) == 30


def test_a_segment_that_lost_its_end_below_the_recovery_point_is_not_taken_for_a_shorter_one(
    filled: Filled,
) -> None:
    broker, sent = filled
    checkpointed(broker)
    path = segment_of(broker)
    whole = path.read_bytes()
    for length in (0, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        broker.start()
        assert fetch(broker, 0).error_code is ErrorCode.kafka_storage_error
        assert "t-0 is offline" in broker.log()
        broker.crash()
    path.write_bytes(whole)
    broker.start()
    assert values(broker) == sent


@pytest.mark.check
@pytest.mark.parametrize("pattern", ["t-0/*.index", "t-0/*.timeindex", "t-0/*.snapshot"])
def test_indexes_and_snapshots_may_be_lost_or_damaged(filled: Filled, pattern: str) -> None:
    broker, sent = filled
    for damage in ("delete", "empty", "garbage", "flip"):
        for end in (broker.stop, broker.crash):
            end()
            for path in Path(broker.data_dir).glob(pattern):
                damage_file(path, damage)
            broker.start()
            assert values(broker) == sent, (damage, end)
            sent.append(b"next")
            assert produce(broker, b"next").base_offset == len(sent) - 1
    assert "is offline" not in broker.log()


def damage_file(path: Path, damage: str) -> None:
    content = bytearray(path.read_bytes())
    if damage == "delete":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "garbage":
        path.write_bytes(b"garbage " * 6)
    elif content:
        content[len(content) // 2] ^= 0x04
        path.write_bytes(content)


@pytest.mark.check
@pytest.mark.parametrize(
    "name",
    [
        "recovery-point-offset-checkpoint",
        "log-start-offset-checkpoint",
        "holdfast.session",
        ".kafka_cleanshutdown",
        "t-0/leader-epoch-checkpoint",
        "t-0/partition.metadata",
    ],
)
def test_checkpoints_may_be_lost_or_damaged(filled: Filled, name: str) -> None:
    broker, sent = filled
    path = Path(broker.data_dir, name)
    for damage in ("delete", "empty", "garbage"):
        for end in (broker.stop, broker.crash):
            end()
            if path.exists():
                damage_file(path, damage)
            broker.start()
            assert values(broker) == sent, (damage, end)
            sent.append(b"next")
            assert produce(broker, b"next").base_offset == len(sent) - 1
    assert "is offline" not in broker.log()


def test_garbage_in_meta_properties_ends_the_start_and_names_the_file(filled: Filled) -> None:
    broker, _ = filled
    broker.stop()
    Path(broker.data_dir, "meta.properties").write_bytes(b"\xff\xfe garbage")
    with pytest.raises(BrokerDied, match=r"meta\.properties"):
        broker.start()


def test_damage_in_the_metadata_log_ends_the_start_and_names_the_file(filled: Filled) -> None:
    broker, _ = filled
    broker.crash()
    path = Path(broker.data_dir, "__cluster_metadata-0", f"{0:020d}.log")
    content = bytearray(path.read_bytes())
    content[70] ^= 1
    path.write_bytes(content)
    with pytest.raises(BrokerDied, match="__cluster_metadata-0") as died:
        broker.start()
    assert "Traceback" not in str(died.value)
    assert path.read_bytes() == content


def test_a_deleted_segment_in_the_middle_is_noticed(filled: Filled) -> None:
    broker, _ = filled
    broker.crash()
    Path(broker.data_dir, "recovery-point-offset-checkpoint").write_bytes(b"0\n0\n")
    segment_of(broker, -2).unlink()
    broker.start()
    assert fetch(broker, 0).error_code is ErrorCode.kafka_storage_error


# Ending


def test_a_signal_while_it_starts_ends_it(tmp_path: Path) -> None:
    broker = BrokerProcess(str(tmp_path / "data"))
    process = broker.begin_start()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) is not None
    with broker:
        broker_is_up(broker)

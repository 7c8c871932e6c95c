"""Machines other than Linux: macOS is served with what it has, Windows and free-threaded builds of Python are refused.

There is no Mac among the machines that tests run on: Linux's calls are taken away instead (`without_linux.py`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

import holdfast
from holdfast import real
from holdfast.broker.server.embed import create_topic
from holdfast.cli.__main__ import main
from holdfast.errors import UsageError
from holdfast.testing.broker import BrokerProcess

WITHOUT_LINUX: Final = Path(__file__).with_name("without_linux.py")
WAIT_SECONDS_MAX: Final = 60.0
RECORDS: Final = 50


def open_without_linux(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    at = command.index("-m")
    assert command[at + 1] == "holdfast.cli"
    return subprocess.Popen([sys.executable, str(WITHOUT_LINUX), *command[at + 2 :]], **options)


class ElsewhereBroker(BrokerProcess):
    open_process = staticmethod(open_without_linux)


@pytest.mark.check
def test_a_broker_without_linux_flushes_recovers_and_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = tmp_path / "flushed"
    monkeypatch.setenv("FLUSHED", str(flushed))
    with ElsewhereBroker(str(tmp_path / "data")) as broker:
        create_topic(broker.bootstrap_servers, "orders", 1, None)
        send(broker, "orders")
        # What was acknowledged has been flushed in the way that means it, and so has its directory.
        paths = flushed.read_text().splitlines()
        assert str(tmp_path / "data" / "orders-0" / f"{0:020}.log") in paths
        assert str(tmp_path / "data" / "orders-0") in paths
        broker.crash()
        broker.start()
        assert received(broker, "orders") == [b"%d" % number for number in range(RECORDS)]
        _, line = (line for line in broker.log().splitlines() if "does without" in line)  # one for each start
        assert "darwin, does without fdatasync (F_FULLFSYNC" in line
        for what in ("syncfs", "RWF_NOWAIT", "/proc", "PR_SET_PDEATHSIG"):
            assert f"{what} (" in line
        assert "defect" not in broker.log()
        assert broker.stop() == 0


def send(broker: BrokerProcess, topic: str) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "acks": "all"})
    for number in range(RECORDS):
        producer.produce(topic, b"%d" % number, b"key")
    assert producer.flush(WAIT_SECONDS_MAX) == 0


def received(broker: BrokerProcess, topic: str) -> list[bytes | None]:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "test"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    try:
        return [message.value() for message in consumer.consume(RECORDS, timeout=WAIT_SECONDS_MAX)]
    finally:
        consumer.close()


@pytest.mark.check
def test_the_background_process_works_without_linux_and_ends_with_the_broker(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    task = b'{"task": "remove", "arguments": {"paths": ["%s"]}}\n' % bytes(tmp_path / "old")
    command = [sys.executable, str(WITHOUT_LINUX), "worker", str(os.getpid())]
    environment = {**os.environ, "FLUSHED": str(tmp_path / "flushed")}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(task)
        child.stdin.flush()
        assert child.stdout.readline() == b'{"result": {"removed": 1}}\n'


def test_a_background_process_that_is_busy_ends_when_its_input_does() -> None:
    program = (
        "import sys, time\n"
        "from holdfast.broker.server.worker_main import read_ahead\n"
        "print(next(read_ahead(sys.stdin.buffer)).decode(), flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"a long task\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"a long task\n"
        child.stdin.close()
        assert child.wait(WAIT_SECONDS_MAX) == 0


def test_what_cannot_be_flushed_in_earnest_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(fd: int, command: int) -> int:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", unsupported)
    monkeypatch.setattr(real, "_HAS_FDATASYNC", False)
    file = real.RealFileSystem().open(str(tmp_path / "file"), "create")
    for flush in (file.flush, lambda: real.RealFileSystem().flush_directory(str(tmp_path))):
        with pytest.raises(OSError, match="not supported"):
            flush()


def test_a_directory_is_locked_once_where_both_kinds_of_lock_are_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real, "_LOCKS_ARE_APART", False)
    monkeypatch.setattr(fcntl, "lockf", lambda *_: pytest.fail("it would meet its own flock"))
    path = str(tmp_path / ".lock")
    held = real.RealFileSystem().lock(path)
    with pytest.raises(BlockingIOError):
        real.RealFileSystem().lock(path)
    held.release()
    real.RealFileSystem().lock(path).release()


def test_the_boot_is_known_by_what_macos_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def sysctlbyname(self, name: bytes, text: Any, length: Any, *more: Any) -> int:
            text.value = b"0A1B" if name == b"kern.bootsessionuuid" else b""
            return 0

    def no_proc(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr(real, "_libc", Library())
    monkeypatch.setattr("builtins.open", no_proc)
    assert real.boot_id() == "0A1B"
    monkeypatch.setattr(real, "_libc", ctypes.CDLL(None))
    assert real.boot_id() != real.boot_id()  # nobody knows: another boot each time


def test_topics_whose_names_differ_in_case_alone_never_share_a_directory(tmp_path: Path) -> None:
    """On a disk that takes both names for one, as macOS's do: there the lock file answers to this name too."""
    (tmp_path / ".LOCK").touch()
    with holdfast.Broker(tmp_path) as broker:
        broker.create_topic("orders")
        with pytest.raises(UsageError, match=r"'Orders' collides with existing topic 'orders'"):
            broker.create_topic("Orders")


# ------------------------------------------------------------------------ refused


def on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")


def on_a_free_threaded_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "abiflags", "t")


@pytest.mark.parametrize(
    ("place", "reason"), [(on_windows, "Windows"), (on_a_free_threaded_build, "free-threaded")]
)
def test_where_it_cannot_run_it_says_so_in_a_sentence(
    place: Callable[[pytest.MonkeyPatch], None],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place(monkeypatch)
    with pytest.raises(ImportError, match=reason):
        _ = holdfast.Broker
    monkeypatch.setattr(sys, "argv", ["holdfast", "serve"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("holdfast: ")
    assert reason in line


def test_this_machine_lacks_nothing() -> None:
    assert sys.platform != "linux" or real.missing_here() == ""

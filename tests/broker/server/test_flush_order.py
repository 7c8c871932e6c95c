"""On the real process, as strace sees it: no acks=all response leaves before its file's flush has returned. B6.

The trace is the judge, not the broker: every append (pwritev with the batch's offset), every flush and every write to a
socket (which carries the response's correlation id) stands in it, in order, with its beginning and its end.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.testing.broker import BrokerProcess
from holdfast.testing.wire_client import WireClient, frame
from holdfast.wire.api_keys import CREATE_TOPICS, PRODUCE
from holdfast.wire.batch import make_batch
from holdfast.wire.messages import encode_request

WRITES = ("pwritev", "pwritev2", "pwrite64", "write", "writev", "sendto", "sendmsg", "sendmmsg", "sendfile")
FLUSHES = ("fdatasync", "fsync", "syncfs")
STRING_BYTES = 512
PARTITIONS = 3
ROUNDS = 25
TRACER_SECONDS_MAX = 30.0
FIRST_CORRELATION_ID = 0x5EED0000
"""Four bytes that stand nowhere else in a response."""

_LINE = re.compile(r"^(\d+) +(.*)$", re.DOTALL)
_RESUMED = re.compile(r"^<\.\.\. (\w+) resumed>(.*)$", re.DOTALL)
_RESULT = re.compile(r"= (-?\d+)[^=]*$")
_HEX = re.compile(r"\\x([0-9a-f]{2})")


@dataclass
class Call:
    """One system call: where in the trace it began and ended."""

    name: str
    arguments: bytes
    begin: int
    end: int = 1 << 60
    result: int = -1

    @property
    def path(self) -> bytes:
        """What the first descriptor stands for."""
        found = re.match(rb"\d+<([^>]*)>", self.arguments)
        return found.group(1) if found else b""


def strace_command(trace: Path) -> tuple[str, ...]:
    wanted = ",".join(("openat", *WRITES, *FLUSHES))
    # -D: the broker stays our child, so that killing it ends the tracer and not the other way round.
    return (
        *("strace", "-D", "-f", "-y", "-xx", "-s", str(STRING_BYTES)),
        *("-e", f"trace={wanted}", "-e", "signal=none", "-o", str(trace)),
    )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Where the trace goes; skips where nothing can be traced."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed (Debian: apt-get install strace)")
    tried = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"this machine does not let processes be traced: {tried.stderr.decode().strip()}")
    return tmp_path / "trace"


def unescape(text: str) -> bytes:
    """strace's \\xNN as bytes; the rest of a line is plain."""
    out = bytearray()
    position = 0
    for found in _HEX.finditer(text):
        out += text[position : found.start()].encode()
        out.append(int(found.group(1), 16))
        position = found.end()
    return bytes(out + text[position:].encode())


def parse(lines: Iterable[str]) -> list[Call]:
    calls: list[Call] = []
    under_way: dict[tuple[str, str], Call] = {}
    for number, line in enumerate(lines):
        found = _LINE.match(line.rstrip("\n"))
        if found is None:
            continue
        thread, text = found.groups()
        resumed = _RESUMED.match(text)
        if resumed:
            name, rest = resumed.groups()
            call = under_way.pop((thread, name), None)
            if call is None:
                continue
            call.arguments += unescape(rest)
        else:
            name, parenthesis, rest = text.partition("(")
            if not parenthesis:
                continue
            call = Call(name, unescape(rest), number)
            calls.append(call)
            if rest.endswith("<unfinished ...>"):
                under_way[thread, name] = call
                continue
        call.end = number
        result = _RESULT.search(text)
        call.result = int(result.group(1)) if result else -1
    return calls


class Trace:
    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls

    def append_of(self, partition: int, base_offset: int) -> Call:
        wanted = b'iov_base="' + base_offset.to_bytes(8, "big")
        for call in self.calls:
            if (
                call.name.startswith("pwritev")
                and f"/t-{partition}/".encode() in call.path
                and wanted in call.arguments
            ):
                return call
        raise AssertionError(f"offset {base_offset} of partition {partition} was never written")

    def response(self, correlation_id: int) -> Call:
        wanted = correlation_id.to_bytes(4, "big")
        for call in self.calls:
            if call.name in WRITES and b"socket" in call.path and wanted in call.arguments:
                return call
        raise AssertionError(f"response {correlation_id:#x} was never sent")

    def creation_of(self, path: bytes) -> Call:
        for call in self.calls:
            if (
                call.name == "openat"
                and b"O_CREAT" in call.arguments
                and b'"' + path + b'"' in call.arguments
            ):
                return call
        raise AssertionError(f"{path!r} was never made")

    def is_flushed(self, path: bytes, after: Call, before: Call) -> bool:
        """Whether a flush of `path` began after one call had ended, and returned before another began.

        `syncfs` writes every file of the file system, and all of the test's are on one; they count as flushed with the
        flush of any file after it.
        """
        flushes = [
            call
            for call in self.calls
            if call.name in FLUSHES
            and call.begin > after.end
            and call.end < before.begin
            and call.result == 0
        ]
        written = min((call.end for call in flushes if call.name == "syncfs"), default=before.begin)
        return any(
            (call.path == path and call.name != "syncfs")
            or (call.name == "fdatasync" and call.begin > written)
            for call in flushes
        )


def create_topic(client: WireClient) -> None:
    topic = {
        "name": "t",
        "num_partitions": PARTITIONS,
        "replication_factor": 1,
        "assignments": [],
        "configs": [{"name": "internal.segment.bytes", "value": "4000"}],
    }
    (made,) = client.ask(CREATE_TOPICS, 5, {"topics": [topic], "timeout": 5000}).topics
    assert made.error_code == 0, made


def produce_frame(partition: int, correlation_id: int, acks: int = -1) -> bytes:
    batch = make_batch([b"%x" % correlation_id * 60], timestamp=1_700_000_000_000)
    fields = {
        "transactional_id": None,
        "acks": acks,
        "timeout": 30_000,
        "topic_data": [{"name": "t", "partition_data": [{"index": partition, "records": batch}]}],
    }
    return frame(PRODUCE, 9, encode_request(PRODUCE, 9, fields), correlation_id=correlation_id)


def run(trace: Path, acks: int, connections: int = PARTITIONS + 1) -> list[tuple[int, int, int]]:
    """Produce over several connections at once; returns (correlation id, partition, base offset) of each answer."""
    answered: list[tuple[int, int, int]] = []
    with BrokerProcess(str(trace.parent / "data"), prefix=strace_command(trace)) as broker:
        clients = [WireClient(broker.bootstrap_servers) for _ in range(connections)]
        create_topic(clients[0])
        correlation_id = FIRST_CORRELATION_ID
        for _ in range(ROUNDS):
            asked = []
            for number, client in enumerate(clients):
                correlation_id += 1
                partition = number % PARTITIONS
                client.send(produce_frame(partition, correlation_id, acks))
                asked.append((client, correlation_id, partition))
            for client, expected, partition in asked:
                answer = client.receive()
                assert isinstance(answer, bytes)
                produced = client.decode(answer, PRODUCE, 9, expected)
                (outcome,) = produced.responses[0].partition_responses
                assert outcome.error_code == 0
                answered.append((expected, partition, outcome.base_offset))
        for client in clients:
            client.close()
        assert broker.stop() == 0
    return answered


def read_trace(trace: Path) -> Trace:
    """The whole trace: the tracer writes its last line, the broker's exit, shortly after the broker is gone."""
    deadline = time.monotonic() + TRACER_SECONDS_MAX
    while "exited with" not in (text := trace.read_text(encoding="ascii"))[-200:]:
        assert time.monotonic() < deadline, "the tracer did not finish"
        threading.Event().wait(0.01)
    return Trace(parse(text.splitlines()))


def test_no_response_to_acks_all_leaves_before_its_files_are_flushed(trace: Path) -> None:
    answered = run(trace, acks=-1)
    seen = read_trace(trace)
    directory = str(trace.parent / "data").encode()
    files = set()
    for correlation_id, partition, base_offset in answered:
        append = seen.append_of(partition, base_offset)
        response = seen.response(correlation_id)
        what = f"offset {base_offset} of partition {partition} was acknowledged"
        assert append.result > 0
        assert seen.is_flushed(append.path, append, response), f"{what} before its file was flushed"
        if append.path not in files:
            files.add(append.path)
            made = seen.creation_of(append.path)
            parent = append.path.rpartition(b"/")[0]
            assert seen.is_flushed(parent, made, response), (
                f"{what} before the directory of its file was flushed"
            )
            if base_offset == 0:
                assert seen.is_flushed(directory, made, response), (
                    f"{what} before the partition's directory was"
                )
    assert len(answered) == ROUNDS * (PARTITIONS + 1)
    assert len(files) > PARTITIONS, "segments were rolled"


def test_no_response_leaves_before_the_flush_of_what_was_written_over_space_ahead(trace: Path) -> None:
    """One client by itself: behind some of its batches zeros are written, which later ones replace."""
    answered = run(trace, acks=-1, connections=1)
    seen = read_trace(trace)
    appends = [seen.append_of(partition, base_offset) for _, partition, base_offset in answered]
    for append, (correlation_id, _, base_offset) in zip(appends, answered, strict=True):
        assert seen.is_flushed(append.path, append, seen.response(correlation_id)), base_offset
    assert max(append.result for append in appends) > 2 * min(append.result for append in appends)


def test_the_trace_can_tell_acks_1_is_answered_before_the_flush(trace: Path) -> None:
    """The same judge finds what it should not find with acks=all, where it is allowed."""
    answered = run(trace, acks=1)
    seen = read_trace(trace)
    early = 0
    for correlation_id, partition, base_offset in answered:
        append = seen.append_of(partition, base_offset)
        early += not seen.is_flushed(append.path, append, seen.response(correlation_id))
    assert early > len(answered) // 2


def test_creating_a_topic_is_answered_when_its_record_is_flushed(trace: Path) -> None:
    with BrokerProcess(str(trace.parent / "data"), prefix=strace_command(trace)) as broker:
        with WireClient(broker.bootstrap_servers) as client:
            topic = {
                "name": "made",
                "num_partitions": 1,
                "replication_factor": 1,
                "assignments": [],
                "configs": [],
            }
            body = encode_request(CREATE_TOPICS, 5, {"topics": [topic], "timeout": 5000})
            client.send(frame(CREATE_TOPICS, 5, body, correlation_id=FIRST_CORRELATION_ID))
            assert isinstance(client.receive(), bytes)
        broker.stop()
    seen = read_trace(trace)
    response = seen.response(FIRST_CORRELATION_ID)
    appends = [
        call
        for call in seen.calls
        if call.name.startswith("pwritev")
        and b"__cluster_metadata-0" in call.path
        and b"made" in call.arguments
    ]
    assert appends
    assert seen.is_flushed(appends[0].path, appends[0], response)

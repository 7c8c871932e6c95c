"""Golden directories: where they are, how they are packed, and a broker that opens one at the hour it was left.

Making and opening share this module, so that the files of one are what the other looks for.
"""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

from kio.schema.errors import ErrorCode

from holdfast.broker.server import server as server_module
from holdfast.broker.server.embed import Broker
from holdfast.real import RealClock
from holdfast.seams import Clock, Now
from holdfast.testing.committed_reader import whole_batches
from holdfast.testing.fakes import SeededRandomness
from holdfast.testing.wire_client import WireClient
from holdfast.wire.api_keys import FETCH, LIST_OFFSETS, PRODUCE
from holdfast.wire.batch import BatchHeader

HERE: Final = Path(__file__).resolve().parent
GENERATIONS: Final = sorted(HERE.glob("generation-*"))
PACKED: Final = ".tar.xz"
SUMS: Final = "SHA256SUMS"
"""In each generation, the checksum of every other file: what is listed there stays as it is."""
FETCH_BYTES_MAX: Final = 1 << 20


# Archives


def pack(directory: Path, archive: Path, time_ms: int) -> None:
    """All of a directory, in an archive that is the same bytes for the same files."""

    def bare(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime = time_ms // 1000
        member.mode = 0o755 if member.isdir() else 0o644
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(directory.rglob("*")):
            tar.add(path, str(path.relative_to(directory)), recursive=False, filter=bare)
    archive.write_bytes(lzma.compress(buffer.getvalue(), preset=9))


def unpack(archive: Path, directory: Path) -> None:
    with tarfile.open(archive, "r:xz") as tar:
        tar.extractall(directory, filter="data")


def expected_of(archive: Path) -> Any:
    """What was written down beside an archive when it was made."""
    return json.loads(archive.with_name(archive.name.removesuffix(PACKED) + ".json").read_text("utf-8"))


def text_of(data: bytes | None) -> str | None:
    """Any bytes as a text of as many characters."""
    return None if data is None else data.decode("latin-1")


def bytes_of(text: str | None) -> bytes | None:
    return None if text is None else text.encode("latin-1")


# A broker of its time


class StoppedClock(RealClock):
    """The wall clock shows what it is told; time-outs go by the machine's own."""

    def __init__(self, wall_ms: int) -> None:
        self.wall_ms = wall_ms

    def now(self) -> Now:
        return super().now()._replace(wall_ms=self.wall_ms)


@contextmanager
def broker_at(
    clock: Clock,
    log_dirs: str,
    *,
    boot_id: str,
    seed: int,
    settings: Mapping[str, str] | None = None,
    listen: str = "127.0.0.1:0",
    said: list[str] | None = None,
) -> Iterator[Broker]:
    """The broker on a thread of this process, in a time and a boot of the machine that are given.

    What expires by a `StoppedClock` (positions, producers, transactional ids) is as it was when the files were left,
    however much later they are opened. Clients that stamp their messages themselves need the real clock.
    """
    lines = said if said is not None else []
    broker = Broker(log_dirs, listen=listen, settings=settings, say=lines.append)
    with ExitStack() as during_start:
        for name, value in (
            ("RealClock", lambda: clock),
            ("RealRandomness", lambda: SeededRandomness(seed)),
            ("boot_id", lambda: boot_id),
        ):
            during_start.enter_context(mock.patch.object(server_module, name, value))
        broker.start()
    try:
        yield broker
    finally:
        broker.stop()


# Raw requests


def check_code(answer: Any, what: str) -> None:
    if answer.error_code:
        raise AssertionError(f"{what}: {ErrorCode(answer.error_code).name}")


def produce(
    client: WireClient, topic: str, partition: int, batch: bytes, transactional_id: str | None = None
) -> Any:
    """The partition's part of the answer."""
    fields = {
        "transactional_id": transactional_id,
        "acks": -1,
        "timeout": 30_000,
        "topic_data": [{"name": topic, "partition_data": [{"index": partition, "records": batch}]}],
    }
    version = 9 if transactional_id is None else 12
    return client.ask(PRODUCE, version, fields).responses[0].partition_responses[0]


def fetch(
    client: WireClient, topic: str, partition: int, offset: int, *, committed: bool = False
) -> tuple[bytes, list[tuple[int, int]]]:
    """What one fetch brings, and the transactions it names as aborted: producer id, first offset."""
    wanted = {"partition": partition, "fetch_offset": offset, "partition_max_bytes": FETCH_BYTES_MAX}
    answer = client.ask(
        FETCH,
        12,
        {
            "isolation_level": int(committed),
            "max_wait": 0,
            "min_bytes": 0,
            "max_bytes": FETCH_BYTES_MAX,
            "session_epoch": -1,
            "topics": [{"topic": topic, "partitions": [wanted]}],
        },
    )
    (found,) = answer.responses[0].partitions
    check_code(found, f"fetching {topic}-{partition}@{offset}")
    aborted = [(each.producer_id, each.first_offset) for each in found.aborted_transactions or ()]
    return bytes(found.records or b""), aborted


def fetch_all(client: WireClient, topic: str, partition: int) -> list[tuple[BatchHeader, bytes]]:
    """Every batch a partition serves, from its first offset on."""
    found: list[tuple[BatchHeader, bytes]] = []
    offset = offset_at(client, topic, partition, EARLIEST)
    while True:
        batches = list(whole_batches(fetch(client, topic, partition, offset)[0]))
        if not batches:
            return found
        found += batches
        offset = batches[-1][0].next_offset


EARLIEST: Final = -2
LATEST: Final = -1


def offset_at(client: WireClient, topic: str, partition: int, which: int, *, committed: bool = False) -> int:
    asked = {"partition_index": partition, "timestamp": which, "current_leader_epoch": -1}
    fields = {
        "replica_id": -1,
        "isolation_level": int(committed),
        "topics": [{"name": topic, "partitions": [asked]}],
    }
    (found,) = client.ask(LIST_OFFSETS, 7, fields).topics[0].partitions
    check_code(found, f"asking for an offset of {topic}-{partition}")
    return int(found.offset)

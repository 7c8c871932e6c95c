"""A small world that is not ours: a topic in a fake cluster, a checkpoint as Spark writes it, files of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.fake_cluster import FakeCluster

from holdfast.audit.checkpoint import audit_checkpoint
from holdfast.audit.model import Report
from holdfast.wire.batch import Record, build_batch

TIME_MS = 1_700_000_000_000
Headers = tuple[tuple[str, bytes | None], ...]


class World:
    def __init__(self, cluster: FakeCluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.checkpoint = directory / "checkpoint"
        self.out = directory / "out"
        self.out.mkdir()
        self.settings = {"bootstrap.servers": cluster.bootstrap_servers, "default.api.timeout.ms": "5000"}

    # The source

    def send(
        self,
        values: Sequence[bytes | None],
        *,
        topic: str = "orders",
        partition: int = 0,
        keys: Sequence[bytes | None] | None = None,
        headers: Sequence[Headers] | None = None,
    ) -> None:
        if topic not in self.cluster.topics:
            self.cluster.add_topic(topic, 2)
        log = self.cluster.topics[topic].partitions[partition]
        first = log.log_end
        log.append(
            build_batch(
                [
                    Record(
                        at,
                        at,
                        keys[at] if keys is not None else f"k{partition}.{first + at}".encode(),
                        value,
                        headers[at] if headers is not None else (),
                    )
                    for at, value in enumerate(values)
                ],
                base_timestamp=TIME_MS + first,
            )
        )

    def send_orders(self, ids: Sequence[int], partition: int = 0, topic: str = "orders") -> None:
        self.send([order(each) for each in ids], partition=partition, topic=topic)

    # What Spark has written down

    def batches(
        self,
        *ends: Mapping[int, int],
        committed: int | None = None,
        start: Mapping[int, int] | None = None,
        first: int = 0,
        topic: str = "orders",
    ) -> None:
        """A checkpoint with batches that end at these offsets; `start` is what the source wrote when it began."""
        for name in ("offsets", "commits", "sources/0"):
            (self.checkpoint / name).mkdir(parents=True, exist_ok=True)
        (self.checkpoint / "metadata").write_text('{"id":"3a0b"}')
        if start is not None:
            (self.checkpoint / "sources" / "0" / "0").write_bytes(b"\0v1\n" + _offsets(topic, start).encode())
        for number, end in enumerate(ends, first):
            text = f'v1\n{{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{{}}}}\n{_offsets(topic, end)}'
            (self.checkpoint / "offsets" / str(number)).write_text(text)
            if committed is None or number <= committed:
                (self.checkpoint / "commits" / str(number)).write_text('v1\n{"nextBatchWatermarkMs":0}')

    # What the job has written

    def rows(self, ids: Sequence[int | None], name: str = "part-0", kind: pa.DataType | None = None) -> Path:
        path = self.out / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": pa.array(ids, kind or pa.int64())}), path)
        return path

    def audit(self, match: str = "id = value.id", **more: object) -> Report:
        return audit_checkpoint(
            str(self.checkpoint),
            f"parquet:{self.out}",
            match,
            self.settings,
            **more,  # type: ignore[arg-type]
        )


def order(number: int) -> bytes:
    return json.dumps({"id": number, "amount": number % 7}).encode()


def _offsets(topic: str, offsets: Mapping[int, int]) -> str:
    return json.dumps({topic: {str(partition): offset for partition, offset in offsets.items()}})


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with FakeCluster() as cluster:
        yield World(cluster, tmp_path)

"""A reset of a Kafka sink with several writers: their ledgers are forgotten together, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from holdfast.pipeline.core.sql import LINEAGE
from holdfast.pipeline.definition.model import KafkaSink
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.sinks.base import SinkContext, SinkUnavailable
from holdfast.pipeline.sinks.kafka import KafkaSinkWriter
from holdfast.pipeline.sinks.kafka_records import Records, Share
from holdfast.pipeline.sinks.kafka_writer import Writer
from holdfast.pipeline.sinks.lineage import digest_of_lineage

from .test_kafka import committed

pytestmark = pytest.mark.holdfast(mode="thread")

WRITERS = 3
ROWS = 9
Make = Callable[..., KafkaSinkWriter]


class Died(BaseException):
    """The process is gone."""


@pytest.fixture
def bootstrap(holdfast_broker: Any) -> str:
    return str(holdfast_broker.bootstrap_servers)


@pytest.fixture
def make(bootstrap: str, context: SinkContext) -> Iterator[Make]:
    opened: list[KafkaSinkWriter] = []

    def build(*, is_writing: bool = True) -> KafkaSinkWriter:
        sink = KafkaSinkWriter(KafkaSink("out", writers=WRITERS), "shop")
        session: Any = object() if is_writing else None  # only whether there is one counts
        sink.open(replace(context, source={"bootstrap.servers": bootstrap}), session)
        opened.append(sink)
        return sink

    yield build
    for sink in opened:
        sink.close()


def aside(directory: str, first: int = 0) -> Records:
    """What Spark's tasks set aside: the rows of a batch, by the writer that sends them."""
    os.makedirs(directory)
    shares = []
    for writer in range(WRITERS):
        numbers = range(first + writer, first + ROWS, WRITERS)
        places = [{"topic": "orders", "partition": 0, "offset": at, "index": 0} for at in numbers]
        batch = pa.record_batch(
            {
                LINEAGE: pa.array(places),
                "key": pa.array([b"%d" % at for at in numbers]),
                "value": pa.array([b"{}"] * len(numbers)),
                "source": pa.array([b"orders:0@%d#0" % at for at in numbers]),
            }
        )
        digest = digest_of_lineage(batch.column(LINEAGE))
        path = os.path.join(directory, f"rows-{writer}.arrow")
        with pa.ipc.new_file(path, batch.schema) as file:
            file.write_batch(batch)
        shares.append(Share((path,), len(numbers), digest))
    return Records(directory, tuple(shares))


def fill(sink: KafkaSinkWriter, cut: Any, directory: str) -> Entry:
    entry: Entry = cut.entry(cut.at(0, ROWS), None, ROWS)
    sink.send(entry, aside(directory))
    return entry


@pytest.mark.parametrize("done", [0, 1])
@pytest.mark.check
def test_a_reset_that_dies_leaves_no_batch_half_done(
    make: Make, batches: Any, bootstrap: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    cut = batches("kafka")
    sink = make()
    entry = fill(sink, cut, str(tmp_path / "aside"))
    sink.close()
    left = [done]
    commit = Writer._commit

    def commit_or_die(writer: Writer) -> None:
        if not left[0]:
            raise Died
        left[0] -= 1
        commit(writer)
        if not left[0]:
            raise Died

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "_commit", commit_or_die)
        with pytest.raises(Died):
            make(is_writing=False).forget()
    again = make()
    assert again.unfinished() is None
    assert again.last_entry() == (None if done else entry)
    assert len(committed(bootstrap, "out")) == ROWS


def test_a_reset_that_failed_may_be_tried_again(
    make: Make, batches: Any, bootstrap: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = batches("kafka")
    sink = make()
    entry = fill(sink, cut, str(tmp_path / "aside"))

    def refuse(writer: Writer) -> None:
        raise SinkUnavailable("not now")

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "_commit", refuse)
        with pytest.raises(SinkUnavailable, match="not now"):
            sink.forget()
    assert (sink.last_entry(), sink.unfinished()) == (entry, None)
    sink.forget()
    assert (sink.last_entry(), sink.unfinished()) == (None, None)
    assert fill(sink, cut, str(tmp_path / "again")) == sink.last_entry()
    assert len(committed(bootstrap, "out")) == 2 * ROWS

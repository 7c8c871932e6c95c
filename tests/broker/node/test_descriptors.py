"""A process that can open no more files refuses what needs one, loses nothing, and goes on when it can again."""

from __future__ import annotations

import errno

import pytest
from kio.schema.errors import ErrorCode

from holdfast.broker.log.checkpoints import LOG_START_FILE, RECOVERY_POINT_FILE, OffsetCheckpoint
from holdfast.broker.log.write_ahead import FLUSHES_MIN
from holdfast.broker.node.housekeeping import SPACE_CHECK_MS
from holdfast.broker.node.node import CHECKPOINT_INTERVAL_MS
from holdfast.seams import OpenMode
from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.testing.disk import Fault
from holdfast.testing.disk_files import SimulatedFile
from holdfast.wire.batch import Record, build_batch

TOO_MANY = (errno.EMFILE, errno.ENFILE)
FOR_EVER = 1_000_000


def batch(value: bytes = b"x") -> bytes:
    return build_batch([Record(0, 0, None, value)], base_timestamp=0)


@pytest.fixture
def client(node: BareNode) -> BareClient:
    client = node.connect()
    client.create_topic("t", internal_segment_bytes="100")
    return client


def second(node: BareNode) -> None:
    node.advance(CHECKPOINT_INTERVAL_MS)
    node.settle()


@pytest.mark.parametrize("error", TOO_MANY)
@pytest.mark.parametrize("refused", [".index", ".timeindex", ".snapshot", "1.log"])
def test_a_roll_that_cannot_open_a_file_refuses_the_batch_and_nothing_else(
    node: BareNode, client: BareClient, refused: str, error: int
) -> None:
    client.produce("t", batch(b"first"))
    node.disk.plan(Fault("create", error, times=3, path_contains=refused))
    for _ in range(3):
        assert client.produce("t", batch(b"refused")).error_code is ErrorCode.kafka_storage_error
    assert not node.hosted("t").offline
    # Whatever was opened for a roll that did not come about is not held on to.
    assert not node.hosted("t").log.has_sealed_unflushed
    done = client.produce("t", batch(b"second"))
    assert (done.error_code, done.base_offset) == (ErrorCode.none, 1)
    node = node.lose_power()
    assert node.hosted("t").log.end_offset == 2
    assert b"second" in node.connect().fetch("t", 1).records


@pytest.mark.parametrize("error", TOO_MANY)
def test_an_epoch_that_cannot_be_noted_refuses_the_roll_and_nothing_else(
    node: BareNode, client: BareClient, error: int
) -> None:
    client.produce("t", batch(b"first"))
    node.disk.plan(Fault("create", error, path_contains="leader-epoch"))
    assert client.produce("t", batch(b"rolls")).error_code is ErrorCode.kafka_storage_error
    assert not node.hosted("t").offline
    assert client.produce("t", batch(b"rolls")).base_offset == 1


@pytest.mark.parametrize("error", TOO_MANY)
@pytest.mark.parametrize("refused", [0, 1])
def test_a_flush_that_cannot_open_a_directory_is_put_off(
    node: BareNode, client: BareClient, refused: int, error: int
) -> None:
    # The first flush of a log is of its directory and that one's parent.
    node.disk.plan(Fault("flush directory", error, skip=refused, times=2))
    first = client.begin_produce("t", batch(b"first"))
    node.settle()
    later = client.begin_produce("t", batch(b"second"))
    node.settle()
    assert not client.frames
    second(node)
    assert not client.frames
    for _ in range(3):
        second(node)
    assert client.answer(first).responses[0].partition_responses[0].base_offset == 0
    assert client.answer(later).responses[0].partition_responses[0].base_offset == 1
    assert not node.hosted("t").offline
    assert len([said for said in node.said if "refuses writes" in said and "ulimit" in said]) == 1
    node = node.lose_power()
    assert node.hosted("t").log.end_offset == 2
    assert b"second" in node.connect().fetch("t", 1).records


def test_a_new_log_whose_identity_cannot_be_opened_is_flushed_later(
    node: BareNode, client: BareClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = iter([OSError(errno.EMFILE, "too many")])
    opened = node.disk.open

    def refuse(path: str, mode: OpenMode) -> SimulatedFile:
        if path.endswith("partition.metadata") and (error := next(refusals, None)) is not None:
            raise error
        return opened(path, mode)

    monkeypatch.setattr(node.disk, "open", refuse)
    asked = client.begin_produce("t", batch(b"first"))
    node.settle()
    assert not client.frames
    second(node)
    assert client.answer(asked).responses[0].partition_responses[0].base_offset == 0
    assert not node.hosted("t").offline
    topic_id = node.hosted("t").topic_id
    node = node.lose_power()
    assert (node.hosted("t").topic_id, node.hosted("t").log.end_offset) == (topic_id, 1)


@pytest.mark.parametrize("error", TOO_MANY)
@pytest.mark.parametrize("file", [RECOVERY_POINT_FILE, LOG_START_FILE])
def test_a_checkpoint_that_cannot_be_written_is_written_later(
    node: BareNode, client: BareClient, file: str, error: int
) -> None:
    client.produce("t", batch())
    client.produce("t", batch())
    node.disk.plan(Fault("create", error, times=FOR_EVER, path_contains=file))
    hosted = node.hosted("t")
    node.node.log_starts.move([(hosted, 1)])
    second(node)
    assert not hosted.offline
    assert hosted.log.start_offset == (0 if file == LOG_START_FILE else 1)
    node.disk.clear_faults()
    second(node)
    node.node.log_starts.move([(hosted, 1)])
    assert OffsetCheckpoint(node.disk, f"/data/{RECOVERY_POINT_FILE}").read()["t", 0] == 2
    assert OffsetCheckpoint(node.disk, f"/data/{LOG_START_FILE}").read()["t", 0] == 1


def test_space_that_cannot_be_given_back_is_given_back_later(node: BareNode, client: BareClient) -> None:
    for _ in range(2 * FLUSHES_MIN):
        client.produce("t", batch())
    log = node.hosted("t").log
    assert log.active.has_space_ahead
    node.disk.plan(Fault("truncate", errno.EMFILE, path_contains=log.active.path()))
    for _ in range(2):
        node.advance(SPACE_CHECK_MS)
    assert not node.hosted("t").offline
    assert log.active.has_space_ahead
    node.advance(SPACE_CHECK_MS)
    assert not log.active.has_space_ahead

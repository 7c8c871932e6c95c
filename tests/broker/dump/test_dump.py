"""Files of a log, whole and damaged in every way we can think of, seen through the dump."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiers import examples

from holdfast.broker.dump.batches import DumpOptions, Event
from holdfast.broker.dump.decoders import (
    Undecodable,
    decode_cluster_metadata,
    decode_offsets,
    decode_transactions,
)
from holdfast.broker.dump.path import dump_path
from holdfast.broker.log.index import OffsetIndex, TimeIndex, TransactionIndex
from holdfast.broker.log.leader_epochs import EpochStart, LeaderEpochs
from holdfast.broker.log.producer_state import SnapshotEntry, encode_snapshot
from holdfast.errors import UsageError
from holdfast.real import RealFileSystem
from holdfast.wire.batch import HEADER_SIZE, Record, build_batch
from holdfast.wire.codecs import Codec
from holdfast.wire.control_records import EndTransactionMarker

VERIFY = DumpOptions(verify=True)
NAME = "00000000000000000100"


def records(count: int) -> list[Record]:
    return [Record(delta, delta, b"k%d" % delta, b"v" * 40, (("h", b"x"),)) for delta in range(count)]


def batch(base_offset: int, count: int = 3, **settings: Any) -> bytes:
    settings = {"base_timestamp": 1_000 + base_offset, "leader_epoch": 7} | settings
    return build_batch(records(count), base_offset=base_offset, **settings)


BATCHES = [batch(100), batch(103, codec=Codec.LZ4), batch(106, count=2)]
LOG = b"".join(BATCHES)
STARTS = [0, len(BATCHES[0]), len(BATCHES[0]) + len(BATCHES[1])]


def dump(path: Path, options: DumpOptions = VERIFY) -> list[Event]:
    return list(dump_path(RealFileSystem(), str(path), options))


def findings(path: Path, options: DumpOptions = VERIFY) -> list[str]:
    return [event["message"] for event in dump(path, options) if event["type"] == "finding"]


def of_type(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event["type"] == kind]


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    """A whole segment with its indexes."""
    directory = tmp_path / "orders-0"
    directory.mkdir()
    (directory / f"{NAME}.log").write_bytes(LOG)
    index = OffsetIndex(100)
    index.append(105, STARTS[1])
    index.append(107, STARTS[2])
    (directory / f"{NAME}.index").write_bytes(index.to_bytes())
    times = TimeIndex(100)
    times.append(1_000 + 103 + 2, 105)
    times.append(1_000 + 106 + 1, 107)
    (directory / f"{NAME}.timeindex").write_bytes(times.to_bytes())
    return directory


def test_a_whole_segment_has_no_findings(segment: Path) -> None:
    events = dump(segment)
    assert of_type(events, "finding") == []
    (summary,) = of_type(events, "summary")
    assert (summary["batches"], summary["records"], summary["end_offset"]) == (3, 8, 108)
    assert summary["bytes"] == len(LOG)


def test_batches_and_records_are_listed(segment: Path) -> None:
    shallow = dump(segment / f"{NAME}.log", DumpOptions())
    assert [event["base_offset"] for event in of_type(shallow, "batch")] == [100, 103, 106]
    assert [event["codec"] for event in of_type(shallow, "batch")] == ["none", "lz4", "none"]
    assert of_type(shallow, "record") == []
    deep = of_type(dump(segment / f"{NAME}.log", DumpOptions(payload=True)), "record")
    assert [event["offset"] for event in deep] == list(range(100, 108))
    assert deep[0] | {"type": "record"} == {
        "type": "record",
        "offset": 100,
        "timestamp_type": "CreateTime",
        "timestamp_ms": 1_100,
        "key_size": 2,
        "value_size": 40,
        "sequence": -1,
        "header_keys": ["h"],
        "key": "k0",
        "key_encoding": "utf-8",
        "value": "v" * 40,
        "value_encoding": "utf-8",
        "headers": [{"key": "h", "value": "x", "value_encoding": "utf-8"}],
    }


def test_index_entries_are_listed(segment: Path) -> None:
    events = dump(segment / f"{NAME}.index", DumpOptions())
    assert [(e["offset"], e["position"]) for e in of_type(events, "index_entry")] == [
        (105, STARTS[1]),
        (107, STARTS[2]),
    ]
    events = dump(segment / f"{NAME}.timeindex", DumpOptions())
    assert [(e["timestamp_ms"], e["offset"]) for e in of_type(events, "time_index_entry")] == [
        (1_105, 105),
        (1_107, 107),
    ]


def test_nothing_is_written(segment: Path) -> None:
    def state() -> dict[str, tuple[bytes, int]]:
        return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in segment.iterdir()}

    (segment / f"{NAME}.log").write_bytes(LOG[:-10])
    before = state()
    for options in (VERIFY, DumpOptions(payload=True), DumpOptions(index_sanity_check=True)):
        dump(segment, options)
    assert state() == before


@given(data=st.data())
@settings(max_examples=examples(150), deadline=None)
def test_any_flipped_bit_under_a_checksum_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    # Base offset and leader epoch are outside the checksum: the broker writes them after the client.
    places = [
        position
        for start, content in zip(STARTS, BATCHES, strict=True)
        for position in range(start, start + len(content))
        if not (position - start < 8 or 12 <= position - start < 16)
    ]
    damaged = bytearray(LOG)
    damaged[data.draw(st.sampled_from(places))] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("flip") / f"{NAME}.log"
    path.write_bytes(damaged)
    assert findings(path)
    assert of_type(dump(path, DumpOptions(payload=True)), "finding")


@given(length=st.integers(0, len(LOG)))
@settings(max_examples=examples(150), deadline=None)
def test_a_cut_anywhere_but_between_batches_is_a_torn_tail(
    tmp_path_factory: pytest.TempPathFactory, length: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / f"{NAME}.log"
    path.write_bytes(LOG[:length])
    start = max(start for start in (*STARTS, len(LOG)) if start <= length)
    # A batch of a small offset begins with zeros: so few of them may as well have been written ahead.
    is_torn = any(LOG[start:length])
    assert any("torn tail" in message for message in findings(path)) is is_torn


@pytest.mark.parametrize("suffix", [".cut", ".2.cut"])
def test_what_recovery_cut_off_is_shown_when_asked_for_by_name(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"{NAME}.log").write_bytes(LOG)
    cut = tmp_path / f"{NAME}{suffix}"
    cut.write_bytes(batch(108) + batch(111)[:-5])
    assert findings(tmp_path) == []
    assert [event["base_offset"] for event in of_type(dump(cut, DumpOptions()), "batch")] == [108]
    assert any("torn tail" in message for message in findings(cut))


@given(content=st.binary(max_size=400))
@settings(max_examples=examples(150), deadline=None)
def test_bytes_that_are_no_log_never_crash_it(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    directory = tmp_path_factory.mktemp("noise")
    for name in (
        f"{NAME}.log",
        f"{NAME}.index",
        f"{NAME}.timeindex",
        f"{NAME}.txnindex",
        f"{NAME}.snapshot",
        "leader-epoch-checkpoint",
        "partition.metadata",
        "meta.properties",
        "recovery-point-offset-checkpoint",
    ):
        (directory / name).write_bytes(content)
    events = dump(directory, DumpOptions(payload=True))
    assert len(of_type(events, "file")) == 9
    if content:
        assert of_type(events, "finding")


def test_a_damaged_middle_is_named_and_what_follows_is_shown(tmp_path: Path) -> None:
    path = tmp_path / f"{NAME}.log"
    damaged = bytearray(LOG)
    damaged[STARTS[1] : STARTS[1] + HEADER_SIZE] = bytes(HEADER_SIZE)
    path.write_bytes(damaged)
    events = dump(path, DumpOptions())
    assert [event["base_offset"] for event in of_type(events, "batch")] == [100, 106]
    messages = [event["message"] for event in of_type(events, "finding")]
    assert any(f"a whole batch follows at {STARTS[2]}: a damaged middle" in message for message in messages)


def test_a_bad_checksum_does_not_hide_the_batches_behind_it(tmp_path: Path) -> None:
    path = tmp_path / f"{NAME}.log"
    damaged = bytearray(LOG)
    damaged[STARTS[1] + HEADER_SIZE + 5] ^= 0xFF
    path.write_bytes(damaged)
    events = dump(path, DumpOptions())
    assert [event["is_valid"] for event in of_type(events, "batch")] == [True, False, True]
    (found,) = of_type(events, "finding")
    assert (found["position"], found["offset"]) == (STARTS[1], 103)


def test_offsets_that_fall_are_found(tmp_path: Path) -> None:
    path = tmp_path / f"{NAME}.log"
    path.write_bytes(BATCHES[2] + BATCHES[0])
    assert any("offset 100 where 108 or more is expected" in message for message in findings(path))
    path.write_bytes(batch(99))
    assert any("offset 99 where 100 or more is expected" in message for message in findings(path))


def test_records_that_contradict_their_header_are_found(tmp_path: Path) -> None:
    path = tmp_path / f"{NAME}.log"
    path.write_bytes(build_batch(records(3), base_offset=100, last_offset_delta=1))
    assert any("offset delta 2" in message for message in findings(path))
    twice = [Record(0, 0, None, b"a"), Record(0, 0, None, b"b")]
    path.write_bytes(build_batch(twice, base_offset=100, last_offset_delta=1))
    assert any("offset delta 0 after 0" in message for message in findings(path))


def test_a_large_batch_is_checked_without_being_opened(tmp_path: Path) -> None:
    path = tmp_path / f"{NAME}.log"
    big = build_batch([Record(0, 0, None, b"x" * 100_000)], base_offset=100)
    path.write_bytes(big)
    small = DumpOptions(verify=True, message_bytes_max=1_000)
    assert findings(path, small) == []
    path.write_bytes(big[:-1] + b"y")
    assert any("checksum" in message for message in findings(path, small))


def test_reading_stops_after_max_bytes(segment: Path) -> None:
    events = dump(segment / f"{NAME}.log", DumpOptions(bytes_max=STARTS[1]))
    assert [event["base_offset"] for event in of_type(events, "batch")] == [100]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([(105, STARTS[1] + 1)], "no batch begins at position"),
        ([(104, STARTS[1])], "is not the last of a batch there"),
        ([(205, len(LOG) + 50)], "past the end of the log"),
    ],
)
def test_an_offset_index_that_disagrees_with_its_log_is_found(
    segment: Path, entries: list[tuple[int, int]], message: str
) -> None:
    index = OffsetIndex(100)
    for entry in entries:
        index.append(*entry)
    path = segment / f"{NAME}.index"
    path.write_bytes(index.to_bytes())
    assert [message in found for found in findings(path)] == [True]
    assert findings(path, DumpOptions(verify_index_only=True)) == findings(path)
    assert findings(path, DumpOptions(index_sanity_check=True)) == []


def test_an_entry_may_carry_the_last_offset_of_batches_appended_together(segment: Path) -> None:
    index = OffsetIndex(100)
    index.append(105, 0)
    path = segment / f"{NAME}.index"
    path.write_bytes(index.to_bytes())
    assert findings(path) == []


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([(1_104, 105)], "where the log's largest is 1105"),
        ([(1_200, 105)], "where the log's largest is 1105"),
        ([(1_107, 200)], "past the end of the log"),
    ],
)
def test_a_time_index_that_disagrees_with_its_log_is_found(
    segment: Path, entries: list[tuple[int, int]], message: str
) -> None:
    index = TimeIndex(100)
    for entry in entries:
        index.append(*entry)
    path = segment / f"{NAME}.timeindex"
    path.write_bytes(index.to_bytes())
    assert [message in found for found in findings(path)] == [True]


def test_index_files_out_of_order_or_cut_are_found(segment: Path) -> None:
    index = segment / f"{NAME}.index"
    whole = index.read_bytes()
    index.write_bytes(whole[8:] + whole[:8])
    assert findings(index, DumpOptions(index_sanity_check=True))
    index.write_bytes(whole[:-3])
    assert findings(index, DumpOptions(index_sanity_check=True))
    index.write_bytes(whole + bytes(80))
    assert findings(index) == [], "an index file allocated ahead ends in zeros"


def test_small_files_are_listed(tmp_path: Path) -> None:
    snapshot = SnapshotEntry(9, 1, 4, 104, 2, 1_000, -1, -1)
    (tmp_path / f"{NAME}.snapshot").write_bytes(encode_snapshot([snapshot]))
    epochs = LeaderEpochs([EpochStart(0, 0), EpochStart(7, 100)])
    (tmp_path / "leader-epoch-checkpoint").write_bytes(epochs.to_bytes())
    (tmp_path / "partition.metadata").write_text("version: 0\ntopic_id: Lqh_cDVtTJiFdGQ7amM_VQ")
    (tmp_path / "recovery-point-offset-checkpoint").write_text("0\n1\norders 0 108\n")
    aborted = TransactionIndex(100)
    aborted.append(9, 101, 105, 103)
    (tmp_path / f"{NAME}.txnindex").write_bytes(aborted.to_bytes())
    (tmp_path / "unrelated.txt").write_text("not ours")
    events = [event for event in dump(tmp_path, DumpOptions()) if event["type"] != "file"]
    by_type = {event["type"]: event for event in events}
    assert by_type["aborted_transaction"]["last_offset"] == 105
    assert by_type["producer"]["producer_id"] == 9
    assert by_type["producer"]["transaction_first_offset"] is None
    assert by_type["leader_epoch"] == {"type": "leader_epoch", "epoch": 7, "start_offset": 100}
    assert by_type["partition_metadata"]["topic_id"] == "Lqh_cDVtTJiFdGQ7amM_VQ"
    assert by_type["offset_checkpoint"] == {
        "type": "offset_checkpoint",
        "topic": "orders",
        "partition": 0,
        "offset": 108,
    }
    assert dump(tmp_path, VERIFY) == of_type(dump(tmp_path, VERIFY), "file")


def test_markers_are_named(tmp_path: Path) -> None:
    end = EndTransactionMarker(False, 3)
    key, value = end.encode_key(), end.encode_value()
    marker = build_batch(
        [Record(0, 0, key, value)],
        base_offset=100,
        producer_id=9,
        producer_epoch=0,
        is_transactional=True,
        is_control=True,
    )
    path = tmp_path / f"{NAME}.log"
    path.write_bytes(marker)
    (event,) = of_type(dump(path, DumpOptions(deep=True)), "record")
    assert event["control"] == {"type": "ABORT", "data": {"coordinator_epoch": 3}}


def test_a_file_that_is_not_there_or_not_ours_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        dump(tmp_path / "missing.log")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UsageError, match="no file of a log has such a name"):
        dump(tmp_path / "notes.txt")


def test_committed_offsets_are_decoded() -> None:
    key = bytes.fromhex("0001 0005") + b"group" + b"\0\6orders" + bytes.fromhex("00000002")
    value = bytes.fromhex("0004 0000000000000108 ffffffff 01 00000000000003e8 01 00 10") + bytes(range(16))
    decoded = decode_offsets(key, value)
    assert decoded.key == {"type": "1", "data": {"group": "group", "topic": "orders", "partition": 2}}
    assert decoded.value == {
        "version": "4",
        "data": {
            "offset": 264,
            "leaderEpoch": -1,
            "metadata": "",
            "commitTimestamp": 1000,
            "topicId": "AAECAwQFBgcICQoLDA0ODw",
        },
    }
    assert decode_offsets(key, None).value is None


def test_transactions_are_decoded() -> None:
    key = b"\0\0\0\2tx"
    value = (
        bytes.fromhex("0001 000000000000000c 0000 0000ea60 01 02")
        + b"\7orders"
        + bytes.fromhex("02 00000000 00 00000000000003e8 00000000000003e7 01 00 08 000000000000000c")
    )
    decoded = decode_transactions(key, value)
    assert decoded.key == {"type": "0", "data": {"transactionalId": "tx"}}
    assert decoded.value == {
        "version": "1",
        "data": {
            "producerId": 12,
            "previousProducerId": 12,
            "producerEpoch": 0,
            "transactionTimeoutMs": 60000,
            "transactionStatus": 1,
            "transactionPartitions": [{"topic": "orders", "partitionIds": [0]}],
            "transactionLastUpdateTimestampMs": 1000,
            "transactionStartTimestampMs": 999,
        },
    }


@given(key=st.none() | st.binary(max_size=60), value=st.none() | st.binary(max_size=120))
def test_bytes_that_are_no_such_record_are_said_to_be_so(key: bytes | None, value: bytes | None) -> None:
    for decoder in (decode_offsets, decode_transactions, decode_cluster_metadata):
        with contextlib.suppress(Undecodable):
            decoder(key, value)

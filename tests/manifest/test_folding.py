"""The last record of each key: what transactions decided counts, aborted ones do not, open ones are undecided."""

from __future__ import annotations

from holdfast.broker.log.scan import Batch
from holdfast.manifest.folding import decode_table, encode_table, key_digest, keys_of_log
from holdfast.wire.batch import Record, build_batch, check_whole
from holdfast.wire.control_records import EndTransactionMarker


def batch(
    offset: int, *pairs: tuple[bytes, bytes | None], producer: int = -1, marker: bool | None = None
) -> Batch:
    if marker is None:
        records = [Record(index, 0, key, value) for index, (key, value) in enumerate(pairs)]
    else:
        end = EndTransactionMarker(marker, 0)
        records = [Record(0, 0, end.encode_key(), end.encode_value())]
    data = build_batch(
        records,
        base_offset=offset,
        base_timestamp=offset,
        producer_id=producer,
        producer_epoch=0 if producer >= 0 else -1,
        is_transactional=producer >= 0,
        is_control=marker is not None,
    )
    return Batch(check_whole(data), memoryview(data))


def test_the_last_decided_record_of_each_key_is_kept() -> None:
    keys = keys_of_log()
    for each in (
        batch(0, (b"a", b"1"), (b"b", b"1")),
        batch(2, (b"a", b"committed"), producer=7),
        batch(3, (b"b", b"aborted"), producer=8),
        batch(4, (b"c", b"open"), producer=9),
        batch(5, producer=8, marker=False),
        batch(6, producer=7, marker=True),
        batch(7, (b"d", None)),
    ):
        keys.add(each)
    assert {key: found.offset for key, found in keys.latest.items()} == {
        key_digest(b"a"): 2,
        key_digest(b"b"): 1,
        key_digest(b"d"): 7,
    }
    assert [(producer, key, found.offset) for producer, key, found in keys.pending()] == [
        (9, key_digest(b"c"), 4)
    ]
    assert keys.latest[key_digest(b"d")].content.is_tombstone
    assert decode_table(encode_table(keys.latest), "table") == keys.latest


def test_a_record_that_a_later_transaction_decides_does_not_replace_a_newer_one() -> None:
    keys = keys_of_log()
    keys.add(batch(0, (b"a", b"older"), producer=7))
    keys.add(batch(1, (b"a", b"newer")))
    keys.add(batch(2, producer=7, marker=True))
    assert keys.latest[key_digest(b"a")].offset == 1


def test_time_value_and_headers_are_part_of_the_digest() -> None:
    found = set()
    for offset, value in ((0, b"x"), (1, b"x"), (0, b"y"), (0, None)):
        keys = keys_of_log()
        keys.add(batch(offset, (b"a", value)))
        found.add(keys.latest[key_digest(b"a")].content.digest)
    assert len(found) == 4

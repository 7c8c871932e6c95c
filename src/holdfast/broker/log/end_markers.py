"""The control batches that end transactions: building them, reading them, and taking them into account.

A marker is a batch of one control record, of the producer whose transaction it ends and without a sequence. It
says commit or abort and names the coordinator's epoch. Everything that replays a log comes through
`replay_batch`, so that a log that was appended to, one that was recovered and one that is surveyed agree.

Compaction empties a marker whose transaction has nothing left and that still carries its producer's epoch. It
ends that transaction for a state that was taken when it was open, and there is nobody to tell of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from holdfast.broker.log.index import TransactionIndex
from holdfast.broker.log.producer_state import CompletedTransaction, ProducerStateMap
from holdfast.broker.log.scan import walk_headers
from holdfast.broker.log.segment import Segment
from holdfast.errors import CorruptLog, InvalidRecords
from holdfast.seams import Buffer, File
from holdfast.wire.batch import CONTROL, TRANSACTIONAL, BatchHeader, Record, build_batch, iterate_records
from holdfast.wire.control_records import EndTransactionMarker, decode_end_marker


def build_end_marker(
    producer_id: int, producer_epoch: int, marker: EndTransactionMarker, timestamp_ms: int
) -> bytes:
    """The control batch that ends this producer's transaction."""
    return build_batch(
        [Record(0, 0, marker.encode_key(), marker.encode_value())],
        base_timestamp=timestamp_ms,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        is_transactional=True,
        is_control=True,
    )


def read_end_marker(batch: Buffer) -> EndTransactionMarker | None:
    """The marker in a control batch; None when it was emptied, or is a control batch of another kind."""
    for record in iterate_records(batch):
        return decode_end_marker(record.key, record.value)
    return None


def replay_batch(
    producers: ProducerStateMap, header: BatchHeader, file: File, position: int, now_ms: int
) -> CompletedTransaction | None:
    """Record a stored batch, which stands at `position` of `file`; returns the transaction it ended, if any."""
    if header.producer_id < 0:
        return None
    if not header.attributes & CONTROL:
        producers.update(header, header.base_offset, now_ms)
        return None
    try:
        marker = read_end_marker(file.pread(header.size, position))
    except InvalidRecords as error:
        # Its header, perhaps all that was damaged, makes it one.
        raise CorruptLog(f"{file.path} at {position}: no control batch: {error.message}") from None
    if marker is None:
        producers.note_emptied_marker(header, now_ms)
        return None
    return producers.complete(header, marker, header.base_offset, now_ms)


def add_aborted(index: TransactionIndex, completed: CompletedTransaction | None) -> None:
    """Note a transaction that ended in the segment of `index`, if it was aborted."""
    if completed is not None and completed.is_aborted:
        index.append(
            completed.producer_id,
            completed.first_offset,
            completed.last_offset,
            completed.last_stable_offset,
        )


def rebuild_transactions(segments: Iterable[Segment]) -> Iterator[TransactionIndex]:
    """The index of each segment, from its batches and those before.

    They must be those of the log from its beginning: any batch may belong to a transaction that ends later.
    """
    producers = ProducerStateMap()
    for segment in segments:
        index = TransactionIndex(segment.base_offset)
        file = segment.file
        for position, header in walk_headers(file, segment.size):
            if header.attributes & TRANSACTIONAL:
                add_aborted(index, replay_batch(producers, header, file, position, 0))
        yield index

"""A coordinator's journal put through the broker's own compaction: what a start would read of it afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.partition_logs import DELETE_RETENTION_MS, MAP_BYTES, CompactedLog

from holdfast.broker.log.cleaner import Cleaned
from holdfast.broker.log.compaction import examine, plan_round
from holdfast.broker.log.tasks import run
from holdfast.wire.batch import check_whole


def compacted(batches: Sequence[bytes], rounds: int = 2) -> list[bytes]:
    """The batches after some rounds, `delete.retention.ms` and more apart, so that the second removes tombstones."""
    subject = CompactedLog()
    for number, batch in enumerate(batches):
        subject.log.append(check_whole(batch), batch, 0, subject.now)
        if number % 4 == 3:
            subject.roll()
    for _ in range(rounds):
        subject.roll()
        _clean(subject)
        subject.now_ms += 2 * DELETE_RETENTION_MS
    segments = subject.log.segments
    return [
        segments[subject.log.segment_for(found.header.base_offset)].file.pread(
            found.header.size, found.position
        )
        for found in subject.log.batches_from(subject.log.start_offset)
        if found.header.records_count
    ]


def _clean(subject: CompactedLog) -> None:
    """One round, up to the first transaction that is open, as the broker bounds it."""
    log = subject.log
    log.producers.advance_high_watermark(log.end_offset)
    unstable = log.producers.first_unstable_offset
    end = log.end_offset if unstable is None else unstable
    dirt = examine(log, subject.clean_to, end, log.end_position, subject.now)
    asked = plan_round(log, dirt, log.end_position, subject.now, MAP_BYTES)
    subject.swap_in(Cleaned.from_json(run(subject.disk, "compact", asked.to_json())))

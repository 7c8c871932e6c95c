"""Dead letters: records as they came, with where from and why in headers of holdfast's own dialect.

A record may have failed before and carry the headers of that too: the last set counts, which begins with the topic.
Others may use the same topic; theirs name another group than the pipeline. A dead letter that was redriven stays where
it is, and what was sent again is a record of the source with a place of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.lineage import LineageBatch, split_columns
from holdfast.audit.sinks import headers
from holdfast.audit.sinks.base import DeadLetterRow
from holdfast.audit.sinks.kafka import TopicReader, own_settings
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.definition.naming import DEAD_LETTER_NAME, dead_letter_of

PREFIX: Final = "hf-dlt-"


class DeadLetters(TopicReader):
    """The dead letters of one pipeline."""

    kind = "dead_letter"

    def __init__(self, definition: PipelineDefinition, settings: Mapping[str, str]) -> None:
        letter = dead_letter_of(definition)
        super().__init__(
            definition.name,
            DEAD_LETTER_NAME,
            letter.topic,
            own_settings(settings, letter.bootstrap, letter.settings),
        )

    def places(self, batch: pa.RecordBatch) -> headers.Places:
        names, values, ends = headers.flat_headers(batch.column("headers"))
        begin = headers.last_of_each(headers.places_of(names, f"{PREFIX}topic"), ends)

        def last(name: str) -> pa.Array:
            at = headers.last_of_each(headers.places_of(names, PREFIX + name), ends)
            return headers.taken(values, np.where(at > begin, at, -1))

        topics = _texts(headers.taken(values, begin))
        partitions, offsets = headers.decimal(last("partition")), headers.decimal(last("offset"))
        is_ours = pc.fill_null(pc.equal(last("group"), self.pipeline.encode()), False)
        is_known = (
            is_ours.to_numpy(zero_copy_only=False)
            & (begin >= 0)
            & (partitions >= 0)
            & topics.is_valid().to_numpy(zero_copy_only=False)
        )
        offsets = np.where(is_known, offsets, -1)
        return headers.Places(
            pc.dictionary_encode(topics), partitions, offsets, np.zeros(len(offsets), np.int64)
        )

    def letters(self) -> Iterator[tuple[LineageBatch, pa.Array]]:
        """Places, as runs of one partition, with the reason of each."""
        self._again = {}
        for batch in self.records():
            kept, places = self._known(batch)
            if kept.num_rows == 0:
                continue
            reasons = self._said(kept, "reason")
            where = f"{self.topic}-{kept.column('partition')[0].as_py()}"
            codes = places.topics.indices.to_numpy(zero_copy_only=False).astype(np.int64) << 32
            order = np.argsort(codes | places.partitions, kind="stable")
            row = 0
            for run in split_columns(
                places.topics.take(pa.array(order)),
                pa.array(places.partitions[order]),
                pa.array(places.offsets[order]),
                pa.array(places.indexes[order]),
                where,
            ):
                self._note_again(run)
                yield run, reasons.take(pa.array(order[row : row + len(run)]))
                row += len(run)

    def dead_letters(self) -> Iterator[DeadLetterRow]:
        for batch in self.records():
            kept, places = self._known(batch)
            columns = (
                places.topics.dictionary_decode().to_pylist(),
                places.partitions.tolist(),
                places.offsets.tolist(),
                self._said(kept, "reason").to_pylist(),
                self._said(kept, "message").to_pylist(),
                kept.column("partition").to_pylist(),
                kept.column("offset").to_pylist(),
            )
            for topic, partition, offset, reason, error, number, at in zip(*columns, strict=True):
                where = f"{self.topic}-{number}@{at}"
                yield DeadLetterRow(topic, partition, offset, 0, reason or "", error or "", where)

    @staticmethod
    def _said(batch: pa.RecordBatch, name: str) -> pa.Array:
        """What the last header of this name says."""
        names, values, ends = headers.flat_headers(batch.column("headers"))
        at = headers.last_of_each(headers.places_of(names, PREFIX + name), ends)
        return _texts(headers.taken(values, at))


def _texts(values: pa.Array) -> pa.Array:
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        raw = values.to_pylist()
        return pa.array(
            [None if each is None else each.decode("utf-8", "replace") for each in raw], pa.string()
        )

"""The records of a source as columns, decoded by the formats alone: the audit's own way to what the engine decoded.

Values go by their topic's decoding, or by that of all others; a topic without one of its own has every decoding's
columns, null. The key's fields come under `_key_`. A record that cannot be decoded has an error and null everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.cells import hash_values
from holdfast.audit.lineage import as_ranges
from holdfast.audit.model import Examined, Fate, Finding
from holdfast.pipeline.definition.model import Source
from holdfast.pipeline.formats import Decoder, compile_decoder
from holdfast.pipeline.positions import Place

KEY_PREFIX: Final = "_key_"
SAMPLE_ROWS: Final = 8
"""Of each batch that the reader gives, decoded a second time."""


@dataclass(frozen=True)
class DecodedBatch:
    """Some records of one partition, as columns."""

    columns: Mapping[str, pa.Array]
    errors: pa.Array
    """Null where the record could be decoded."""


Decode = Callable[[], DecodedBatch]
"""Decodes the batch at hand, once however often it is called."""


class Observer(Protocol):
    """Somebody who sees every committed record of the scope while the source is walked."""

    def take(self, place: Place, batch: pa.RecordBatch, decoded: Decode) -> None:
        """Records of one partition; its batches come in the order of offsets."""


class Computing(Protocol):
    """Somebody who makes again what steps compute; a step that is not evaluated gives nothing."""

    def rows(self, stream: str, columns: Mapping[str, str]) -> Iterator[pa.Table] | None:
        """Of the rows that reach a step, or that a sink takes: their lineage, and these expressions by name."""

    def aggregates(
        self, step: str, members: pa.Table, aggregates: Mapping[str, str]
    ) -> Mapping[str, Mapping[int, Any]]:
        """Of rows that reach a step, in groups (`topic`, `partition`, `offset`, `order`, `group`): each aggregate by
        group. Rows of a group are taken by `order`, then by place."""


class SourceDecoder:
    """Compiled from a source's definition."""

    def __init__(self, source: Source) -> None:
        is_needed = not source.values or any(topic not in source.values for topic in source.topics)
        has_default = is_needed or source.pattern is not None
        self._default = compile_decoder(source.value) if has_default else None
        self._own: dict[str, Decoder] = {
            topic: compile_decoder(decoding) for topic, decoding in source.values.items()
        }
        is_raw = source.key.format == "bytes" and not source.key.fields
        self._key = None if is_raw else compile_decoder(source.key, prefix=KEY_PREFIX)
        self.types: dict[str, pa.DataType] = {}
        """Of all columns, by name."""
        self.ddl: dict[str, str] = {}
        """The same in Spark's words."""
        for decoder in (self._key, self._default, *self._own.values()):
            for field, column in zip(decoder.arrow_fields, decoder.columns, strict=True) if decoder else ():
                self.types.setdefault(field.name, field.type)
                self.ddl.setdefault(field.name, column.type.ddl)

    def decode(self, topic: str, batch: pa.RecordBatch, *, plainly: bool = False) -> DecodedBatch:
        """A batch as the reader gives it: records of one partition. `plainly`: one by one, without machine code."""
        decoder = self._own.get(topic) or self._default
        assert decoder is not None, f"topic {topic!r} has no decoding"
        found, errors = _decoded(decoder, batch.column("value"), plainly)
        if self._key is not None:
            keys, key_errors = _decoded(self._key, batch.column("key"), plainly)
            errors = pc.coalesce(errors, pc.binary_join_element_wise("key: ", key_errors, ""))
            found |= keys
            if errors.null_count < len(errors):
                places = pa.array(range(len(errors)), pa.int64())
                valid = pc.if_else(errors.is_null(), places, None)
                found = {name: column.take(valid) for name, column in found.items()}
        for name, kind in self.types.items():
            if name not in found:
                found[name] = pa.nulls(batch.num_rows, kind)
        return DecodedBatch(found, errors)

    def once(self, topic: str, batch: pa.RecordBatch) -> Decode:
        """The batch decoded when somebody asks, and then kept."""
        kept: list[DecodedBatch] = []

        def decoded() -> DecodedBatch:
            if not kept:
                kept.append(self.decode(topic, batch))
            return kept[0]

        return decoded


class PlainSample:
    """Looks on while the source is walked (an `Observer`): some records of each batch are decoded once more, plainly.

    Engine and audit decode by the same machine code. Where that says something else than the plain decoders, both are
    wrong and agree.
    """

    def __init__(self, decoder: SourceDecoder) -> None:
        self._decoder = decoder
        self._taken = 0
        self._other: dict[Place, list[int]] = {}

    def take(self, place: Place, batch: pa.RecordBatch, decoded: Decode) -> None:
        rows = np.unique(
            np.linspace(0, batch.num_rows - 1, min(SAMPLE_ROWS, batch.num_rows)).astype(np.int64)
        )
        chosen = pa.array(rows)
        plain, found = self._decoder.decode(place.topic, batch.take(chosen), plainly=True), decoded()
        one, other = (each.is_null().to_numpy(zero_copy_only=False) for each in (plain.errors, found.errors))
        differs = one != other[rows]
        for name, column in plain.columns.items():
            differs |= hash_values(column) != hash_values(found.columns[name].take(chosen))
        self._taken += len(rows)
        if differs.any():
            offsets = batch.column("offset").take(chosen).to_numpy()
            self._other.setdefault(place, []).extend(offsets[differs].tolist())

    def examine(self) -> Examined:
        detail = "the plain decoder makes something else of these records than the one that pipelines and audits use"
        found = []
        for place, offsets in sorted(self._other.items()):
            ranges = tuple(as_ranges(np.array(offsets, np.int64)))
            found.append(Finding(Fate.ALTERED, "", place, ranges, len(offsets), detail=detail))
        note = f"{self._taken:,} records were decoded a second time, by the plain decoders"
        return Examined(tuple(found), notes=(note,) if self._taken else ())


def _decoded(decoder: Decoder, values: pa.Array, plainly: bool) -> tuple[dict[str, pa.Array], pa.Array]:
    columns, errors = (decoder.decode_plainly if plainly else decoder.decode)(values)
    return {field.name: column for field, column in zip(decoder.arrow_fields, columns, strict=True)}, errors

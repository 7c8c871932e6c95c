"""The records of a source as columns, decoded by the formats alone: the audit's own way to what the engine decoded.

Values go by their topic's decoding, or by that of all others; a topic without one of its own has every decoding's
columns, null. The key's fields come under `_key_`. A record that cannot be decoded has an error and null everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.pipeline.definition.model import Decoding, Source
from holdfast.pipeline.formats import Decoder, compile_decoder
from holdfast.pipeline.positions import Place

KEY_PREFIX: Final = "_key_"


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


class SourceDecoder:
    """Compiled from a source's definition."""

    def __init__(self, source: Source) -> None:
        self._default = compile_decoder(source.value) if _has_default(source) else None
        self._own: dict[str, Decoder] = {
            topic: compile_decoder(decoding) for topic, decoding in source.values.items()
        }
        self._key = None if _is_raw(source.key) else compile_decoder(source.key, prefix=KEY_PREFIX)
        self.types: dict[str, pa.DataType] = {}
        """Of all columns, by name."""
        self.ddl: dict[str, str] = {}
        """The same in Spark's words."""
        for decoder in (*([] if self._key is None else [self._key]), *self._values()):
            for field, column in zip(decoder.arrow_fields, decoder.columns, strict=True):
                self.types.setdefault(field.name, field.type)
                self.ddl.setdefault(field.name, column.type.ddl)

    def _values(self) -> list[Decoder]:
        return [*([] if self._default is None else [self._default]), *self._own.values()]

    def decode(self, topic: str, batch: pa.RecordBatch) -> DecodedBatch:
        """A batch as the reader gives it: records of one partition."""
        decoder = self._own.get(topic) or self._default
        assert decoder is not None, f"topic {topic!r} has no decoding"
        columns, errors = decoder.decode(batch.column("value"))
        found = {field.name: column for field, column in zip(decoder.arrow_fields, columns, strict=True)}
        if self._key is not None:
            columns, key_errors = self._key.decode(batch.column("key"))
            found |= {
                field.name: column for field, column in zip(self._key.arrow_fields, columns, strict=True)
            }
            errors = pc.coalesce(errors, pc.binary_join_element_wise("key: ", key_errors, ""))
            if errors.null_count < len(errors):
                found = {name: _null_where(column, errors) for name, column in found.items()}
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


def _has_default(source: Source) -> bool:
    is_needed = not source.values or any(topic not in source.values for topic in source.topics)
    return is_needed or source.pattern is not None


def _is_raw(key: Decoding) -> bool:
    return key.format == "bytes" and not key.fields


def _null_where(column: pa.Array, errors: pa.Array) -> pa.Array:
    places = pa.array(range(len(errors)), pa.int64())
    return column.take(pc.if_else(errors.is_null(), places, None))

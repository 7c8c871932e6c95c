"""From the reader's batches to the rows that are staged: values, keys and event time as columns.

Topics may have a decoding of their own; rows then have the columns of all of them, null where their topic has none.

With an event time, a staged row also has `_event_time`; `_seen`, the greatest event time (in milliseconds) of the
records before it in the piece of its partition that this task reads; and `_piece`, that piece's number. What was seen
before the piece only the driver knows, when all pieces are read (`Staged.seen_before_ms`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.pipeline.core.failures import DefinitionWrong
from holdfast.pipeline.definition.columns import KEY_PREFIX
from holdfast.pipeline.definition.model import Decoding, EventTime, Source
from holdfast.pipeline.state.watermarks import NOTHING, Clock, counted, running

if TYPE_CHECKING:
    import pyarrow as pa

    from holdfast.pipeline.formats import Decoder
    from holdfast.pipeline.formats.types import Type

RECORD_TIME: Final = "_timestamp"
EVENT_NAMES: Final = ("_event_time", "_seen", "_piece")
EVENT_DDL: Final = "_event_time timestamp, _seen bigint, _piece int"


def key_decoder(key: Decoding) -> Decoder | None:
    """Nothing for a key that is left as bytes: `_key` has it."""
    from holdfast.pipeline.formats import compile_decoder

    if key.format == "bytes" and not key.fields:
        return None
    return compile_decoder(key, prefix=KEY_PREFIX)


def value_decoders(source: Source) -> dict[str | None, Decoder]:
    """By topic; under `None` that of the others, where there may be some."""
    from holdfast.pipeline.formats import compile_decoder

    needs_default = not source.values or any(topic not in source.values for topic in source.topics)
    found: dict[str | None, Decoder] = {}
    if needs_default or source.pattern is not None:
        found[None] = compile_decoder(source.value)
    for topic, decoding in source.values.items():
        found[topic] = compile_decoder(decoding)
    return found


def united(decoders: Mapping[str | None, Decoder]) -> dict[str, Type]:
    """The columns of all of them, in the order in which they first come."""
    columns: dict[str, Type] = {}
    lowered: dict[str, str] = {}
    for topic, decoder in decoders.items():
        for column in decoder.columns:
            name = lowered.setdefault(column.name.lower(), column.name)
            known = columns.setdefault(name, column.type)
            if name != column.name or known.ddl != column.type.ddl:
                raise DefinitionWrong(
                    f"source: topic {topic!r} has {column.name!r} as {column.type}, and another topic has {name!r} as "
                    f"{known}: columns of one name have one type; rename one of them"
                )
    return columns


def decoded_ddl(source: Source) -> list[str]:
    """The columns that decoding gives, in Spark's words: of the key, of the value."""
    from holdfast.pipeline.formats.types import spark_ddl

    keys = key_decoder(source.key)
    columns = united(value_decoders(source))
    texts = [keys.spark_ddl if keys is not None else "", spark_ddl(columns.items())]
    return [text for text in texts if text]


class Rows(NamedTuple):
    """One batch of one partition, decoded."""

    columns: list[pa.Array]
    errors: pa.Array
    """Null where a record could be decoded."""


class RecordDecoder:
    """Decodes batches as the reader gives them: rows of one partition each, its batches in the order of offsets."""

    def __init__(self, source: Source) -> None:
        self._values = value_decoders(source)
        self._key = key_decoder(source.key)
        columns = united(self._values)
        self._types = {name: kind.arrow for name, kind in columns.items()}
        self._event = None if source.event_time is None else _EventTimes(source.event_time)
        self.names = [
            *([] if self._key is None else [field.name for field in self._key.arrow_fields]),
            *self._types,
            *(EVENT_NAMES if self._event is not None else ()),
        ]

    def prepare(self) -> None:
        """Have the machine code made."""
        for decoder in (*self._values.values(), *([] if self._key is None else [self._key])):
            decoder.prepare()

    def greatest_ms(self, topic: str, partition: int) -> int | None:
        """Of the events of this partition that count; nothing where there was none."""
        return None if self._event is None else self._event.greatest_ms(topic, partition)

    def decode(self, batch: pa.RecordBatch, topic: str, partition: int, piece: int) -> Rows:
        import pyarrow.compute as pc

        decoder = self._values.get(topic) or self._values[None]
        columns, errors = decoder.decode(batch.column("value"))
        if len(self._values) > 1:
            columns = self._spread(decoder, columns, batch.num_rows)
        if self._key is not None:
            key_columns, key_errors = self._key.decode(batch.column("key"))
            columns = [*key_columns, *columns]
            errors = pc.coalesce(errors, pc.binary_join_element_wise("key: ", key_errors, ""))
            columns = _null_where(columns, errors)
        if self._event is not None:
            by_name = dict(zip(self.names, columns, strict=False))
            columns = [*columns, *self._event.columns(batch, by_name, errors, (topic, partition), piece)]
        return Rows(list(columns), errors)

    def _spread(self, decoder: Decoder, columns: Sequence[pa.Array], rows: int) -> list[pa.Array]:
        import pyarrow as pa

        own = dict(zip((field.name for field in decoder.arrow_fields), columns, strict=True))
        return [own[name] if name in own else pa.nulls(rows, kind) for name, kind in self._types.items()]


class _EventTimes:
    """Event time of the rows of one task."""

    def __init__(self, event: EventTime) -> None:
        self._field = event.field
        self._clock = Clock.of(event)
        self._greatest: dict[tuple[str, int], int] = {}

    def greatest_ms(self, topic: str, partition: int) -> int | None:
        found = self._greatest.get((topic, partition), NOTHING)
        return None if found == NOTHING else found

    def columns(
        self,
        batch: pa.RecordBatch,
        columns: Mapping[str, pa.Array],
        errors: pa.Array,
        place: tuple[str, int],
        piece: int,
    ) -> list[pa.Array]:
        import numpy as np
        import pyarrow as pa

        timestamps_us = _microseconds(record_times(batch))
        if self._field == RECORD_TIME:
            events_us = np.where(errors.is_null().to_numpy(zero_copy_only=False), timestamps_us, NOTHING)
        else:
            events_us = _microseconds(columns[self._field])  # null where the record could not be decoded
        is_known = events_us != NOTHING
        events_ms = np.where(is_known, events_us // 1000, NOTHING)
        counting = counted(events_ms, timestamps_us // 1000, self._clock)
        seen, self._greatest[place] = running(counting, self._greatest.get(place, NOTHING))
        return [
            pa.array(events_us, pa.int64(), mask=~is_known).cast(pa.timestamp("us", tz="UTC")),
            pa.array(seen, pa.int64(), mask=seen == NOTHING),
            pa.array(np.full(len(seen), piece, np.int32)),
        ]


def record_times(batch: pa.RecordBatch) -> pa.Array:
    """The times that Kafka keeps with the records; null where it keeps none (it then says -1)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    times = batch.column("timestamp")
    is_none = pc.less(times.cast(pa.int64()), 0)
    return times if not pc.any(is_none).as_py() else pc.if_else(is_none, pa.scalar(None, times.type), times)


def _microseconds(times: pa.Array) -> Any:
    """Int64, `NOTHING` for null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    unit = pa.timestamp("us", tz=times.type.tz)
    return pc.fill_null(times.cast(unit).cast(pa.int64()), NOTHING).to_numpy(zero_copy_only=False)


def _null_where(columns: Sequence[pa.Array], errors: pa.Array) -> list[pa.Array]:
    """A record whose key cannot be read has no columns, as one whose value cannot."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if errors.null_count == len(errors):
        return list(columns)
    indices = pc.if_else(errors.is_null(), pa.array(range(len(errors)), pa.int64()), None)
    return [column.take(indices) for column in columns]

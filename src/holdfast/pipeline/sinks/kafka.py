"""The Kafka sink: rows and ledger in one transaction per writer.

Records are computed and set aside when a batch is prepared (`kafka_records`), and sent when it is committed, by writers
that live in the driver for the whole run: opening the sink takes every transactional id the ledger knows, which ends
what an earlier copy left open and fences it, and only then is the ledger read. From there on this copy alone moves the
ledger, until it is fenced itself.

A tombstone stays one, unless the definition's `value` says itself what it becomes: its value is null, and its key is
the one that the definition's `key` gives for the columns of the record's key, else the record's own.

With several writers a batch is several transactions. A hash of its key, or of its lineage, gives each row to a writer:
a batch that only some of its writers had committed is finished by the others, with the number of writers it began with.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.client.settings import shared_settings
from holdfast.pipeline.core.sql import LINEAGE
from holdfast.pipeline.definition.columns import KEY_PREFIX
from holdfast.pipeline.definition.model import KafkaSink
from holdfast.pipeline.definition.naming import ledger_topic
from holdfast.pipeline.ledger import Entry, Rejected
from holdfast.pipeline.sealing import Written
from holdfast.pipeline.sinks.base import (
    Batch,
    Prepared,
    Problem,
    RowsRejected,
    Sink,
    SinkContext,
    SinkError,
    SinkFenced,
)
from holdfast.pipeline.sinks.columns import (
    JSON_OPTIONS,
    check_json_keys,
    column_named,
    is_stored,
    stored_schema,
)
from holdfast.pipeline.sinks.kafka_ledger import LedgerRecord, LedgerTopic, Standing, Topic, standing_of
from holdfast.pipeline.sinks.kafka_records import Digesting, Records, set_aside, sizes
from holdfast.pipeline.sinks.kafka_writer import BATCH_BYTES, Message, Writer

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

TOMBSTONE = "_tombstone"
SOURCE_HEADER = "hf-source"
"""Where a record came from: `topic:partition@offset#index`."""
BATCH_OVERHEAD_BYTES = 1024
COLUMNS = {"key": "binary", "value": "binary", "headers": "array<struct<key:string,value:binary>>"}
"""What is in the digest of a record, beside its lineage."""


class PreparedRecords:
    """Records aside, to be sent."""

    def __init__(self, sink: KafkaSinkWriter, records: Records) -> None:
        self.rows = records.rows
        self.digest: int | None = records.digest
        self.written = None if sink.key is None else Written(sink.content(records), COLUMNS)
        self._sink = sink
        self._records = records

    def commit(self, entry: Entry) -> None:
        self._sink.send(entry, self._records)
        self.discard()

    def discard(self) -> None:
        self._records.remove()


class KafkaSinkWriter(Sink):
    """The sink to the engine."""

    topic_config: Mapping[str, str] = {}
    """Of the topic, where it has to be made."""
    rejects = True
    """Whether records that the topic does not take can become dead letters."""

    def __init__(self, definition: KafkaSink, pipeline: str, last_of_key: str | None = None) -> None:
        """`last_of_key` is what to say where the topic is compacted."""
        self.name = definition.name
        self._definition = definition
        self._pipeline = pipeline
        self._last_of_key = last_of_key
        self._ledger: LedgerTopic | None = None
        self._settings: dict[str, Any] = {}
        self._writers: list[Writer] = []
        self._batch_bytes = BATCH_BYTES
        self._is_writing = False
        self._fenced: SinkFenced | None = None
        self._standing: Standing | None = None
        self._missing: str | None = None
        self._limit: int | None = None
        """Of the topic, for a batch of records."""
        self._needs_keys = False
        """The topic is compacted: brokers take no record without a key."""
        self._holds: Topic | None = None
        """The topic as it was when it was opened."""
        self._scratch = ""
        self.partitions = 0
        self.batch_time_ms = 0

    # Definition

    def check(self, rows: StructType) -> list[Problem]:
        from pyspark.errors import AnalysisException, ParseException
        from pyspark.sql import SparkSession

        problems: list[Problem] = []
        if self._definition.writers < 1:
            problems.append(Problem("writers", "there has to be one at least"))
        if self._definition.value is None:
            problems += check_json_keys(stored_schema(rows).fields)
        spark = SparkSession.getActiveSession()
        if spark is None:
            return problems
        empty = spark.createDataFrame([], rows)
        expressions = {"key": self._definition.key, "value": self._definition.value}
        expressions |= {f"headers.{name}": text for name, text in self._definition.headers.items()}
        for where, text in expressions.items():
            if text is None:
                continue
            try:
                kind = empty.selectExpr(f"({text}) AS it").schema[0].dataType.simpleString()
            except (AnalysisException, ParseException) as error:
                problems.append(Problem(where, str(error).splitlines()[0]))
                continue
            if kind.startswith(("struct", "array", "map", "variant", "void")):
                problems.append(
                    Problem(where, f"it gives {kind}; a record takes a string or bytes (to_json(…)?)")
                )
        return problems

    # Life

    def open(self, context: SinkContext, spark: SparkSession | None) -> None:
        own = dict(self._definition.settings)
        if self._definition.bootstrap is not None:
            self._settings = {**own, "bootstrap.servers": self._definition.bootstrap}
        else:
            self._settings = {**shared_settings(context.source), **own}
        if "bootstrap.servers" not in self._settings:
            raise SinkError(f"sink {self.name!r}: neither the sink nor the source names a bootstrap server")
        self._ledger = LedgerTopic(
            self.ledger_topic, self.name, self._pipeline, self._settings, is_writing=spark is not None
        )
        self._scratch = os.path.join(context.home, "sinks", self.name)
        self._warn = context.warn
        if spark is None:
            return
        self._is_writing = True
        shutil.rmtree(self._scratch, ignore_errors=True)  # of a run that was cut short
        self._take_over()

    @property
    def _opened(self) -> LedgerTopic:
        assert self._ledger is not None, "open comes first"
        return self._ledger

    @property
    def ledger_topic(self) -> str:
        return ledger_topic(self._pipeline, self.name)

    @property
    def topic(self) -> str:
        return self._definition.topic

    def _ensure_topic(self, had: Topic | None) -> None:
        """Make the topic where it is missing, unless the ledger knows it: then it is lost, and not new."""
        self._missing = self._lost_topic(had)
        if self._missing is not None:
            return
        if self._opened.partitions(self.topic) == 0:
            self._opened.create(self.topic, -1, self.topic_config)
        self.partitions = self._opened.partitions(self.topic)
        limit = self._opened.topic_setting(self.topic, "max.message.bytes")
        self._limit = None if limit is None else int(limit)
        if limit is not None:
            # Brokers refuse a batch as a whole: one made of small records must not be too large.
            self._batch_bytes = max(1024, min(BATCH_BYTES, int(limit) - BATCH_OVERHEAD_BYTES))
        self._needs_keys = "compact" in (self._opened.topic_setting(self.topic, "cleanup.policy") or "")
        if self._needs_keys and self._last_of_key:
            self._warn(f"sink {self.name!r}: the topic {self.topic!r} is compacted: {self._last_of_key}")
        topic_id = self._opened.topic_id(self.topic)
        self._holds = Topic(self.topic, topic_id) if topic_id else None

    def _lost_topic(self, had: Topic | None) -> str | None:
        if had is None or had.name != self.topic:
            return None
        now = self._opened.topic_id(self.topic)
        if now in (had.id, ""):
            return None
        what = (
            "is gone" if now is None else f"was deleted and created again (its id is {now}, and was {had.id})"
        )
        return f"the topic {self.topic!r}, which the ledger says has records of this pipeline, {what}"

    def _take_over(self) -> None:
        """Fence every writer there ever was, then read what they have committed."""
        known = standing_of(
            self._opened.read()
        )  # a ledger of somebody else's is found before anybody is fenced
        if self._is_writing:
            self._ensure_topic(known.topic)
        count = self._opened.ensure(self._definition.writers)
        self._writers = [
            Writer(
                self.name,
                f"hf-{self._pipeline}--{self.name}-{number}",
                self._settings,
                self._batch_bytes,
            )
            for number in range(count)
        ]
        with ThreadPoolExecutor(max_workers=count) as pool:
            list(pool.map(Writer.start, self._writers))
        self._standing = standing_of(self._opened.read())

    def _current(self) -> Standing:
        if self._fenced is not None:
            raise SinkFenced(str(self._fenced))
        if self._standing is None or not self._is_writing:
            if self._is_writing:
                self._take_over()
                assert self._standing is not None
            else:
                self._standing = standing_of(self._opened.read())
        return self._standing

    def last_entry(self) -> Entry | None:
        return self._current().last

    def unfinished(self) -> Entry | None:
        """A batch some writers have and others have not: it has to be the next, cut exactly so."""
        record = self._current().unfinished
        return None if record is None else record.entry

    def missing(self) -> str | None:
        standing = self._current()
        return self._missing if self._is_writing else self._lost_topic(standing.topic)

    def holds_rows(self) -> bool:
        return self._opened.has_records(self.topic)

    def forget(self) -> None:
        """Every transactional id is held by now, so nobody writes to the ledger behind the first writer's back."""
        was_writing = self._is_writing
        if not self._writers:
            if self._opened.partitions(self.ledger_topic) == 0:
                return
            self._take_over()
        try:
            self._writers[0].forget(self.ledger_topic, len(self._writers))
        except BaseException:
            self.close()
            raise
        self._standing = Standing()
        if was_writing:
            self._ensure_topic(None)
        else:
            self.close()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers = []
        self._standing = None

    # Batches

    def prepare(self, batch: Batch, rows: DataFrame) -> Prepared:
        standing = self._current()
        writers = self._definition.writers
        if standing.unfinished is not None:
            writers = standing.unfinished.writers
        directory = os.path.join(self._scratch, batch.label)
        if batch.is_empty:
            return PreparedRecords(self, Records(directory, (), 0, 0, writers))
        self.batch_time_ms = batch.batch_time_ms
        records = set_aside(self.records(rows), directory, writers, self._digesting())
        try:
            self._reject_untaken(records)
            return PreparedRecords(self, records)
        except BaseException:
            records.remove()
            raise

    def _digesting(self) -> Digesting | None:
        names = (SOURCE_HEADER, *self._definition.headers)
        return None if self.key is None else Digesting(self.key, names)

    def content(self, records: Records) -> int:
        """The sum of the digests of these records."""
        return records.content

    def _reject_untaken(self, records: Records) -> None:
        """`RowsRejected` for records that the topic does not take. Compressed, a large one may fit, so it is tried."""
        size_max = records.largest if self._limit is None else self._limit - BATCH_OVERHEAD_BYTES
        keyless = records.keyless if self._needs_keys else 0
        if not self.rejects or (records.largest <= size_max and not keyless):
            return
        found = []
        for batch in (each for writer in range(records.writers) for each in records.of_writer(writer)):
            lacks_key = pc.and_(batch.column("key").is_null(), self._needs_keys)
            for at in pc.indices_nonzero(pc.or_(lacks_key, pc.greater(sizes(batch), size_max))).to_pylist():
                (message,) = self.messages(batch.slice(at, 1))
                why: str | None = f"the record has no key, and topic {self.topic!r} is compacted"
                if not lacks_key[at].as_py():
                    why = self._writers[0].refusal(self.topic, message)
                if why is not None:
                    place = batch.column(LINEAGE)[at].as_py()
                    found.append(
                        Rejected(place["topic"], place["partition"], place["offset"], self.name, why)
                    )
        if found:
            raise RowsRejected(found)

    def records(self, rows: DataFrame) -> DataFrame:
        """Key, value and headers of every row, beside its lineage."""
        from pyspark.sql import functions

        rows = _with_keys_of_tombstones(rows)
        key = self._definition.key
        columns: list[Column] = [functions.col(LINEAGE)]
        if key is not None:
            value = _as_bytes(functions.expr(key), rows)
            if {"_key", TOMBSTONE} <= set(rows.columns):
                of_record = functions.when(functions.col(TOMBSTONE), functions.col("_key"))
                value = functions.coalesce(value, of_record)
            columns.append(value.alias("key"))
        elif "_key" in rows.columns:
            columns.append(functions.col("_key").alias("key"))
        else:
            columns.append(functions.lit(None).cast("binary").alias("key"))
        columns.append(self._value(rows).alias("value"))
        source = "concat(_hf.topic, ':', _hf.partition, '@', _hf.offset, '#', _hf.index)"
        columns.append(functions.expr(f"encode({source}, 'utf-8')").alias("source"))
        for at, text in enumerate(self._definition.headers.values()):
            columns.append(_as_bytes(functions.expr(text), rows).alias(f"header_{at}"))
        return rows.select(*columns)

    def _value(self, rows: DataFrame) -> Column:
        from pyspark.sql import functions

        given = self._definition.value
        if given is not None:
            value = _as_bytes(functions.expr(given), rows)
        else:
            named = [column_named(name) for name in rows.columns if name != LINEAGE and is_stored(name)]
            text = functions.to_json(functions.struct(*named), JSON_OPTIONS) if named else functions.lit("{}")
            value = functions.encode(text, "utf-8")
        if TOMBSTONE in rows.columns and TOMBSTONE not in (given or ""):
            value = functions.when(functions.col(TOMBSTONE), functions.lit(None)).otherwise(value)
        return value.cast("binary")

    def messages(self, batch: pa.RecordBatch) -> Iterator[Message]:
        """What is sent for these records."""
        columns = {name: batch.column(name).to_pylist() for name in batch.schema.names[1:]}
        keys, values, sources = columns["key"], columns["value"], columns["source"]
        names = list(self._definition.headers)
        if not names:
            for key, value, source in zip(keys, values, sources, strict=True):
                yield key, value, [(SOURCE_HEADER, source)], -1
            return
        extra = zip(*(columns[f"header_{at}"] for at in range(len(names))), strict=True)
        for key, value, source, headers in zip(keys, values, sources, extra, strict=True):
            yield key, value, [(SOURCE_HEADER, source), *zip(names, headers, strict=True)], -1

    def send(self, entry: Entry, records: Records) -> None:
        """Every writer that does not have this batch yet commits its part of it."""
        standing = self._current()
        previous, done = standing.last, frozenset[int]()
        if standing.unfinished is not None:
            begun = standing.unfinished.entry
            if (begun.range, begun.number) != (entry.range, entry.number):
                raise SinkError(
                    f"sink {self.name!r}: writers have part of the batch {begun.range}, so it has to be finished "
                    f"first, and not {entry.range}"
                )
            if begun.fingerprint != entry.fingerprint:
                raise SinkError(
                    f"sink {self.name!r}: writers have part of the batch {begun.range}, made with another definition "
                    "of the pipeline; finish it with that one, then change the definition"
                )
            done = standing.done
        elif entry.number != (0 if previous is None else previous.number + 1):
            raise SinkFenced(f"sink {self.name!r}: entry {entry.number} does not follow the ledger")
        self.batch_time_ms = entry.batch_time_ms
        record = LedgerRecord(entry, records.writers, previous, self._holds).encode()
        missing = [number for number in range(records.writers) if number not in done]
        try:
            self._run(missing, records, record)
        except SinkFenced as fenced:
            self._fenced = fenced
            self.close()
            raise
        except BaseException:
            # What is committed is not known here; the next look takes the ids again and reads the ledger.
            self.close()
            raise
        self._standing = Standing(entry, topic=self._holds)

    def _run(self, writers: list[int], records: Records, record: bytes) -> None:
        def write(number: int) -> int:
            messages = (message for batch in records.of_writer(number) for message in self.messages(batch))
            return self._writers[number].write(self.topic, messages, (self.ledger_topic, number, record))

        if len(writers) <= 1:
            for number in writers:
                write(number)
            return
        with ThreadPoolExecutor(max_workers=len(writers)) as pool:
            futures = [pool.submit(write, number) for number in writers]
        failures = [failure for future in futures if (failure := future.exception()) is not None]
        for failure in sorted(failures, key=lambda each: not isinstance(each, SinkFenced)):
            raise failure


def _with_keys_of_tombstones(rows: DataFrame) -> DataFrame:
    """A tombstone has no value: columns that the record's key has too are taken from there."""
    from pyspark.sql import functions

    names = [name for name in rows.columns if KEY_PREFIX + name in rows.columns]
    if not names or TOMBSTONE not in rows.columns:
        return rows
    kinds = {field.name: field.dataType for field in rows.schema.fields}
    taken = {
        name: functions.when(
            functions.col(TOMBSTONE),
            functions.coalesce(column_named(name), column_named(KEY_PREFIX + name).cast(kinds[name])),
        ).otherwise(column_named(name))
        for name in names
    }
    return rows.withColumns(taken)


def _as_bytes(value: Column, rows: DataFrame) -> Column:
    """Bytes as they are, anything else as its text."""
    from pyspark.sql import functions
    from pyspark.sql.types import BinaryType

    kind = rows.select(value.alias("it")).schema[0].dataType
    return value if isinstance(kind, BinaryType) else functions.encode(value.cast("string"), "utf-8")

"""One writer of a Kafka sink: a transactional producer that lives as long as the run.

`init_transactions` ends whatever an earlier holder of the id left open and fences it, so between that and being fenced
itself this writer alone can commit under the id. Each batch is one transaction of rows and one ledger record.

A failure that certainly left nothing is a `SinkError`; being fenced is `SinkFenced`; where a commit may or may not have
happened the error says so, and the ledger, read again after the next `init_transactions`, tells.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Producer

from holdfast.client.settings import producer_settings
from holdfast.pipeline.sinks.base import SinkError, SinkFenced, SinkUnavailable

START_SECONDS = 60.0
COMMIT_SECONDS = 60.0
COMMIT_TRIES = 5
REPORT_SECONDS = 5.0
ROOM_SECONDS = 0.05
BATCH_BYTES = 1_000_000
DEFAULTS: Mapping[str, Any] = {
    "partitioner": "murmur2_random",
    "linger.ms": 20,
    "reconnect.backoff.max.ms": 1000,
    "batch.num.messages": 100_000,
    "queue.buffering.max.messages": 200_000,
    "queue.buffering.max.kbytes": 131_072,
    # The topic's limit decides how large a record may be.
    "message.max.bytes": 1_000_000_000,
    # A batch is one transaction; longer than this it is given up by the brokers.
    "transaction.timeout.ms": 300_000,
    "delivery.report.only.error": True,
}
FENCED = frozenset(
    (
        KafkaError._FENCED,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.PRODUCER_FENCED,
        KafkaError.INVALID_PRODUCER_ID_MAPPING,
    )
)

AWAY = frozenset((KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN))
PURGED = frozenset((KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT))
"""What befalls the other records of a transaction once one was refused."""

Message = tuple[bytes | None, bytes | None, list[tuple[str, str | bytes | None]] | None, int]
"""Key, value, headers, and a partition or -1."""


class Note(NamedTuple):
    """A record for one partition of a ledger."""

    topic: str
    partition: int
    value: bytes | None
    headers: list[tuple[str, str | bytes | None]] | None = None


LOGGER = logging.getLogger("holdfast.pipeline.kafka")
"""Where the clients complain; what matters comes back as an error."""
LOGGER.addHandler(logging.NullHandler())


class Writer:
    def __init__(
        self, sink: str, transactional_id: str, settings: Mapping[str, Any], batch_bytes: int = BATCH_BYTES
    ) -> None:
        self._sink = sink
        self._id = transactional_id
        self._refused: str | None = None
        given = {**DEFAULTS, "batch.size": min(BATCH_BYTES, batch_bytes), **settings}
        bootstrap = str(given.pop("bootstrap.servers"))
        made = producer_settings(bootstrap, {**given, "transactional.id": transactional_id})
        timeout_ms = min(int(made["message.timeout.ms"]), int(made["transaction.timeout.ms"]))
        self._timeout_ms = int(made["transaction.timeout.ms"])
        self._settings = {**made, "message.timeout.ms": timeout_ms, "on_delivery": self._delivered}
        self._producer = Producer(self._settings, logger=LOGGER)

    def start(self) -> None:
        """Become the only holder of the id."""
        try:
            self._producer.init_transactions(START_SECONDS)
        except KafkaException as error:
            raise self._explained(error, "could not begin") from error

    def write(self, topic: str, messages: Iterable[Message], note: Note) -> int:
        """One transaction: these messages in order, and the ledger record; returns how many."""
        with self._transaction("could not send"):
            count = self._produce(topic, messages)
            self._note(note)
        return count

    def note(self, notes: Iterable[Note]) -> None:
        """One transaction of records for the ledger alone."""
        with self._transaction("could not write to the ledger"):
            for note in notes:
                self._note(note)

    def _note(self, note: Note) -> None:
        self._send(note.topic, (str(note.partition).encode(), note.value, note.headers, note.partition))

    @contextlib.contextmanager
    def _transaction(self, what: str) -> Iterator[None]:
        """Commits what is sent in it, or aborts."""
        self._refused = None
        try:
            self._producer.begin_transaction()
            yield
        except BaseException as error:
            self._abort()
            if isinstance(error, KafkaException):
                raise self._explained(error, what) from error
            raise
        self._commit()

    def refusal(self, topic: str, message: Message) -> str | None:
        """Why the topic does not take this record, by trying in a transaction that is aborted; nothing: it does."""
        self._refused = None
        try:
            self._producer.begin_transaction()
            self._send(topic, message)
            self._producer.flush(COMMIT_SECONDS)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.MSG_SIZE_TOO_LARGE:
                self._abort()
                raise self._explained(error, "could not send") from error
            self._refused = error.args[0].str()
        self._abort()
        refused, self._refused = self._refused, None
        return refused

    def close(self) -> None:
        """Let go; a transaction that is open is ended by the next holder of the id, or by time."""
        with contextlib.suppress(KafkaException):
            self._producer.purge(in_queue=True, in_flight=True)
            self._producer.flush(0)

    def _produce(self, topic: str, messages: Iterable[Message]) -> int:
        produce, poll = self._producer.produce, self._producer.poll
        count = 0
        for message in messages:
            key, value, headers, partition = message
            try:
                produce(topic, value, key, partition, headers=headers)
            except BufferError:
                poll(0)
                self._send(topic, message)
            count += 1
            if not count & 0x3FFF:
                poll(0)
        return count

    def _send(self, topic: str, message: Message) -> None:
        key, value, headers, partition = message
        while True:
            try:
                self._producer.produce(topic, value, key, partition, headers=headers)
                return
            except BufferError:
                self._producer.poll(ROOM_SECONDS)
                if self._refused is not None:
                    raise SinkError(self._refused) from None

    def _delivered(self, error: KafkaError | None, message: Any) -> None:
        """Remember why a record was refused: the first of them, and not one that fell with another."""
        if error is None or error.code() in PURGED or self._refused is not None:
            return
        size = len(message.value() or b"") + len(message.key() or b"")
        self._refused = (
            f"sink {self._sink!r}: topic {message.topic()!r} did not take a record of {size} bytes: "
            f"{error.str()}; nothing was committed"
        )

    def _commit(self) -> None:
        for attempt in range(COMMIT_TRIES):
            try:
                self._producer.commit_transaction(COMMIT_SECONDS)
                return
            except KafkaException as failure:
                error = failure.args[0]
                if error.code() in FENCED:
                    raise self._fenced() from failure
                if error.txn_requires_abort():
                    self._abort()
                    if self._refused is not None:
                        raise SinkError(self._refused) from failure
                    raise SinkUnavailable(
                        f"sink {self._sink!r}: {error.str()}; nothing was committed, run again"
                    ) from failure
                if not error.retriable() or attempt == COMMIT_TRIES - 1:
                    raise SinkUnavailable(
                        f"sink {self._sink!r}: whether the batch was committed is not known ({error.str()}); "
                        "run again: the ledger tells"
                    ) from failure

    def _abort(self) -> None:
        """Where this fails too, the next `init_transactions` aborts it. Every record is reported on when it returns."""
        with contextlib.suppress(KafkaException):
            self._producer.abort_transaction(COMMIT_SECONDS)
            self._producer.flush(REPORT_SECONDS)
        if self._refused is not None:
            # A refused batch has used up its sequence numbers, and brokers would miss them in front of the next one.
            self.close()
            self._producer = Producer(self._settings, logger=LOGGER)
            self.start()

    def _explained(self, failure: KafkaException, what: str) -> SinkError:
        error = failure.args[0]
        if error.code() in FENCED:
            return self._fenced()
        if self._refused is not None:
            return SinkError(self._refused)
        kind = SinkUnavailable if error.retriable() or error.code() in AWAY else SinkError
        return kind(f"sink {self._sink!r}: {what}: {error.str()}; nothing was committed")

    def _fenced(self) -> SinkFenced:
        return SinkFenced(
            f"sink {self._sink!r}: another copy of the pipeline has taken over the transactional id {self._id!r}, or a "
            f"batch took longer than transaction.timeout.ms ({self._timeout_ms} ms). This batch was not committed"
        )

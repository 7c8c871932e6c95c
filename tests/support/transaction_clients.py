"""Transactional producers, of whichever client, behind one small face.

    producer = make_producer("aiokafka", engine.bootstrap_servers, "transactional-id")
    producer.begin()
    producer.send("topic", 0, "value")
    producer.send_offsets({("input", 0): 7}, member)
    producer.commit()

A client's own exception becomes `Refused` with the name of its class or error: fencing is an answer to compare,
not a failure of the scenario.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, Protocol, TypeVar

from confluent_kafka import KafkaException, Producer, TopicPartition
from tests.support.group_clients import AioKafkaMember, ConfluentMember, KafkaPythonMember

from holdfast.errors import HoldfastError
from holdfast.testing.engines import QUIET, WAIT_SECONDS, Place

T = TypeVar("T")
TIMEOUT_MS: Final = 60_000


class Refused(HoldfastError):
    """A client was refused something for good; the message is its name for the reason."""


class TransactionalProducer(Protocol):
    def begin(self) -> None: ...

    def send(self, topic: str, partition: int, value: str) -> None:
        """Hand over one message; it may be sent later."""

    def flush(self) -> None:
        """Return when everything handed over is acknowledged."""

    def send_offsets(self, positions: Mapping[Place, int], member: Any) -> None:
        """Commit positions of this member's group within the transaction."""

    def commit(self) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None:
        """Go away without a word about an open transaction, as a crash would."""


class ConfluentTransactions:
    def __init__(
        self, bootstrap_servers: str, transactional_id: str, *, timeout_ms: int = TIMEOUT_MS
    ) -> None:
        self._errors: list[Any] = []
        """Fatal ones; whoever calls the producer is told of them too."""
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap_servers,
                "transactional.id": transactional_id,
                "transaction.timeout.ms": timeout_ms,
                "message.timeout.ms": min(timeout_ms, 30_000),
                "linger.ms": 2,
                "error_cb": self._errors.append,
                **QUIET,
            }
        )
        self._failures: list[Any] = []
        self._call(self._producer.init_transactions, WAIT_SECONDS)

    def _call(self, work: Callable[..., Any], *arguments: Any) -> None:
        try:
            work(*arguments)
        except KafkaException as error:
            raise Refused(error.args[0].name()) from error

    def _delivered(self, error: Any, _: Any) -> None:
        if error is not None:
            self._failures.append(error)

    def begin(self) -> None:
        self._failures.clear()
        self._call(self._producer.begin_transaction)

    def send(self, topic: str, partition: int, value: str) -> None:
        self._call(
            lambda: self._producer.produce(
                topic, value.encode(), partition=partition, on_delivery=self._delivered
            )
        )

    def flush(self) -> None:
        # The binding trips over a fatal error that arrives together with the reports of what was not delivered.
        with contextlib.suppress(SystemError):
            self._call(self._producer.flush, WAIT_SECONDS)
        if self._failures:
            raise Refused(self._failures[0].name())

    def send_offsets(self, positions: Mapping[Place, int], member: ConfluentMember) -> None:
        offsets = [TopicPartition(topic, index, offset) for (topic, index), offset in positions.items()]
        metadata = member.consumer.consumer_group_metadata()
        self._call(self._producer.send_offsets_to_transaction, offsets, metadata, WAIT_SECONDS)

    def commit(self) -> None:
        self._call(self._producer.commit_transaction, WAIT_SECONDS)

    def abort(self) -> None:
        self._call(self._producer.abort_transaction, WAIT_SECONDS)

    def close(self) -> None:
        self._producer.purge()
        # One that was fenced says so again.
        with contextlib.suppress(KafkaException):
            self._producer.flush(1)


class KafkaPythonTransactions:
    def __init__(
        self, bootstrap_servers: str, transactional_id: str, *, timeout_ms: int = TIMEOUT_MS
    ) -> None:
        from kafka import KafkaProducer

        self._producer = KafkaProducer(
            bootstrap_servers=bootstrap_servers,
            transactional_id=transactional_id,
            transaction_timeout_ms=timeout_ms,
            enable_idempotence=True,
            acks="all",
            retry_backoff_ms=20,
        )
        self._futures: list[Any] = []
        self._call(self._producer.init_transactions)

    def _call(self, work: Callable[..., T], *arguments: Any) -> T:
        from kafka.errors import KafkaError

        try:
            return work(*arguments)
        except KafkaError as error:
            raise Refused(type(error).__name__) from error

    def begin(self) -> None:
        self._futures.clear()
        self._call(self._producer.begin_transaction)

    def send(self, topic: str, partition: int, value: str) -> None:
        self._futures.append(
            self._call(lambda: self._producer.send(topic, value=value.encode(), partition=partition))
        )

    def flush(self) -> None:
        for future in self._futures:
            self._call(future.get, WAIT_SECONDS)

    def send_offsets(self, positions: Mapping[Place, int], member: KafkaPythonMember) -> None:
        from kafka import TopicPartition as Where
        from kafka.structs import OffsetAndMetadata

        offsets = {Where(*place): OffsetAndMetadata(offset, "", -1) for place, offset in positions.items()}
        metadata = member.consumer.group_metadata()
        self._call(self._producer.send_offsets_to_transaction, offsets, metadata)

    def commit(self) -> None:
        self._call(self._producer.commit_transaction)

    def abort(self) -> None:
        self._call(self._producer.abort_transaction)

    def close(self) -> None:
        self._producer.close(timeout=0)


class AioKafkaTransactions:
    def __init__(
        self, bootstrap_servers: str, transactional_id: str, *, timeout_ms: int = TIMEOUT_MS
    ) -> None:
        from aiokafka import AIOKafkaProducer

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._futures: list[Any] = []

        async def start() -> Any:
            producer = AIOKafkaProducer(
                bootstrap_servers=bootstrap_servers,
                transactional_id=transactional_id,
                transaction_timeout_ms=timeout_ms,
                retry_backoff_ms=20,
            )
            await producer.start()
            return producer

        self._producer = self._call(start())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        from aiokafka.errors import KafkaError

        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_SECONDS)
        except KafkaError as error:
            raise Refused(type(error).__name__) from error

    def begin(self) -> None:
        self._futures.clear()
        self._call(self._producer.begin_transaction())

    def send(self, topic: str, partition: int, value: str) -> None:
        self._futures.append(
            self._call(self._producer.send(topic, value=value.encode(), partition=partition))
        )

    def flush(self) -> None:
        async def wait() -> None:
            for future in self._futures:
                await asyncio.wait_for(future, WAIT_SECONDS)

        self._call(wait())

    def send_offsets(self, positions: Mapping[Place, int], member: AioKafkaMember) -> None:
        from aiokafka import TopicPartition as Where

        offsets = {Where(*place): offset for place, offset in positions.items()}
        self._call(self._producer.send_offsets_to_transaction(offsets, member.group))

    def commit(self) -> None:
        self._call(self._producer.commit_transaction())

    def abort(self) -> None:
        self._call(self._producer.abort_transaction())

    def close(self) -> None:
        async def stop() -> None:
            # Its own way of stopping would wait for the transaction.
            await self._producer.client.close()

        try:
            self._call(stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(WAIT_SECONDS)


PRODUCERS: Final[Mapping[str, Callable[..., TransactionalProducer]]] = {
    "confluent-kafka": ConfluentTransactions,
    "kafka-python": KafkaPythonTransactions,
    "aiokafka": AioKafkaTransactions,
}

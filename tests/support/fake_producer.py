"""A producer library without a network: what `confluent_kafka.Producer` does, against a cluster in memory.

`FakeCluster` is made once; `cluster.make(settings)` makes producers, and can be given wherever a client takes `make=`.
Everything happens inside `poll`, in the order of sending, so that a test decides when. What a test can do:

- `away()` and `back()`: no message arrives, no question is answered;
- `refuse(rule)`: a rule says of a message with which error a broker refuses it, and whether the batch goes with it;
- `break_producers(code)`: every producer fails for good; what it has accepted and not reported is in the log or not,
  as `lose_reports` says;
- `lose_commit_answer()`: the next transaction is committed, and its producer fails for good before it hears of it;
- `hold_reports()`: messages arrive, and nobody is told until `release_reports()`.

Transactions are kept: messages of an open one are not in `log` until it is committed, and a producer that is
initialised fences the one before it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message

Report = Callable[[KafkaError | None, Any], None]


class Stored(NamedTuple):
    """A message in the log of a partition."""

    key: bytes | None
    value: bytes | None
    headers: dict[str, bytes | None]
    timestamp_ms: int

    @property
    def id(self) -> bytes:
        return self.headers["hf-id"] or b""


class Verdict(NamedTuple):
    """How a broker refuses a message."""

    code: int
    takes_batch_along: bool = False
    """Whether the messages of the same partition that are with it are refused too, with the same code."""


class _Queued(NamedTuple):
    topic: str
    partition: int
    message: Stored
    report: Report | None


Rule = Callable[[str, int, Stored], Verdict | None]


class FakeCluster:
    def __init__(self, topics: Mapping[str, int] | None = None, *, queue_max: int = 100_000) -> None:
        self.topics = dict(topics or {})
        self.queue_max = queue_max
        self.batch_max = 1000
        """How many messages one poll lets arrive."""
        self.lock = threading.Condition(threading.RLock())
        self.logs: dict[tuple[str, int], list[Stored]] = {}
        self.settings: list[dict[str, Any]] = []
        """Those of every producer made, in order."""
        self.cluster_id: str | None = "the-cluster"
        """Which cluster the brokers say that they are; logs and topics are what they are all the same."""
        self.is_away = False
        self.reports_held = False
        self.rule: Rule = lambda topic, partition, message: None
        self.epochs: dict[str, int] = {}
        """Of each transactional id."""
        self._producers: list[FakeProducer] = []
        self.is_commit_answer_lost = False
        self.transactions: list[str] = []
        """What became of each transaction, in order: commit or abort."""

    def make(self, settings: dict[str, Any]) -> FakeProducer:
        producer = FakeProducer(self, settings)
        with self.lock:
            self.settings.append(settings)
            self._producers.append(producer)
        return producer

    def values(self, topic: str, partition: int = 0) -> list[bytes | None]:
        with self.lock:
            return [message.value for message in self.logs.get((topic, partition), [])]

    def log(self, topic: str, partition: int = 0) -> list[Stored]:
        with self.lock:
            return list(self.logs.get((topic, partition), []))

    def wait_until(self, condition: Callable[[], bool], timeout: float = 30.0) -> None:
        """Wait for something that producers bring about."""
        with self.lock:
            assert self.lock.wait_for(condition, timeout), "it did not happen"

    def away(self) -> None:
        with self.lock:
            self.is_away = True

    def back(self) -> None:
        with self.lock:
            self.is_away = False
            self.lock.notify_all()

    def refuse(self, rule: Rule) -> None:
        with self.lock:
            self.rule = rule

    def lose_commit_answer(self) -> None:
        with self.lock:
            self.is_commit_answer_lost = True

    def hold_reports(self) -> None:
        with self.lock:
            self.reports_held = True

    def release_reports(self) -> None:
        with self.lock:
            self.reports_held = False
            self.lock.notify_all()

    def break_producers(self, code: int = KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER) -> None:
        """Every producer there is fails for good."""
        with self.lock:
            for producer in self._producers:
                producer.fatal = KafkaError(code, "broken on purpose", True)
            self.lock.notify_all()


class FakeProducer:
    def __init__(self, cluster: FakeCluster, settings: dict[str, Any]) -> None:
        self._cluster = cluster
        self._settings = settings
        self._queue: deque[_Queued] = deque()
        self._reports: deque[tuple[_Queued, KafkaError | None, int]] = deque()
        self.fatal: KafkaError | None = None
        self._is_fatal_said = False
        self._transaction: list[_Queued] | None = None
        self._transaction_error: KafkaError | None = None
        self._epoch = 0

    def __len__(self) -> int:
        with self._cluster.lock:
            return len(self._queue) + len(self._reports)

    # Sending

    def produce(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        partition: int = -1,
        callback: Report | None = None,
        on_delivery: Report | None = None,
        timestamp: int = 0,
        headers: Sequence[tuple[str, bytes | None]] | None = None,
    ) -> None:
        cluster = self._cluster
        with cluster.lock:
            if self.fatal is not None:
                raise KafkaException(KafkaError(KafkaError._FATAL, "broken on purpose", True))
            if len(self) >= cluster.queue_max:
                raise BufferError("Local: Queue full")
            if len(value or b"") > int(self._settings.get("message.max.bytes", 1_000_000)):
                raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, "too large"))
            message = Stored(key, value, dict(headers or ()), timestamp)
            self._queue.append(_Queued(topic, max(partition, 0), message, callback or on_delivery))
            cluster.lock.notify_all()

    def poll(self, timeout: float = -1) -> int:
        cluster = self._cluster
        with cluster.lock:
            if not self._has_something() and timeout:
                cluster.lock.wait_for(self._has_something, None if timeout < 0 else timeout)
            if self.fatal is not None and not self._is_fatal_said:
                self._is_fatal_said = True
                raise KafkaException(self.fatal)
            if not cluster.is_away and self.fatal is None:
                self._arrive()
            reports = [] if cluster.reports_held else list(self._reports)
            if reports:
                self._reports.clear()
            cluster.lock.notify_all()
        for number, (queued, error, offset) in enumerate(reports, start=1):
            if queued.report is not None:
                try:
                    queued.report(error, _reported(queued, offset))
                except BaseException:
                    # As librdkafka does: the others are kept for the next poll.
                    with cluster.lock:
                        self._reports.extendleft(reversed(reports[number:]))
                    raise
        return len(reports)

    def _has_something(self) -> bool:
        cluster = self._cluster
        return (
            (bool(self._reports) and not cluster.reports_held)
            or (bool(self._queue) and not cluster.is_away)
            or (self.fatal is not None and not self._is_fatal_said)
        )

    def _arrive(self) -> None:
        """What is in the queue reaches the brokers, or is refused."""
        cluster = self._cluster
        batch = [self._queue.popleft() for _ in range(min(len(self._queue), cluster.batch_max))]
        verdicts = [self._verdict(queued) for queued in batch]
        doomed = {
            (queued.topic, queued.partition): verdict
            for queued, verdict in zip(batch, verdicts, strict=True)
            if verdict is not None and verdict.takes_batch_along
        }
        for queued, verdict in zip(batch, verdicts, strict=True):
            found = verdict or doomed.get((queued.topic, queued.partition))
            if found is None and self.fatal is None:
                self._reports.append((queued, None, self._append(queued)))
                continue
            code = KafkaError._PURGE_QUEUE if found is None else found.code
            self._reports.append((queued, KafkaError(code, "refused on purpose"), -1001))
            if found is not None:
                self._after_refusal(code)

    def _verdict(self, queued: _Queued) -> Verdict | None:
        count = self._cluster.topics.get(queued.topic)
        if count is None:
            return Verdict(KafkaError._UNKNOWN_TOPIC)
        if queued.partition >= count:
            return Verdict(KafkaError._UNKNOWN_PARTITION)
        return self._cluster.rule(queued.topic, queued.partition, queued.message)

    def _after_refusal(self, code: int) -> None:
        if self._transaction is not None:
            self._transaction_error = KafkaError(code, "refused on purpose", False, False, True)
        elif self._settings.get("enable.gapless.guarantee") and code >= 0:
            self.fatal = KafkaError(KafkaError._GAPLESS_GUARANTEE, "a gap", True)

    def _append(self, queued: _Queued) -> int:
        if self._transaction is not None:
            self._transaction.append(queued)
            return len(self._transaction)
        log = self._cluster.logs.setdefault((queued.topic, queued.partition), [])
        log.append(queued.message)
        return len(log) - 1

    def flush(self, timeout: float = -1) -> int:
        while len(self):
            if not self.poll(timeout) and timeout >= 0:
                break
        return len(self)

    def purge(self, in_queue: bool = True, in_flight: bool = True, blocking: bool = True) -> None:
        with self._cluster.lock:
            for queued in self._queue:
                self._reports.append((queued, KafkaError(KafkaError._PURGE_QUEUE, "purged"), -1001))
            self._queue.clear()

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        with self._cluster.lock:
            if self._cluster.is_away:
                raise KafkaException(KafkaError(KafkaError._TRANSPORT, "nobody answers"))
            counts = dict(self._cluster.topics)
        topics = {
            name: SimpleNamespace(topic=name, error=None, partitions=dict.fromkeys(range(count)))
            for name, count in counts.items()
            if topic in (None, name)
        }
        if topic is not None and topic not in topics:
            unknown = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, "unknown")
            topics[topic] = SimpleNamespace(topic=topic, error=unknown, partitions={})
        return SimpleNamespace(topics=topics, brokers={1: None}, cluster_id=self._cluster.cluster_id)

    # Transactions

    def init_transactions(self, timeout: float = -1) -> None:
        cluster = self._cluster
        with cluster.lock:
            if cluster.is_away:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "nobody answers", False, True))
            name = str(self._settings["transactional.id"])
            self._epoch = cluster.epochs[name] = cluster.epochs.get(name, 0) + 1

    def begin_transaction(self) -> None:
        with self._cluster.lock:
            self._transaction = []
            self._transaction_error = None

    def commit_transaction(self, timeout: float = -1) -> None:
        self.flush(timeout)
        cluster = self._cluster
        with cluster.lock:
            self._check_epoch()
            if self._transaction_error is not None:
                raise KafkaException(self._transaction_error)
            if cluster.is_away or len(self):
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "nobody answers", False, True))
            for queued in self._transaction or ():
                cluster.logs.setdefault((queued.topic, queued.partition), []).append(queued.message)
            self._transaction = None
            cluster.transactions.append("commit")
            cluster.lock.notify_all()
            if cluster.is_commit_answer_lost:
                cluster.is_commit_answer_lost = False
                raise KafkaException(KafkaError(KafkaError._FATAL, "no answer", True))

    def abort_transaction(self, timeout: float = -1) -> None:
        self.purge()
        self.flush(timeout)
        with self._cluster.lock:
            self._check_epoch()
            self._transaction = None
            self._transaction_error = None
            self._cluster.transactions.append("abort")

    def _check_epoch(self) -> None:
        if self._cluster.epochs.get(str(self._settings["transactional.id"])) != self._epoch:
            raise KafkaException(KafkaError(KafkaError._FENCED, "fenced", True))


def _reported(queued: _Queued, offset: int) -> Any:
    message = queued.message
    return Message(
        queued.topic,
        queued.partition,
        offset,
        message.key,
        message.value,
        None,
        None,
        (1, message.timestamp_ms),
    )

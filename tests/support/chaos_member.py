"""A member of a group as a process of its own, to be killed and stopped: `python -m tests.support.chaos_member`.

Its one argument is a JSON object: `bootstrap_servers`, `group`, `topic`, `protocol` (classic or consumer), `assignor`,
`history` (a file it appends to), `config` (settings of its clients, if any) and, for a copy job, `target` and
`transactional_id`. What it does it writes to its history, a JSON object a line, each in one write, so that a kill
leaves whole lines: what it has processed before it asks to commit it, that it asks, and that it was told yes. Moments
are of the machine's monotonic clock, which all processes share.

It runs until SIGTERM, whatever happens to the broker. Errors of the moment are met by going on; a producer that
was fenced, or a transaction that cannot be committed, by beginning anew from where the group stands.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from holdfast.client.consuming.assignment import is_member, messages

BATCH: Final = 40
CALL_SECONDS: Final = 3.0
SESSION_MS: Final = 2_000
TRANSACTION_MS: Final = 4_000
HUNG_SECONDS: Final = 10.0
"""Longer than any call may take and any member is stopped, together."""
HUNG: Final = 7
"""The exit code of one that its watchdog has ended."""
IMPATIENT: Final[dict[str, Any]] = {
    "reconnect.backoff.ms": 10,
    "reconnect.backoff.max.ms": 100,
    "retry.backoff.ms": 20,
    "retry.backoff.max.ms": 100,
    "socket.timeout.ms": 3_000,
    "log_level": 0,
}
"""A broker that was killed is back in a moment."""


class StartOver(Exception):
    """What is under way cannot be finished by these clients."""


class Watchdog(threading.Thread):
    """Ends the process when a call of the client library does not come back.

    With librdkafka's default `metadata.recovery.strategy`, send_offsets_to_transaction can wait for ever when the
    broker is killed under it, whatever time-out it was given. To the others such a member is one that died.
    """

    def __init__(self, history: History) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._history = history
        self._fed_at = time.monotonic()

    def feed(self) -> None:
        self._fed_at = time.monotonic()

    def run(self) -> None:
        while time.monotonic() - self._fed_at < HUNG_SECONDS:
            time.sleep(0.5)
        self._history.note("hung")
        os._exit(HUNG)


class History:
    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, kind: str, **what: Any) -> None:
        event = {"at": time.monotonic_ns(), "kind": kind, **what}
        os.write(self._file, json.dumps(event).encode() + b"\n")


class Member:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.history = History(options["history"])
        self.stopping = False
        self.batch: list[Any] = []
        """Messages that were read and are to be committed."""
        self.uncommitted: dict[int, int] = {}
        """Positions whose commit was refused while the partition stays: in a rebalance that takes single partitions
        nobody else will commit them, and there may never be another message to commit them with."""
        self.read_up_to: dict[int, int] = {}
        """By partition, the offset behind the last message that was handed out since the partition was assigned."""
        self.watchdog = Watchdog(self.history)
        self.watchdog.start()
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: Any) -> None:
        self.stopping = True

    def run(self) -> None:
        self.history.note("started", pid=os.getpid())
        while not self.stopping:
            consumer = self._consumer()
            producer = None
            try:
                if "transactional_id" in self.options:
                    producer = self._producer()
                while not self.stopping:
                    batch = self._read(consumer)
                    if batch and producer is not None:
                        self._copy(consumer, producer, batch)
                    elif batch or self.uncommitted:
                        self._process(consumer, batch)
            except StartOver as reason:
                self.history.note("starts over", reason=str(reason))
            finally:
                consumer.close()
        self.history.note("ended")

    def _consumer(self) -> Consumer:
        options = self.options
        config: dict[str, Any] = {
            "bootstrap.servers": options["bootstrap_servers"],
            "group.id": options["group"],
            "group.protocol": options["protocol"],
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 50,
            **IMPATIENT,
            # Says on standard error why a position was reset: on the broker's word, or by the client alone.
            "debug": "topic",
            "log_level": 7,
            **options.get("config", {}),
        }
        if options["protocol"] == "classic":
            config |= {"session.timeout.ms": SESSION_MS, "heartbeat.interval.ms": 300}
            config["partition.assignment.strategy"] = options["assignor"]
        else:
            config["group.remote.assignor"] = options["assignor"]
        consumer = Consumer(config)
        self.uncommitted = {}
        self.read_up_to = {}

        def note(kind: str) -> Any:
            def told(_: Any, places: list[Any]) -> None:
                partitions = [each.partition for each in places]
                self.history.note(kind, partitions=partitions)
                for partition in partitions:
                    self.uncommitted.pop(partition, None)
                    self.read_up_to.pop(partition, None)
                # A rebalance may come between two messages of a batch: what was read before it is another's to commit.
                self.batch = [message for message in self.batch if message.partition() not in partitions]

            return told

        consumer.subscribe(
            [options["topic"]],
            on_assign=note("assigned"),
            on_revoke=note("revoked"),
            on_lost=note("lost"),
        )
        return consumer

    def _read(self, consumer: Consumer) -> list[Any]:
        self.watchdog.feed()
        self.batch = []
        for message in messages(consumer, 0.2, BATCH):
            error = message.error()
            if error is None:
                partition, offset = message.partition(), message.offset()
                if offset < self.read_up_to.get(partition, 0):
                    # An offset query that librdkafka sent before a partition was revoked, and that is answered after
                    # it, starts the fetching again: the next assignment hands out what that fetched, and then fetches
                    # it once more. Our own clients drop it as well (client/consuming/loop.py).
                    self.history.note("again", p=partition, o=offset)
                    continue
                self.read_up_to[partition] = offset + 1
                self.batch.append(message)
            elif error.fatal():
                raise StartOver(error.name())
        return self.batch

    # At least once

    def _process(self, consumer: Consumer, batch: list[Any]) -> None:
        positions = dict(self.uncommitted)
        for message in batch:
            self.history.note(
                "processed", p=message.partition(), o=message.offset(), v=message.value().decode()
            )
            positions[message.partition()] = message.offset() + 1
        self.history.note("committing", positions=positions)
        try:
            consumer.commit(
                offsets=[TopicPartition(self.options["topic"], p, o) for p, o in positions.items()],
                asynchronous=False,
            )
        except KafkaException as error:
            # Refused, or not known. Where the partition is somebody else's now, he goes on from what was committed.
            self.history.note("not committed", error=error.args[0].name())
            mine = {each.partition for each in consumer.assignment()}
            self.uncommitted = {p: o for p, o in positions.items() if p in mine}
            return
        self.uncommitted = {}
        self.history.note("committed", positions=positions)

    # Exactly once

    def _producer(self) -> Producer:
        producer = Producer(
            {
                "bootstrap.servers": self.options["bootstrap_servers"],
                "transactional.id": self.options["transactional_id"],
                "transaction.timeout.ms": TRANSACTION_MS,
                "message.timeout.ms": TRANSACTION_MS,
                "linger.ms": 2,
                "error_cb": lambda _: None,
                **IMPATIENT,
                **self.options.get("config", {}),
            }
        )
        self._until_done(producer.init_transactions)
        return producer

    def _until_done(self, call: Any, *arguments: Any) -> None:
        """A call of the transactional producer, again while it says that it may be repeated."""
        while not self.stopping:
            self.watchdog.feed()
            try:
                call(*arguments, CALL_SECONDS)
            except KafkaException as failure:
                error = failure.args[0]
                # First: what timed out may be the messages of the transaction, and that is for good.
                if error.txn_requires_abort():
                    raise Abort(error.name()) from failure
                if error.retriable() or error.code() == KafkaError._TIMED_OUT:
                    continue
                raise StartOver(error.name()) from failure
            return
        raise StartOver("stopping")

    def _copy(self, consumer: Consumer, producer: Producer, batch: list[Any]) -> None:
        positions: dict[int, int] = {}
        try:
            producer.begin_transaction()
            for message in batch:
                producer.produce(self.options["target"], message.value(), partition=message.partition())
                positions[message.partition()] = message.offset() + 1
            offsets = [TopicPartition(self.options["topic"], p, o) for p, o in positions.items()]
            metadata = consumer.consumer_group_metadata()
            if not is_member(consumer, metadata):
                raise Abort("this member is no longer one of its group")
            self._until_done(lambda timeout: producer.send_offsets_to_transaction(offsets, metadata, timeout))
            self.history.note("committing", positions=positions)
            self._until_done(producer.commit_transaction)
        except Abort as reason:
            self.history.note("aborting", positions=positions, reason=str(reason))
            try:
                self._until_done(producer.abort_transaction)
            except Abort as failure:
                raise StartOver(f"cannot abort: {failure}") from failure
            # What it has read but not committed is to be read again.
            raise StartOver(f"aborted: {reason}") from reason
        except (KafkaException, BufferError) as failure:
            raise StartOver(str(failure)) from failure
        self.history.note("committed", positions=positions)


class Abort(Exception):
    """The transaction has to be aborted; its producer lives on."""


if __name__ == "__main__":
    Member(json.loads(sys.argv[1])).run()

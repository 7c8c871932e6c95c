"""Redriving: dead letters back to where they came from, each once.

Copies and progress are one Kafka transaction: an interrupted redrive, killed at any instant, goes on where it stopped
and sends nothing twice (readers must read committed). The transactional id belongs to the progress, so that of two
redrives of one topic the later one wins and the earlier one ends.

A copy keeps key, value and headers. What told of the failure is taken away; what is added counts the redrives and
names the dead letter. Its timestamp is new, with the old one in a header: a message as old as it is could be deleted
on arrival.

Which dead letters of a partition were redriven: a committed offset, and what lies behind it.

A filter picks dead letters here and there, and the next redrive may pick others. So the committed offset stays before
the first that was not redriven, and those behind it that were are kept as a bitmap in the metadata of the committed
offset, compressed, which brokers bound (`offset.metadata.max.bytes`, 4096). What was redriven once is not redriven
again by any other filter, and what was not is never passed over.
"""

from __future__ import annotations

import base64
import binascii
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from holdfast.cli.client import Connection, describe_error, no_such_topic
from holdfast.cli.dlq_reading import REDRIVES_HEADER, Filter, Letter, TopicScan, make_reader, patiently
from holdfast.cli.exits import CannotConnect, CommandFailed, Interrupts, complain
from holdfast.client.dead_letter_dialects import Header, without_failure
from holdfast.client.messages import away_from_home

FROM_HEADER: Final = "hf-redriven-from"
TIMESTAMP_HEADER: Final = "hf-original-timestamp"
BATCH_LETTERS: Final = 500
BATCH_S: Final = 1.0
"""A transaction is open for about this long: readers who read committed wait for it."""
REPORT_S: Final = 5.0
LOOK_S: Final = 0.1
TRANSACTION_S: Final = 60.0


def default_group(topic: str) -> str:
    return f"holdfast-redrive-{topic}"


@dataclass(frozen=True)
class Plan:
    topic: str
    group: str
    to: str | None
    matches: Filter
    rate: float | None
    """Dead letters per second."""
    max_letters: int | None
    is_executed: bool


@dataclass
class Redriven:
    """What a redrive did, or would do."""

    destinations: Counter[str] = field(default_factory=Counter)
    not_matching: int = 0
    done_before: int = 0
    without_origin: int = 0

    @property
    def count(self) -> int:
        return self.destinations.total()


def copy_headers(letter: Letter) -> list[Header]:
    """The message's own headers, and what the redrive adds."""
    ours = (REDRIVES_HEADER, FROM_HEADER)
    own = [
        each
        for each in away_from_home(without_failure(letter.headers, letter.failure.dialect))
        if each[0] not in ours
    ]
    if letter.failure.timestamp_ms is not None and not any(name == TIMESTAMP_HEADER for name, _ in own):
        own.append((TIMESTAMP_HEADER, b"%d" % letter.failure.timestamp_ms))
    own.append((REDRIVES_HEADER, b"%d" % (letter.redrives + 1)))
    own.append((FROM_HEADER, letter.place.encode()))
    return own


class Redrive:
    def __init__(self, connection: Connection, plan: Plan, interrupts: Interrupts) -> None:
        self._connection = connection
        self._plan = plan
        self._interrupts = interrupts
        self.result = Redriven()
        self.committed = 0
        """Sent for good."""
        self._failed: KafkaError | None = None
        self._consumer: Consumer = make_reader(connection, plan.group)
        self._topics = connection.reach(self._consumer).topics
        for topic in (plan.topic, plan.to):
            if topic is not None and topic not in self._topics:
                raise no_such_topic(topic)
        # Another redrive is ended first, and then the end is fixed: none of its progress lies behind that.
        self._producer: Any = self._make_producer() if plan.is_executed else None
        self._scan = TopicScan(self._consumer, connection, plan.topic, interrupts)
        self._progress = read_progress(self._consumer, self._scan)
        self._looked_at: dict[int, int] = {}
        """The offset behind the last letter that was looked at."""
        self._in_batch = 0
        self._batch_began_s = 0.0
        self._next_s = time.monotonic()
        self._report_s = time.monotonic() + REPORT_S

    def close(self) -> None:
        """A transaction that is open here belongs to a redrive that failed; readers need not wait for its time-out."""
        if self._in_batch:
            try:
                self._producer.abort_transaction(self._connection.connect_timeout_ms / 1000)
            except KafkaException as error:
                complain(f"the broker will abort the last transaction by itself: {error.args[0].str()}")
        self._consumer.close()

    def run(self) -> Redriven:
        starts = {
            partition: max(self._progress[partition].position, first)
            for partition, (first, _) in self._scan.bounds.items()
        }
        self._looked_at = {partition: self._progress[partition].position for partition in starts}
        try:
            for letter in self._scan.letters(starts):
                if self._plan.max_letters is not None and self.result.count >= self._plan.max_letters:
                    break
                self._take(letter)
                self._report()
            self._commit()
        except KafkaException as error:
            raise self._explained(error.args[0]) from error
        return self.result

    def _take(self, letter: Letter) -> None:
        progress = self._progress[letter.partition]
        progress.skip(self._looked_at[letter.partition], letter.offset)
        self._looked_at[letter.partition] = letter.offset + 1
        if letter.offset in progress:
            self.result.done_before += 1
        elif not self._plan.matches(letter):
            self.result.not_matching += 1
        elif (destination := self._plan.to or letter.failure.topic) is None:
            self.result.without_origin += 1
        elif destination not in self._topics:
            self._commit()
            raise CommandFailed(
                f"{letter.place} came from '{destination}': {no_such_topic(destination)}, or use --to"
            )
        elif not self._plan.is_executed:
            self.result.destinations[destination] += 1
        elif self._pace():
            self._send(letter, destination)
            progress.add(letter.offset)
            self.result.destinations[destination] += 1
            if self._in_batch >= BATCH_LETTERS or time.monotonic() - self._batch_began_s >= BATCH_S:
                self._commit()

    # Sending

    def _make_producer(self) -> Any:
        producer = self._connection.make(
            Producer,
            {
                "transactional.id": self._plan.group,
                "transaction.timeout.ms": round(TRANSACTION_S * 1000),
                "partitioner": "murmur2_random",
                "message.max.bytes": 1_000_000_000,
                "linger.ms": 5,
            },
        )
        try:
            self._patiently(lambda: producer.init_transactions(self._connection.connect_timeout_ms / 1000))
        except KafkaException as error:
            raise self._explained(error.args[0]) from error
        return producer

    def _send(self, letter: Letter, destination: str) -> None:
        if self._in_batch == 0:
            self._producer.begin_transaction()
            self._batch_began_s = time.monotonic()
        partition = letter.failure.partition
        goes_home = destination == letter.failure.topic and partition in self._topics[destination].partitions
        while True:
            try:
                self._producer.produce(
                    destination,
                    letter.value,
                    letter.key,
                    partition if goes_home and partition is not None else -1,
                    self._reported,
                    headers=copy_headers(letter),
                )
                break
            except BufferError:
                self._producer.poll(LOOK_S)
        self._in_batch += 1
        self._producer.poll(0)

    def _reported(self, error: KafkaError | None, message: Any) -> None:
        self._failed = self._failed or error

    def _commit(self) -> None:
        """The copies of this batch and the progress they make, together."""
        if not self._in_batch:
            return
        try:
            positions = [
                TopicPartition(self._plan.topic, partition, each.position, each.metadata())
                for partition, each in self._progress.items()
            ]
        except ValueError as error:
            raise CommandFailed(
                f"{error}: progress does not fit beside the committed offset. Redrive without a filter, or under "
                "another --group, which remembers nothing of this one"
            ) from error
        metadata = self._consumer.consumer_group_metadata()
        self._patiently(
            lambda: self._producer.send_offsets_to_transaction(positions, metadata, TRANSACTION_S)
        )
        self._patiently(lambda: self._producer.commit_transaction(TRANSACTION_S))
        self.committed += self._in_batch
        self._in_batch = 0

    def _patiently(self, call: Callable[[], Any]) -> None:
        deadline_s = time.monotonic() + TRANSACTION_S
        while True:
            try:
                call()
                return
            except KafkaException as error:
                if (
                    not error.args[0].retriable()
                    or time.monotonic() >= deadline_s
                    or self._interrupts.count > 1
                ):
                    raise
                self._wait(LOOK_S)

    def _explained(self, error: KafkaError) -> CommandFailed:
        """A transaction that failed sent nothing: what was redriven before it stays, the rest is still to do."""
        if error.code() in (
            KafkaError._FENCED,
            KafkaError.PRODUCER_FENCED,
            KafkaError.INVALID_PRODUCER_EPOCH,
        ):
            return CommandFailed(
                f"another redrive took over '{self._plan.group}'; this one ends, nothing is lost or sent twice"
            )
        reason = self._failed or error
        said = f"cannot redrive '{self._plan.topic}': {describe_error(reason, self._plan.to or 'its origin')}"
        if error.code() == KafkaError._TIMED_OUT and self._connection.all_brokers_down:
            return CannotConnect(said)
        return CommandFailed(f"{said}; what was committed before is not sent again")

    # Time

    def _pace(self) -> bool:
        """Wait for this letter's turn; false when interrupted."""
        if self._plan.rate is not None:
            now_s = time.monotonic()
            if self._next_s - now_s > BATCH_S / 2:
                self._commit()
            self._wait(self._next_s - now_s)
            self._next_s = max(self._next_s, now_s) + 1 / self._plan.rate
        return not self._interrupts.count

    def _wait(self, seconds: float) -> None:
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0 and not self._interrupts.count:
            time.sleep(min(left_s, LOOK_S))

    def _report(self) -> None:
        if time.monotonic() >= self._report_s:
            self._report_s = time.monotonic() + REPORT_S
            seen = sum(
                looked_at - max(self._scan.bounds[partition][0], 0)
                for partition, looked_at in self._looked_at.items()
            )
            complain(f"{self.result.count} redriven, {max(seen, 0)} of {self._scan.size} looked at")


def read_progress(consumer: Consumer, scan: TopicScan) -> dict[int, Progress]:
    """How far each partition was redriven; what is gone from the log needs no redrive."""
    places = [TopicPartition(scan.topic, partition) for partition in scan.partitions]
    try:
        committed = patiently(lambda seconds: consumer.committed(places, timeout=seconds))
    except KafkaException as error:
        raise CommandFailed(
            f"cannot read how far '{scan.topic}' was redriven: {describe_error(error.args[0], scan.topic)}"
        ) from error
    progress: dict[int, Progress] = {}
    for each in committed:
        first, end = scan.bounds[each.partition]
        # A committed offset behind the end belongs to a topic of that name that is no more.
        known = Progress.read(each.offset, each.metadata) if 0 <= each.offset <= end else Progress(first)
        known.skip(known.position, first)
        progress[each.partition] = known
    return progress


MARK: Final = "hf-redriven:"
METADATA_BYTES_MAX: Final = 4000
BITMAP_BYTES_MAX: Final = 1 << 20
"""Of a bitmap that is unpacked: eight million dead letters behind the first that is left."""


class Progress:
    def __init__(self, position: int, done: set[int] | None = None) -> None:
        self.position = position
        """Everything before it is redriven, or is not there."""
        self._done = {offset for offset in done or () if offset >= position}
        """Those behind the committed offset that are redriven, or are not there."""
        self._pass(position)

    def __contains__(self, offset: int) -> bool:
        return offset < self.position or offset in self._done

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Progress) and (self.position, self._done) == (other.position, other._done)

    def __hash__(self) -> int:
        return hash(self.position)

    def __repr__(self) -> str:
        return f"<redriven before {self.position} and {len(self._done)} more>"

    def add(self, offset: int) -> None:
        """A dead letter was redriven."""
        self.skip(offset, offset + 1)

    def skip(self, first: int, behind: int) -> None:
        """Nothing is left to do from `first` on: it was redriven, or there are only markers and gaps."""
        if first > self.position:
            self._done.update(range(first, behind))
        elif behind > self.position:
            self._pass(behind)

    def _pass(self, position: int) -> None:
        if self._done:
            self._done.difference_update(range(self.position, position))
            while position in self._done:
                self._done.discard(position)
                position += 1
        self.position = position

    def metadata(self) -> str:
        """What is kept beside the committed offset; raises ValueError when it does not fit."""
        if not self._done:
            return MARK
        bitmap = bytearray((max(self._done) - self.position) // 8 + 1)
        for offset in self._done:
            byte, bit = divmod(offset - self.position, 8)
            bitmap[byte] |= 1 << bit
        packed = zlib.compress(bitmap, 9)
        text = MARK + base64.b64encode(packed).decode("ascii")
        if len(text) > METADATA_BYTES_MAX:
            raise ValueError(
                f"{len(self._done)} redriven dead letters behind {self.position} are too scattered"
            )
        return text

    @classmethod
    def read(cls, position: int, metadata: str | None) -> Progress:
        """Progress as it was committed; metadata that is not ours says nothing."""
        packed = (metadata or "").removeprefix(MARK)
        if not packed or packed == metadata:
            return cls(position)
        try:
            unpacker = zlib.decompressobj()
            bitmap = unpacker.decompress(base64.b64decode(packed, validate=True), BITMAP_BYTES_MAX)
        except (binascii.Error, zlib.error, ValueError):
            return cls(position)
        done = {
            position + 8 * at + bit
            for at, byte in enumerate(bitmap)
            if byte
            for bit in range(8)
            if byte >> bit & 1
        }
        return cls(position, done)

"""Delivering at least once: in order, without giving up, and nothing twice that is known to have arrived.

Messages go, in the spool's order, to an idempotent producer that never times out. Every message carries the header
`hf-id`: spool, opening, topic, partition, sequence.

Whose work it is: that of our thread, where no signal handler runs. A thread that hears a report hands Python's lock
back after each one, and gets it again only when the others let go of it. So while the application is busy sending, it
gives our thread a *turn* every so many messages, and waits until it is over: our thread hands over what was stored
meanwhile, and hears reports.

When the producer breaks (a fatal error, an expired producer id, a broker that lost its memory of us) a new one is made
and everything unconfirmed is sent again, in order; readers recognise what they have seen by its `hf-id`. The producer
is told to break at every failure that would leave a gap (`enable.gapless.guarantee`), so that no message overtakes one
that has to be sent again.

Messages of a topic or partition that cannot take them now are left out until it can (`topics`); to begin or end that,
what is under way is waited for, and a new producer takes what is left.

A broker refuses a batch as a whole for the sake of one message. So what was refused with others is sent again: in
smaller batches when the batch was too large, and one by one when not. What is refused alone is set aside, and the rest
goes on.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException

from holdfast.client.delivery import Bell
from holdfast.client.direct import evenly, is_fatal
from holdfast.client.settings import Settings
from holdfast.client.spool.deliverer import BROKEN_SECONDS, IDLE_SECONDS, PURGE_SECONDS, Deliverer
from holdfast.client.spool.groups import FailedItems, SpooledDelivery, StoredGroup
from holdfast.client.spool.marks import ID_HEADER, Marks
from holdfast.client.spool.progress import Progress
from holdfast.client.spool.set_aside import (
    BATCH_CODES,
    FINAL_CODES,
    REFUSED_CODES,
    misdated_places,
    place_to_hold,
)
from holdfast.client.spool.topics import Place

WINDOW_BYTES_MAX: Final = 32 * 1024 * 1024
WINDOW_MESSAGES_MAX: Final = 16 * 1024
"""What is handed to the producer and not confirmed: the memory that is needed however long the broker is away."""
RECOUNT_SECONDS: Final = 0.02
LAG_BYTES: Final = 1 * 1024 * 1024
LAG_SECONDS: Final = 0.001
"""When so much is stored and not handed over, a turn waits so long for reports: an application that is a little faster
than the brokers goes at their pace, and one that is much faster leaves the rest on disk."""
SERVE_SECONDS: Final = 0.02
LOOK_SECONDS: Final = 0.002
"""How long our thread waits for reports at a time, while messages are under way."""
ASIDE_SECONDS: Final = 0.005
"""How long our thread waits for its turn while the application sends."""
BUSY_MESSAGES: Final = 32
"""An application that sends so many while our thread stands aside once is busy."""
BUSY_ROUNDS: Final = 4
TURN_MESSAGES: Final = 1024
"""What one turn sends at most: more than what was stored since the last one, less than anybody would notice."""
TURN_SECONDS: Final = 0.05
"""The longest turn that a sender waits for: nothing depends on its end."""
AT_ONCE_MESSAGES: Final = 32
"""So few messages are sent by the thread that stored them: nobody else needs to wake up."""
BATCH_BYTES: Final = 1_000_000
"""librdkafka's own default of batch.size."""
BATCH_BYTES_MIN: Final = 16 * 1024

_SIZE_CODES: Final = frozenset((KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE))
_PURGED: Final = frozenset((KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT))

NOTHING_HOPELESS: Final[Mapping[str, KafkaError]] = {}


class IdempotentDeliverer(Deliverer):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._sending = threading.Lock()
        """Held by whoever hands messages to the producer."""
        self._items: Sequence[SpooledDelivery] = ()
        self._at = 0
        """What is handed over next: `_items[_at]`."""
        self._failures: FailedItems = deque()
        """Reports of failures, not looked at yet."""
        self._refused_at_once: FailedItems = deque()
        """What the producer did not take, not looked at yet."""
        self._broken: str | None = None
        self._recount_due = 0.0
        self._turns: SimpleQueue[Bell] = SimpleQueue()
        """Who waits for a turn to be over."""
        self._turn_at = 0
        """What the application had sent at the last turn."""
        self._seen = 0
        self._busy_rounds = 0
        """For how many rounds the application still counts as busy: it may only be waiting for Python's lock."""
        self._suspects: list[tuple[SpooledDelivery, KafkaError]] = []
        """Refused together with others: nobody knows yet which of them was meant."""
        self._marks = Marks(self.spool_id)
        self._batch_bytes = int(self._settings.get("batch.size", BATCH_BYTES))
        self._producer: Any = self._make_producer()

    def _make_producer(self, *, is_gapless: bool = True) -> Any:
        settings: Settings = dict(self._settings)
        if settings.get("enable.idempotence", True) is not False:
            settings["enable.gapless.guarantee"] = is_gapless
        if self._batch_bytes != BATCH_BYTES:
            settings["batch.size"] = self._batch_bytes
        producer = self._asking = self._make(settings)
        return producer

    # From other threads

    def stored(self, group: StoredGroup) -> None:
        is_small = len(group.items) <= AT_ONCE_MESSAGES
        super().stored(group)
        if is_small:
            self._send_some(AT_ONCE_MESSAGES, from_disk=False)

    def give_turn(self) -> None:
        self.is_due = False
        if self._is_whole and not self._waiting.is_ours:
            bell = Bell()
            self._turns.put(bell)
            self._wake.ring()
            bell.wait(TURN_SECONDS)

    def _metadata(self, topic: str | None, timeout: float) -> Any:
        asking = self._asking
        return None if asking is None else asking.list_topics(topic, timeout=timeout)

    # The thread

    def _deliver(self) -> None:
        while not self._closing.is_set():
            self._save_when_due()
            if self._failures or self._refused_at_once:
                self._look_at_failures()
            if not self.home.is_checked and self._feed.has_more and not self._check_cluster():
                self._closing.wait(IDLE_SECONDS)
            released, hopeless = self._look_at_held() if self._topics.held else ((), {})
            if self.home.is_astray:
                self._leave_cluster()
            elif self._broken is not None or self._suspects or released or hopeless or self._is_room_short():
                self._begin_again(released, hopeless)
            elif self._is_application_busy():
                self._stand_aside()
            elif self._send_some(TURN_MESSAGES, from_disk=True):
                self._serve(0)
            elif self.window.bytes:
                self._serve(LOOK_SECONDS)
            else:
                self._rest()
            while not self._turns.empty():
                self._take_turn()

    def _take_turn(self, seconds: float = 0.0) -> None:
        """Do what there is to do for whoever gives us a turn within the time."""
        try:
            bell = self._turns.get(timeout=seconds)
        except Empty:
            self.is_due = True
            return
        self._send_some(TURN_MESSAGES, from_disk=False)
        sent, self._turn_at = self.sends - self._turn_at, self.sends
        self._serve(LAG_SECONDS if self._feed.fresh_bytes > LAG_BYTES else 0, evenly(sent))
        bell.ring()

    def _is_application_busy(self) -> bool:
        """Whether the application sends so much that the work is better done in its thread."""
        sent = self.sends - self._seen
        self._seen = self.sends
        if sent >= BUSY_MESSAGES:
            self._busy_rounds = BUSY_ROUNDS
        elif self._waiting.is_awaited:
            # It does not send, it waits.
            self._busy_rounds = 0
        elif self._busy_rounds:
            self._busy_rounds -= 1
        return self._busy_rounds > 0

    def _stand_aside(self) -> None:
        """The application is sending: have ready what it hands over, and leave the rest to it."""
        if self._sending.acquire(blocking=False):
            try:
                if self._has_room():
                    self._feed.prepare()
            finally:
                self._sending.release()
        self._take_turn(ASIDE_SECONDS)

    def _release(self) -> None:
        with self._sending:
            producer, self._producer = self._producer, None
            if producer is not None:
                self._empty(producer, 0.0)

    # Handing over

    def _send_some(self, count: int, *, from_disk: bool) -> int:
        """Hand the next messages to the producer, unless another thread does; returns how many."""
        if not self._sending.acquire(blocking=False):
            return 0
        try:
            sent = 0
            while sent < count and self._is_whole and self._next_items(from_disk=from_disk):
                handed = self._hand_over(min(self._at + count - sent, len(self._items)))
                if not handed:
                    break
                sent += handed
            return sent
        finally:
            self._sending.release()

    @property
    def _is_whole(self) -> bool:
        """Whether nothing has happened that our thread must look at first."""
        return (
            self._broken is None
            and self.home.is_checked
            and not self._suspects
            and not self._failures
            and not self._refused_at_once
            and self._producer is not None
            and not self._closing.is_set()
        )

    def _has_room(self) -> bool:
        """Whether more may be handed over. Needs `_sending`."""
        window = self.window
        if window.bytes < WINDOW_BYTES_MAX and window.messages < WINDOW_MESSAGES_MAX:
            return True
        now = time.monotonic()
        if now < self._recount_due:
            return False
        self._recount_due = now + RECOUNT_SECONDS
        window.recount()
        return window.bytes < WINDOW_BYTES_MAX and window.messages < WINDOW_MESSAGES_MAX

    def _next_items(self, *, from_disk: bool) -> bool:
        """Whether there is something to hand over."""
        while self._at >= len(self._items):
            if not self._has_room():
                return False
            group = self._feed.take(from_disk=from_disk)
            if group is None:
                return False
            group.failures = self._failures
            self.window.add(group)
            self._items, self._at = group.items, 0
            if pending := self.aside.pending:
                self._items = [item for item in group.items if item not in pending]
        return True

    def _hand_over(self, stop: int) -> int:
        """Produce up to `_items[stop]`; fewer when the producer is full or refuses one."""
        at = begun = self._at
        produce, marks = self._producer.produce, self._marks
        # The producer copies headers: one mapping does for all messages that have none of their own.
        alone: dict[str, bytes] = {}
        try:
            for item in self._items[begun:stop]:
                partition, group = item.partition, item.group
                assert group is not None, "a message is stored before it is sent"
                alone[ID_HEADER] = mark = (
                    marks[group.opening, item.topic, partition, item.line] % item.sequence
                )
                produce(
                    item.topic,
                    item.value,
                    item.key,
                    partition,
                    item,
                    None,
                    item.timestamp_ms,
                    [*item.headers, (ID_HEADER, mark)] if item.headers else alone,
                )
                at += 1
        except BufferError:
            # Full: reports make room.
            pass
        except KafkaException as refused:
            self._refused_at_once.append((self._items[at], refused.args[0]))
            at += 1
            self._wake.ring()
        finally:
            self._at = at
        return at - begun

    # Reports

    def _serve(self, seconds: float, forget: int | None = None) -> None:
        """Hear reports; and forget what is done, or so many messages of it."""
        if self._producer is not None:
            self._poll(self._producer, seconds)
        self.window.advance()
        self.window.forget(forget)
        if self._failures or self._broken is not None:
            self._wake.ring()
        self._waiting.wake()

    def _poll(self, producer: Any, seconds: float) -> None:
        try:
            producer.poll(seconds)
        except KafkaException as error:
            self._broken = self._broken or error.args[0].str()

    def _look_at_failures(self) -> None:
        refused: list[tuple[SpooledDelivery, KafkaError]] = []
        while self._refused_at_once:
            item, error = self._refused_at_once.popleft()
            if not self._is_to_wait(item, error):
                if error.code() in FINAL_CODES and not is_fatal(error):
                    refused.append((item, error))
                else:
                    self._broken = self._broken or error.str()
        failed = [self._failures.popleft() for _ in range(len(self._failures))]
        # A broker refuses a batch for the sake of one timestamp: only if all are right here, it is for its clock's.
        misdated = misdated_places(failed)
        for item, error in failed:
            code = error.code()
            is_misdated = code == KafkaError.INVALID_TIMESTAMP and (item.topic, item.partition) in misdated
            if item.is_settled or (not is_misdated and self._is_to_wait(item, error)):
                continue
            if code in REFUSED_CODES:
                refused.append((item, error))
            elif code in BATCH_CODES:
                self._suspects.append((item, error))
            elif code not in _PURGED:
                self._broken = self._broken or error.str()
        self._refuse(refused)
        self.window.advance()

    def _is_to_wait(self, item: SpooledDelivery, error: KafkaError) -> bool:
        """Whether a message waits from now on for what may pass; those behind it in its partition do too."""
        place = place_to_hold(item, error)
        if place is None:
            return False
        self._to_hold.setdefault(place, error.str())
        self._broken = self._broken or error.str()
        return True

    # A new producer

    def _leave_cluster(self) -> None:
        """The brokers are of another cluster: what they confirmed counts for nothing, and nothing more goes there."""
        with self._sending:
            producer, self._producer = self._producer, None
            self._empty(producer, 0.0)
            self._look_at_failures()
            self._suspects, self._broken = [], None
            self._to_hold.clear()
            self._rewind(self._notes.progress)
            self.home.is_astray = False
            self._producer = self._make_producer()

    def _rewind(self, progress: Progress | None = None) -> None:
        super()._rewind(progress)
        self._items, self._at = (), 0

    def _begin_again(
        self, released: Sequence[Place] = (), hopeless: Mapping[str, KafkaError] = NOTHING_HOPELESS
    ) -> None:
        """Send again everything that is not confirmed, with a new producer, but for what is held."""
        with self._sending:
            self._end_producer()
            suspects, self._suspects = self._suspects, []
            one_by_one: Sequence[SpooledDelivery] = ()
            if suspects:
                one_by_one = self._blame(suspects)
            elif self._broken is not None and not self._to_hold:
                self.say(f"sending again what is not confirmed, with a new producer: {self._broken}")
                self._closing.wait(BROKEN_SECONDS)
            if one_by_one:
                self._send_one_by_one(one_by_one)
            self._broken = None
            self._items, self._at = self._to_send_again(), 0
            if self._to_hold or released or hopeless or self._is_room_short():
                self._hold_and_release(released, hopeless)
            self._producer = self._make_producer()

    def _end_producer(self) -> None:
        """Hear all that the broken producer has to say, so that none of it is taken for the next one's."""
        producer, self._producer = self._producer, None
        self._empty(producer, PURGE_SECONDS)
        self._look_at_failures()

    def _empty(self, producer: Any, seconds: float) -> None:
        """Have the producer report on all it has; what is on its way to brokers gets an answer, if that comes soon."""
        producer.purge(in_flight=not seconds)
        deadline = time.monotonic() + seconds
        while True:
            self._poll(producer, 0)
            if not len(producer):
                return
            if time.monotonic() >= deadline:
                break
            self._poll(producer, SERVE_SECONDS)
        producer.purge()
        self._poll(producer, 0)

    def _blame(self, suspects: Sequence[tuple[SpooledDelivery, KafkaError]]) -> list[SpooledDelivery]:
        """Set aside what was refused alone; returns what has to be tried one by one."""
        together = Counter((item.topic, item.partition) for item, _ in suspects)
        alone = [each for each in suspects if together[each[0].topic, each[0].partition] == 1]
        self._refuse(alone)
        others = [each for each in suspects if together[each[0].topic, each[0].partition] > 1]
        if any(error.code() in _SIZE_CODES for _, error in others) and self._batch_bytes > BATCH_BYTES_MIN:
            self._batch_bytes = max(BATCH_BYTES_MIN, self._batch_bytes // 4)
            self.say(
                f"{others[0][0].topic} takes no batches as large as these; batch.size is {self._batch_bytes} now"
            )
            return []
        return [item for item, _ in others]

    def _send_one_by_one(self, suspects: Sequence[SpooledDelivery]) -> None:
        """Each of the suspects, and what is in front of it in its partition, travels alone: what is refused is meant.

        Nothing else is sent meanwhile. This producer leaves gaps where one is refused, which is right for a message
        that was alone, and would let the company of another be overtaken.
        """
        self._broken = None
        self._producer = self._make_producer(is_gapless=False)
        last: dict[tuple[str, int | None], int] = {}
        for item in suspects:
            where = item.topic, item.partition
            last[where] = max(item.sequence, last.get(where, -1))
        for item in self._to_send_again():
            if item.sequence > last.get((item.topic, item.partition), -1):
                continue
            self._hand_over_one(item)
            self._drain()
            guilty, self._suspects = self._suspects, []
            self._refuse(guilty)
            if not self._is_whole:
                break
        self._end_producer()
        # The end came before an answer.
        self._suspects = []

    def _hand_over_one(self, item: SpooledDelivery) -> None:
        self._items, self._at = (item,), 0
        while self._is_whole and not self._hand_over(1):
            self._serve(SERVE_SECONDS)

    def _drain(self) -> None:
        """Wait until everything handed over is reported on."""
        while len(self._producer) and not self._closing.is_set():
            self._serve(SERVE_SECONDS)
            self._save_when_due()
        self._look_at_failures()

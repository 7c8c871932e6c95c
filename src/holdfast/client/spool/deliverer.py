"""What every way of delivering a spool has in common: where it stands, what it set aside, and how it ends.

One thread per spool delivers. What it has done is written down about once a second and at the end; the spool lets go of
the segments in front of it. A message that is refused for good is set aside, durably, before it is let go of. When the
disk has no room for that, it is tried again, and until then the spool keeps the message. When the spool itself cannot
be read, or the disk fails, delivering stops: whoever waits is told, and whoever closes.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException

from holdfast.client.bell import Bell
from holdfast.client.delivery import Failures, Waiting
from holdfast.client.direct import failure
from holdfast.client.errors import DeliveryFailed, DeliveryStopped
from holdfast.client.library_log import logged_producer
from holdfast.client.settings import Settings
from holdfast.client.spool.feed import Feed
from holdfast.client.spool.groups import FailedItems, SpooledDelivery, StoredGroup
from holdfast.client.spool.progress import Progress, decided, merged, read_progress, write_progress
from holdfast.client.spool.refused import Refused, RefusedMessages
from holdfast.client.spool.store import NO_ROOM, SpoolStore
from holdfast.client.spool.window import Window
from holdfast.errors import HoldfastError
from holdfast.seams import FileSystem

ID_HEADER: Final = "hf-id"
PROGRESS_SECONDS: Final = 1.0
IDLE_SECONDS: Final = 0.2
"""How long to rest when there is nothing to do, at most: what was moved or trimmed meanwhile is seen then."""
BROKEN_SECONDS: Final = 1.0
"""Between the end of a broken producer and the making of the next."""
PURGE_SECONDS: Final = 5.0
"""How long a broken producer may take to report on what it had under way."""
MISSING_SECONDS: Final = 30.0
"""How long brokers must say that there is no such topic before its messages are refused: news travel slowly, and a
topic may be deleted to be made anew."""
ASK_SECONDS: Final = 1.0
"""Between two questions about a topic that was there and is not."""
ANSWER_SECONDS: Final = 1.0
"""How long a broker may take to answer: closing waits for whoever asks."""

NO_TOPIC_CODES: Final = frozenset((KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC))
_REFUSING_CODES: Final = frozenset((KafkaError.TOPIC_EXCEPTION, KafkaError.TOPIC_AUTHORIZATION_FAILED))


class Answer(NamedTuple):
    """What brokers say of a topic."""

    partitions: int | None
    """How many partitions it has; 0 when there is no such topic, None when nobody can say."""
    refusal: KafkaError | None = None
    """Why it will not take any message."""
    is_heard: bool = True
    """Whether a broker answered at all."""


_UNHEARD: Final = Answer(None, is_heard=False)


class Deliverer(ABC):
    """Subclasses say how: `_deliver` runs in the thread until `_is_closing`."""

    def __init__(
        self,
        fs: FileSystem,
        store: SpoolStore,
        spool_id: str,
        settings: Settings,
        waiting: Waiting,
        *,
        on_progress: Callable[[int], None] = lambda prefix: None,
        say: Callable[[str], None] = lambda line: None,
        make: Callable[[Settings], Any] = logged_producer,
    ) -> None:
        self._fs = fs
        self._store = store
        self.spool_id = spool_id
        self._id = spool_id.encode()
        self._settings = settings
        self._waiting = waiting
        self._on_progress = on_progress
        self._say_line = say
        self._make = make
        self._aside = RefusedMessages(fs, store.directory)
        self._written = read_progress(fs, store.directory)
        self._begin_at(self._written)
        self._save_due = 0.0
        self._failures: FailedItems = deque()
        """Reports of failures, not looked at yet."""
        self._to_set_aside: list[tuple[SpooledDelivery, Refused]] = []
        """Refused for good; the disk had no room for them yet."""
        self._aside_due = 0.0
        self._missing: dict[str, float] = {}
        """Topics that were there, and since when brokers have said that they are not."""
        self._ask_due = 0.0
        self._serving = threading.Lock()
        """Held by the thread of ours that hears reports or settles messages."""
        self.refused = Failures()
        self._refused_count = 0
        self.sends = 0
        """How many messages the application has sent; it counts them itself."""
        self.is_due = False
        """Whether the application shall give our thread a turn at its next message."""
        self._wake = Bell()
        self._closing = threading.Event()
        self.failure: DeliveryStopped | None = None
        """Why nothing more is delivered, once that is so."""
        self._thread = threading.Thread(target=self._run, name=f"holdfast-deliver-{spool_id}", daemon=True)

    def _begin_at(self, progress: Progress) -> None:
        # What the spool has let go of was done, whether or not the note of it came to be written.
        progress = merged(progress, Progress(self._store.start, decided(self._store.trimmed)))
        self._window = Window(progress)
        self._feed = Feed(self._store, progress, self._aside.ids(), self._waiting)

    def start(self) -> None:
        self._thread.start()

    def _say(self, line: str) -> None:
        self._say_line(f"spool {self.spool_id}: {line}")

    # From other threads

    def stored(self, group: StoredGroup) -> None:
        """A group is on disk: deliver it."""
        self._feed.add(group)
        self._wake.ring()

    def moved(self) -> None:
        """Undecided messages were moved or set aside: their originals are done."""
        self._wake.ring()

    def claim(self, place: int) -> SpooledDelivery | None:
        """The delivery of an undecided message, if somebody still holds it; see `Feed.claim`."""
        return self._feed.claim(place)

    def hurry(self) -> None:
        """Somebody waits for room: let go of what is done now, not when it is due."""
        self._save_due = 0.0
        self._wake.ring()

    def refuse_undecided(self, refused: Sequence[tuple[SpooledDelivery, Refused]]) -> None:
        """Set aside undecided messages; durable on return. The caller settles them when they are counted as moved."""
        self._aside.add([each for _, each in refused])

    def settle_undecided(self, refused: Sequence[tuple[SpooledDelivery, Refused]]) -> None:
        for item, each in refused:
            item.set_failed(_final_failure(each))
            self.refused.add(item)
        self._waiting.wake()

    def give_turn(self) -> None:
        """The application is sending, in this thread: it may let the thread that delivers do its work."""
        self.is_due = False

    @property
    def delivered(self) -> int:
        return self._window.done - self._refused_count

    @property
    def prefix(self) -> int:
        """Everything in front of this position is delivered or set aside."""
        return self._window.prefix

    @property
    def left(self) -> int:
        """How many messages are stored and neither delivered nor set aside."""
        return self._window.left(self._store.counters.copy())

    @property
    def is_empty(self) -> bool:
        return self._window.prefix >= self._store.end

    def wait_delivered(self, timeout: float | None) -> bool:
        """Wait until everything stored so far is delivered or set aside; raises when nothing more will be."""
        deadline = None if timeout is None else time.monotonic() + timeout
        had_undecided = self._store.has_undecided
        if not self._wait_through(self._store.end, timeout):
            return False
        if not had_undecided:
            return True
        # They have been written again, behind what was stored then.
        return self._wait_through(
            self._store.end, None if deadline is None else max(0.0, deadline - time.monotonic())
        )

    def _wait_through(self, end: int, timeout: float | None) -> bool:
        self._waiting.wait(lambda: self._window.prefix >= end or self.failure is not None, timeout)
        if self._window.prefix >= end:
            return True
        if self.failure is not None:
            raise self.failure
        return False

    def ask(self, topic: str, timeout: float) -> Answer:
        """Ask a broker about a topic, which may be made by the question."""
        try:
            found = self._metadata(topic, timeout)
        except KafkaException:
            return _UNHEARD
        if found is None:
            return _UNHEARD
        if found.error is None:
            return Answer(len(found.partitions) or None)
        code = found.error.code()
        if code in NO_TOPIC_CODES:
            return Answer(0)
        return Answer(None, found.error if code in _REFUSING_CODES else None)

    @abstractmethod
    def _metadata(self, topic: str, timeout: float) -> Any:
        """What the broker says of a topic; None when there is no producer to ask with."""

    def close(self) -> None:
        """Stop sending; what is not confirmed stays in the spool."""
        self._closing.set()
        self._wake.ring()
        self._thread.join()
        if self.failure is None:
            try:
                self._save(durably=True)
            except OSError as error:
                # It only lies behind the truth: what it does not know is sent again.
                self._say(f"how far it was delivered could not be written down: {error}")
        self._aside.close()

    # The thread

    def _run(self) -> None:
        with self._waiting.settling():
            try:
                self._deliver()
            except Exception as error:  # noqa: BLE001  whatever it is: nobody may wait for this thread any longer
                self._stop(error)
            finally:
                self._release()

    def _stop(self, error: Exception) -> None:
        reason = str(error) if isinstance(error, HoldfastError | OSError) else repr(error)
        stopped = DeliveryStopped(f"spool {self.spool_id}: nothing more is delivered: {reason}")
        stopped.__cause__ = error
        self.failure = stopped
        self._waiting.stop(stopped)
        self._say(f"nothing more is delivered: {reason}")

    @abstractmethod
    def _deliver(self) -> None: ...

    @abstractmethod
    def _release(self) -> None:
        """Let go of the producer."""

    def _rest(self) -> None:
        """Nothing to do: wait for more."""
        if not self._feed.has_more:
            self._wake.wait(IDLE_SECONDS)
        if self._window.advance(self._store.counters):
            self._waiting.wake()
        self._window.forget()

    # Topics that are gone

    def _note_missing(self, topic: str) -> None:
        self._missing.setdefault(topic, time.monotonic())

    def _gone_topics(self) -> list[str]:
        """Topics that brokers have said for long enough not to exist, while messages wait for them."""
        now = time.monotonic()
        if not self._missing or now < self._ask_due:
            return []
        self._ask_due = now + ASK_SECONDS
        gone = []
        held = {item.topic for item in self._to_send_again()}
        for topic, since in list(self._missing.items()):
            answer = self.ask(topic, ANSWER_SECONDS) if topic in held else None
            if answer is not None and not answer.is_heard:
                self._missing.clear()
                return []
            if answer is None or answer.partitions != 0:
                del self._missing[topic]
            elif now - since >= MISSING_SECONDS:
                gone.append(topic)
        return gone

    def _give_up(self, topics: Collection[str]) -> None:
        """Set aside what waits for these topics. Nothing of it may be under way."""
        refused = [
            (item, KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, f"no broker knows a topic {item.topic}"))
            for item in self._to_send_again()
            if item.topic in topics
        ]
        with self._serving:
            self._refuse(refused)
            self._window.advance(self._store.counters)

    # Set aside

    def _refuse(self, refused: Sequence[tuple[SpooledDelivery, KafkaError]]) -> None:
        """No attempt can succeed: keep the messages and the reasons, and let go of them. Needs `_serving`."""
        now_ms = time.time_ns() // 1_000_000
        waiting = {item for item, _ in self._to_set_aside}
        for item, error in refused:
            if not item.is_settled and item not in waiting:
                said = failure(error, item.topic, item.partition)
                self._to_set_aside.append((item, Refused(item.as_message(), said.code, said.reason, now_ms)))
        self._set_aside()

    def _to_send_again(self) -> list[SpooledDelivery]:
        """Everything that is not confirmed, in order."""
        waiting = {item for item, _ in self._to_set_aside}
        return [item for item in self._window.unsettled() if item not in waiting]

    def _set_aside(self) -> None:
        if not self._to_set_aside or time.monotonic() < self._aside_due:
            return
        try:
            self._aside.add([refused for _, refused in self._to_set_aside])
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self._say(f"no room to set refused messages aside; it is tried again: {error}")
            self._aside_due = time.monotonic() + PROGRESS_SECONDS
            return
        done, self._to_set_aside = self._to_set_aside, []
        self._refused_count += len(done)
        for item, refused in done:
            self._settle_refused(item, refused)
        self._waiting.wake()

    def _settle_refused(self, item: SpooledDelivery, refused: Refused) -> None:
        group = item.group
        assert group is not None, "a message is stored before it is sent"
        item.set_failed(_final_failure(refused))
        item.value = None
        group.left -= 1
        self.refused.add(item)

    # Progress

    def _save_when_due(self) -> None:
        now = time.monotonic()
        if now < self._save_due:
            return
        self._save_due = now + PROGRESS_SECONDS
        if self._to_set_aside:
            with self._serving:
                self._set_aside()
        try:
            self._save(durably=False)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            # Letting go of segments makes room; the note of it may come later.
            self._store.trim(self._window.prefix)
            self._on_progress(self._window.prefix)

    def _save(self, *, durably: bool) -> None:
        self._window.advance(self._store.counters)
        progress = self._window.progress()
        if progress != self._written or durably:
            write_progress(self._fs, self._store.directory, progress, durably=durably)
            self._written = progress
        self._window.forget()
        self._store.trim(progress.prefix)
        self._on_progress(progress.prefix)
        self._waiting.wake()


def _final_failure(refused: Refused) -> DeliveryFailed:
    message = refused.message
    return DeliveryFailed(
        refused.reason,
        code=refused.code,
        is_final=True,
        topic=message.topic,
        partition=message.partition if message.partition >= 0 else None,
    )

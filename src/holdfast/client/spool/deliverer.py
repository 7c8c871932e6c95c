"""What every way of delivering a spool has in common: where it stands, what waits, what it set aside, and how it ends.

One thread per spool delivers. What it has done is written down about once a second and at the end; the spool lets go of
the segments in front of it. Only what the spool's own cluster has confirmed is done: before it is written down, and
before the first message is sent, brokers are asked which cluster they are. At another one nothing is sent, and what was
confirmed since the last time counts as not delivered.

A message that can never be taken (too large, or not what its topic allows) is set aside, durably, before it is let go
of. When the disk has no room for that, it is tried again, and until then the spool keeps the message. Whatever may pass
with time waits (`topics`); only when waiting messages keep half of the spool's room from others, the oldest of them are
set aside. When the spool itself cannot be read, or the disk fails, delivering stops: whoever waits is told, and whoever
closes.

What librdkafka has to say becomes lines of Python's log under `holdfast.client.librdkafka`. It warns at every start of
a producer that a setting the spool rests on is experimental; that is the spool's business and not its user's, so this
one line is left out.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Producer

from holdfast.client.delivery import Bell, Waiting
from holdfast.client.errors import DeliveryStopped
from holdfast.client.settings import Settings
from holdfast.client.spool.feed import Feed
from holdfast.client.spool.format import UNDECIDED, SpooledMessage
from holdfast.client.spool.groups import SpooledDelivery, StoredGroup, Window
from holdfast.client.spool.identity import HomeCluster, IdentityFile
from holdfast.client.spool.progress import Notes, Progress, moved, stored
from holdfast.client.spool.refused import Refused
from holdfast.client.spool.set_aside import NO_TOPIC_CODES, REFUSED_CODES, TOPIC_CODES, SetAside
from holdfast.client.spool.store import NO_ROOM, SpoolStore
from holdfast.client.spool.topics import Place, SpoolTopics, name_of
from holdfast.errors import HoldfastError
from holdfast.seams import FileSystem

PROGRESS_SECONDS: Final = 1.0
IDLE_SECONDS: Final = 0.2
"""How long to rest when there is nothing to do, at most: what was moved or trimmed meanwhile is seen then."""
BROKEN_SECONDS: Final = 1.0
"""Between the end of a broken producer and the making of the next."""
PURGE_SECONDS: Final = 5.0
"""How long a broken producer may take to report on what it had under way."""
ANSWER_SECONDS: Final = 1.0
"""How long a broker may take to answer: closing waits for whoever asks."""
ROOM_SECONDS: Final = 60.0
"""Until room is made again, when there was none on disk to set messages aside."""


LOG = logging.getLogger("holdfast.client.librdkafka")
LOG.addFilter(
    lambda line: not ("CONFWARN" in line.getMessage() and "enable.gapless.guarantee" in line.getMessage())
)


def logged_producer(settings: Settings) -> Any:
    """A producer of confluent-kafka's that logs there; lines come when it is polled."""
    return Producer(settings, logger=LOG)


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
        topics: SpoolTopics,
        identity: IdentityFile,
        max_bytes: int,
        on_progress: Callable[[int], None] = lambda prefix: None,
        say: Callable[[str], None] = lambda line: None,
        make: Callable[[Settings], Any] = logged_producer,
    ) -> None:
        self._store = store
        self.spool_id = spool_id
        self._settings = settings
        self._waiting = waiting
        self._topics = topics
        self.home = HomeCluster(identity, settings.get("bootstrap.servers"), self.say)
        self._max_bytes = max_bytes
        self._on_progress = on_progress
        self._say_line = say
        self._make = make
        self.aside = SetAside(fs, store, self.say)
        self._passed_over = frozenset(self.aside.ids)
        """Those that are in no group of the window, since they were set aside before."""
        # What the spool has let go of was done, whether or not the note of it came to be written.
        counted = Progress(store.start, stored(store.trimmed) | moved(store.counters))
        self._notes = Notes(fs, store.directory, counted)
        self.window = Window(self._notes.progress)
        self._feed = Feed(store, self._notes.progress, self.aside.ids, waiting, topics)
        self._save_due = 0.0
        self._to_hold: dict[Place, str] = {}
        """What cannot take messages now, and why; to be held."""
        self._asking: Any = None
        """Answers questions about topics, also while there is no producer to send with."""
        self._room_due = 0.0
        self.sends = 0
        """How many messages the application has sent; it counts them itself."""
        self.is_due = False
        """Whether the application shall give our thread a turn at its next message."""
        self._wake = Bell()
        self._closing = threading.Event()
        self.failure: DeliveryStopped | None = None
        """Why nothing more is delivered, once that is so."""
        self._thread = threading.Thread(target=self._run, name=f"holdfast-deliver-{spool_id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def say(self, line: str) -> None:
        self._say_line(f"spool {self.spool_id}: {line}")

    # From other threads

    def stored(self, group: StoredGroup) -> None:
        """A group is on disk: deliver it."""
        self._feed.add(group)
        self._wake.ring()

    def stored_again(self, group: StoredGroup) -> None:
        """A group of what was set aside is on disk once more: deliver it."""
        self.aside.count -= len(group.items)
        self.stored(group)

    def hurry(self) -> None:
        """Somebody waits for room: let go of what is done now, not when it is due."""
        self._save_due = 0.0
        self._wake.ring()

    def give_turn(self) -> None:
        """The application is sending, in this thread: it may let the thread that delivers do its work."""
        self.is_due = False

    @property
    def delivered(self) -> int:
        return self.window.done - self.aside.refused_count

    @property
    def left(self) -> int:
        """How many messages are stored and neither delivered nor set aside."""
        confirmed = self.window.confirmed
        aside = sum(number >= confirmed.get((topic, line), 0) for topic, line, number in self._passed_over)
        return max(0, self.window.left(self._store.counters.copy()) - aside)

    @property
    def is_empty(self) -> bool:
        return self.window.prefix >= self._store.end

    def wait_delivered(self, timeout: float | None) -> bool:
        """Wait until everything stored so far is delivered or set aside; raises when nothing more will be."""
        return self._wait_through(self._store.end, timeout)

    def _wait_through(self, end: int, timeout: float | None) -> bool:
        self._waiting.wait(lambda: self.window.prefix >= end or self.failure is not None, timeout)
        if self.window.prefix >= end:
            return True
        if self.failure is not None:
            raise self.failure
        return False

    def ask(self, topic: str, timeout: float) -> Answer:
        """Ask a broker about a topic, which may be made by the question."""
        metadata = self._metadata_of_home(topic, timeout)
        if metadata is None:
            return _UNHEARD
        found = metadata.topics[topic]
        if found.error is None:
            return Answer(len(found.partitions) or None)
        code = found.error.code()
        if code in NO_TOPIC_CODES:
            return Answer(0)
        return Answer(None, found.error if code in REFUSED_CODES | TOPIC_CODES else None)

    def _metadata_of_home(self, topic: str | None, timeout: float) -> Any:
        """What brokers of the right cluster say; None when nobody does."""
        try:
            metadata = self._metadata(topic, timeout)
        except KafkaException:
            return None
        return metadata if metadata is not None and self.home.is_home(metadata.cluster_id) else None

    @abstractmethod
    def _metadata(self, topic: str | None, timeout: float) -> Any:
        """What the broker says of a topic, or of all, and of its cluster; None when there is nobody to ask with."""

    def close(self) -> None:
        """Stop sending; what is not confirmed stays in the spool."""
        self._closing.set()
        self._wake.ring()
        self._thread.join()
        self.aside.close()

    # The thread

    def _run(self) -> None:
        with self._waiting.settling():
            try:
                self._deliver()
            except Exception as error:  # noqa: BLE001  whatever it is: nobody may wait for this thread any longer
                self._stop(error)
            finally:
                self._release()
                self._save_at_end()

    def _stop(self, error: Exception) -> None:
        reason = str(error) if isinstance(error, HoldfastError | OSError) else repr(error)
        stopped = DeliveryStopped(f"spool {self.spool_id}: nothing more is delivered: {reason}")
        stopped.__cause__ = error
        self.failure = stopped
        self._waiting.stop(stopped)
        self.say(f"nothing more is delivered: {reason}")

    def _save_at_end(self) -> None:
        if self.failure is None:
            try:
                self._note_waiting()
                self._save_if_confirmed(durably=True)
            except OSError as error:
                # It only lies behind the truth: what it does not know is sent again.
                self.say(f"how far it was delivered could not be written down: {error}")
        self._asking = None

    @abstractmethod
    def _deliver(self) -> None: ...

    @abstractmethod
    def _release(self) -> None:
        """Let go of the producer."""

    def _rest(self) -> None:
        """Nothing to do: wait for more."""
        if not self._feed.has_more:
            self._wake.wait(IDLE_SECONDS)
        if self.window.advance():
            self._waiting.wake()
        self.window.forget()

    # The right cluster

    @property
    def reasons(self) -> list[str]:
        """Why messages wait, while brokers answer."""
        held = [f"{name_of(place)}: {reason}" for place, reason in list(self._topics.held.items())]
        return held if self.home.elsewhere is None else [self.home.elsewhere, *held]

    def _check_cluster(self) -> bool:
        """Ask brokers which cluster they are; whether they are the right one."""
        topic = next((topic for topic, _ in list(self._store.counters) if topic), None)
        metadata = self._metadata_of_home(topic, ANSWER_SECONDS)
        if metadata is None:
            return False
        self.home.expect(metadata.cluster_id)
        return True

    def _is_confirmed(self) -> bool:
        """Whether what was confirmed until now was confirmed by the right cluster."""
        return self._check_cluster()

    # What cannot be sent now

    def _look_at_held(self) -> tuple[list[Place], dict[str, KafkaError]]:
        """Which places take messages again, or may; and topics that never will, with the reason."""
        released: list[Place] = []
        hopeless: dict[str, KafkaError] = {}
        due = self._topics.due()
        for number, place in enumerate(due):
            topic, partition = place
            answer = self.ask(topic, ANSWER_SECONDS)
            if not answer.is_heard:
                self._topics.postpone(due[number:])
                break
            if answer.partitions:
                self._topics.learn(topic, answer.partitions)
            if answer.refusal is not None and answer.refusal.code() in REFUSED_CODES:
                hopeless[topic] = answer.refusal
            elif answer.refusal is not None:
                self._topics.hold_on(place, answer.refusal.str())
            elif answer.partitions is None:
                self._topics.postpone([place])
            elif not answer.partitions:
                self._topics.hold_on(place, f"no broker knows a topic {topic}")
            elif partition is not None and partition >= answer.partitions:
                self._topics.hold_on(place, f"{topic} has only {answer.partitions} partitions now")
            else:
                released.append(place)
        return released, hopeless

    def _rewind(self, progress: Progress | None = None) -> None:
        """Begin again at what is done: what is held is left out, what is not held any more comes along."""
        if progress is None:
            progress = self.window.progress()
        self._feed.rewind(progress, self.window.rewind(progress))
        self._passed_over = frozenset(self.aside.ids)

    def _hold_and_release(self, released: Sequence[Place], hopeless: Mapping[str, KafkaError]) -> None:
        """Begin again without what has to wait, and with what need not any longer. Nothing may be under way."""
        is_room_short = self._is_room_short()
        to_hold, self._to_hold = self._to_hold, {}
        for place, reason in to_hold.items():
            self._topics.hold(place, reason)
        for place in released:
            self._topics.release(place)
        self._rewind()
        for topic, error in hopeless.items():
            if self._give_up(partial(_is_for, topic), error.name(), error.str()):
                self._topics.release((topic, None))
        if is_room_short:
            self._make_room()

    def _is_room_short(self) -> bool:
        """Whether messages that wait keep the room of half a spool from others."""
        return (
            self.window.is_held_up()
            and self._store.end - self.window.prefix > self._max_bytes // 2
            and time.monotonic() >= self._room_due
        )

    def _make_room(self) -> None:
        """Set aside the oldest of what waits."""
        held = dict(self._topics.held)
        reasons = "; ".join(sorted(set(held.values())))
        is_done = self._give_up(
            lambda message: _is_held(message, held),
            "WAITED_TOO_LONG",
            f"the spool needed the room that it took while it waited: {reasons}",
            self.window.prefix + self._max_bytes // 4,
        )
        if not is_done:
            self._room_due = time.monotonic() + ROOM_SECONDS

    def _give_up(
        self, is_meant: Callable[[SpooledMessage], bool], code: str, reason: str, until: int | None = None
    ) -> bool:
        """Set aside stored messages that are held, right after a rewind; false when the disk has no room for all."""
        position, until = self.window.prefix, self._store.end if until is None else until
        now_ms = time.time_ns() // 1_000_000
        while position < until:
            groups, following = self._store.read(position)
            if following == position:
                break
            refused = [
                Refused(message, code, reason, now_ms)
                for group in groups
                for message in group.messages
                if is_meant(message) and not self._feed.is_done(message, group.position)
            ]
            if not self.aside.keep(refused):
                return False
            for each in refused:
                self.aside.settle(self._feed.claim(each.message), each)
            if refused:
                self.aside.tell(refused[-1])
                self._waiting.wake()
            position = following
        self._passed_over = frozenset(self.aside.ids)
        return True

    def _refuse(self, refused: Sequence[tuple[SpooledDelivery, KafkaError]]) -> None:
        """No attempt can succeed: set the messages aside."""
        self.aside.refuse(refused)
        self._waiting.wake()

    def _to_send_again(self) -> list[SpooledDelivery]:
        """Everything that is not confirmed, in order."""
        pending = self.aside.pending
        return [item for item in self.window.unsettled() if item not in pending]

    # Progress

    def _save_when_due(self) -> None:
        now = time.monotonic()
        if now < self._save_due:
            return
        self._save_due = now + PROGRESS_SECONDS
        self.aside.try_again()
        self._note_waiting()
        try:
            self._save_if_confirmed(durably=False)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            # Letting go of segments makes room; the note of it may come later.
            self._let_go(self.window.prefix)

    def _save_if_confirmed(self, *, durably: bool) -> None:
        self.window.advance()
        progress = self.window.progress()
        if progress != self._notes.progress:
            # At the end nobody may answer any more; those who confirmed it were the right ones a second ago.
            if (not self._is_confirmed() and not durably) or self.home.is_astray:
                return
            self.home.identity.note()
        if progress != self._notes.progress or durably:
            self._notes.write(progress, durably=durably)
        self.window.forget()
        self._let_go(progress.prefix)
        self._waiting.wake()

    def _let_go(self, prefix: int) -> None:
        self._store.trim(prefix)
        self._on_progress(prefix)

    def _note_waiting(self) -> None:
        """Have whoever looks at the spool from outside know what waits, and why."""
        places = self._topics.as_json()
        said = (
            json.dumps({"elsewhere": self.home.elsewhere, "held": places})
            if places or self.home.elsewhere
            else ""
        )
        try:
            self._notes.note_waiting(said)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise


def _is_for(topic: str, message: SpooledMessage) -> bool:
    return message.topic == topic


def _is_held(message: SpooledMessage, held: Collection[Place]) -> bool:
    if message.partition == UNDECIDED:
        return any(topic == message.topic for topic, _ in held)
    return (message.topic, None) in held or (message.topic, message.partition) in held

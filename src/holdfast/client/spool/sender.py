"""Sending through a spool: each message is stored, with its neighbours, and a thread delivers it.

`OpenSpool` is one spool with its threads: one stores, one delivers. `SpooledSender` has one of its own to write to, and
others, whose owners are dead, to deliver. A thread of its own looks after the rest: it keeps up with the partitions of
topics, adopts spools that lost their owner, and has refused messages sent again when somebody asks for it.

A home may serve producers of several clusters. A spool that was opened with another address is not gone on with, and it
is adopted only by who knows to be at its cluster.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaException

from holdfast.client.delivery import Bell, Seen, Waiting, seen_together
from holdfast.client.errors import ClientError, DeliveryStopped, LeftBehind
from holdfast.client.partitioner import Partitioner
from holdfast.client.settings import Settings
from holdfast.client.spool.deliverer import ANSWER_SECONDS, Deliverer, logged_producer
from holdfast.client.spool.format import RETRIED, DamagedSpool
from holdfast.client.spool.home import (
    AT_LEAST_ONCE,
    EXACTLY_ONCE,
    RETRY_FILE,
    DeliveryMode,
    OwnedSpool,
    SpoolHome,
    note_delivery_mode,
    read_delivery_mode,
)
from holdfast.client.spool.idempotent import IdempotentDeliverer
from holdfast.client.spool.identity import Identity, IdentityFile, draw_opening, read_identity
from holdfast.client.spool.progress import read_progress
from holdfast.client.spool.refused import RefusedMessages
from holdfast.client.spool.store import SEGMENT_BYTES, SpoolStore
from holdfast.client.spool.topics import SpoolTopics, TopicLayout
from holdfast.client.spool.writer import SpoolWriter
from holdfast.errors import HoldfastError, StorageError
from holdfast.seams import FileSystem, Randomness

LOOK_AFTER_SECONDS: Final = 1.0
NOTED_MAX: Final = 4000
"""An hour by the second; with more, every other one is enough."""
REFRESH_SECONDS: Final = 300.0
"""Between two questions about topics that are known: partitions may be added."""
ADOPT_SECONDS: Final = 10.0
ADOPTED_MAX: Final = 4
"""How many spools of the dead are delivered at a time; each needs a producer of its own."""
LEFT_SECONDS: Final = 300.0
"""How long a spool of the dead is left alone that could not be opened or delivered."""
ASK_AGAIN_SECONDS: Final = 0.05
UNBOUNDED: Final = 1 << 62
"""The bound of a spool that nobody writes to: what waits there takes room from nobody."""
SEGMENTS_MIN: Final = 8
"""A bounded spool has at least so many segments: room is made one at a time."""


class Tools(NamedTuple):
    """What every spool of a home is opened with."""

    fs: FileSystem
    home: SpoolHome
    layout: TopicLayout
    randomness: Randomness
    settings: Settings
    mode: DeliveryMode
    say: Callable[[str], None]
    make: Callable[[Settings], Any]

    @property
    def address(self) -> str:
        return str(self.settings["bootstrap.servers"])


class OpenSpool:
    """One spool of which this process is the owner, with the threads that store and deliver."""

    def __init__(self, tools: Tools, owned: OwnedSpool, waiting: Waiting, max_bytes: int) -> None:
        self._tools = tools
        self.owned = owned
        segment_bytes = max(1, min(SEGMENT_BYTES, max_bytes // SEGMENTS_MIN))
        opening = draw_opening(tools.randomness)
        self.identity = IdentityFile(tools.fs, owned.directory, tools.address, opening)
        self.store = SpoolStore(
            tools.fs, owned.directory, segment_bytes=segment_bytes, opening=opening, say=tools.say
        )
        partitioner = Partitioner(tools.mode.partitioner, tools.randomness)
        self.topics = SpoolTopics(tools.layout, partitioner, lambda line: self.deliverer.say(line), self._ask)
        self.deliverer = self._make_deliverer(waiting, max_bytes)
        self.writer = SpoolWriter(self.store, max_bytes, waiting, partitioner, self.topics, self.deliverer)
        try:
            note_delivery_mode(tools.fs, owned.directory, tools.mode)
            self.identity.note()
        except OSError as error:
            tools.say(f"{owned.directory}: how it is delivered could not be noted: {error}")
        self.writer.progressed(self.deliverer.window.prefix)
        self.writer.start()
        self.deliverer.start()

    def _make_deliverer(self, waiting: Waiting, max_bytes: int) -> Deliverer:
        tools = self._tools
        kind: Callable[..., Deliverer] = IdempotentDeliverer
        if tools.mode.delivery == EXACTLY_ONCE:
            from holdfast.client.spool.transactional import TransactionalDeliverer

            kind = TransactionalDeliverer
        return kind(
            tools.fs,
            self.store,
            self.owned.id,
            tools.settings,
            waiting,
            topics=self.topics,
            identity=self.identity,
            max_bytes=max_bytes,
            on_progress=lambda prefix: self.writer.progressed(prefix),
            say=tools.say,
            make=tools.make,
        )

    def _ask(self, topic: str, timeout: float) -> int | None:
        """How many partitions a topic has, if a broker says so in time; a topic may be made by the question."""
        deadline = time.monotonic() + timeout
        while True:
            count = self.deliverer.ask(topic, max(0.01, deadline - time.monotonic())).partitions
            if count:
                self.topics.learn(topic, count)
                return count
            if count is None or time.monotonic() + ASK_AGAIN_SECONDS >= deadline:
                return None
            time.sleep(ASK_AGAIN_SECONDS)

    def retry_refused(self) -> None:
        """Send once more what was set aside until now."""
        self.writer.retry(RefusedMessages(self._tools.fs, self.owned.directory))

    def retry_if_asked(self) -> None:
        """As `retry_refused`, if somebody has left a note that asks for it."""
        path = f"{self.owned.directory}/{RETRY_FILE}"
        if self._tools.fs.exists(path):
            self.retry_refused()
            self._tools.fs.remove(path)

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing left to deliver."""
        return self.deliverer.is_empty and self.deliverer.failure is None

    def orphan(self) -> None:
        """In a forked child: the spool is the parent's, and so is the lock on it, once the child has let go of it."""
        self.owned.lock.release()

    def close(self) -> None:
        """End, and leave what is not delivered to the next owner."""
        self.writer.close()
        self.deliverer.close()
        self.store.close()


def is_delivered(fs: FileSystem, directory: str) -> bool:
    """Whether a spool that nobody uses holds nothing that is still to be sent; false when it cannot be said."""
    try:
        store = SpoolStore(fs, directory)
    except DamagedSpool:
        return False
    store.close()
    return read_progress(fs, directory).prefix >= store.end


def has_refused(fs: FileSystem, directory: str) -> bool:
    """Whether a spool that nobody uses keeps messages that were set aside and not stored again since."""
    store = SpoolStore(fs, directory)
    store.close()
    return any(True for _ in islice(RefusedMessages(fs, directory), store.counters.get(RETRIED, 0), None))


def remove_or_release(fs: FileSystem, home: SpoolHome, owned: OwnedSpool) -> None:
    """Let go of a delivered spool of the dead: it goes when nothing in it is of use to anybody."""
    if has_refused(fs, owned.directory):
        owned.lock.release()
    else:
        home.remove(owned)


@contextmanager
def _released_on_failure(owned: OwnedSpool) -> Iterator[OwnedSpool]:
    """A spool that nothing came of is not kept from others."""
    try:
        yield owned
    except BaseException:
        owned.lock.release()
        raise


class SpooledSender:
    def __init__(
        self,
        fs: FileSystem,
        home_path: str,
        randomness: Randomness,
        settings: Settings,
        max_bytes: int,
        *,
        partitioner: str = "murmur2_random",
        is_exactly_once: bool = False,
        say: Callable[[str], None] = lambda line: None,
        make: Callable[[Settings], Any] = logged_producer,
    ) -> None:
        self._fs = fs
        self._say = say
        self._home = SpoolHome(fs, home_path, randomness)
        self._home.make()
        self._tools = Tools(
            fs,
            self._home,
            TopicLayout(fs, home_path, str(settings["bootstrap.servers"]), say),
            randomness,
            settings,
            DeliveryMode(EXACTLY_ONCE if is_exactly_once else AT_LEAST_ONCE, partitioner),
            say,
            make,
        )
        self._max_bytes = max_bytes
        self._waiting = Waiting()
        self._is_closing = False
        self._end = Bell()
        self._left: LeftBehind | None = None
        """What was left behind, once everything has ended."""
        self._stored_by: deque[tuple[int, float]] = deque()
        """Positions in our own spool and when everything below was there, one a second while it grows."""
        self._left_behind: dict[str, float] = {}
        """Spools that could not be opened or delivered, and when they are looked at again."""
        self._own = self._open_own()
        self.send = self._own.writer.send
        self._adopted: list[OpenSpool] = []
        try:
            self._adopt()
        except (HoldfastError, OSError) as error:
            say(f"{home_path}: {error}")
        self._housekeeper = threading.Thread(target=self._look_after, name="holdfast-spools", daemon=True)
        self._housekeeper.start()

    def _open_own(self) -> OpenSpool:
        """The first spool of a dead owner that can be opened and gone on with in our mode, or a new one."""
        self._home.sweep()
        for spool_id in self._home.ids():
            try:
                spool = self._take_over(spool_id)
            except (StorageError, OSError) as error:
                self._leave(spool_id, error)
                continue
            if spool is not None:
                return spool
        with _released_on_failure(self._home.create()) as owned:
            return OpenSpool(self._tools, owned, self._waiting, self._max_bytes)

    def _take_over(self, spool_id: str) -> OpenSpool | None:
        """The spool as our own; None when it has an owner, is another's, or is delivered in another mode."""
        owned = self._home.take(spool_id)
        if owned is None:
            return None
        with _released_on_failure(owned):
            is_ours = read_delivery_mode(self._fs, owned.directory) == self._tools.mode
            address = read_identity(self._fs, owned.directory).bootstrap_servers
            if address in (None, self._tools.address) and (
                is_ours or is_delivered(self._fs, owned.directory)
            ):
                return OpenSpool(self._tools, owned, self._waiting, self._max_bytes)
        owned.lock.release()
        return None

    def _leave(self, spool_id: str, problem: Exception) -> None:
        """Whoever sends now must not suffer for it, and what it holds must not be forgotten."""
        self._left_behind[spool_id] = time.monotonic() + LEFT_SECONDS
        self._say(f"spool {spool_id} is left alone for now: {problem}")

    @property
    def id(self) -> str:
        return self._own.owned.id

    # Looking after the rest

    def _look_after(self) -> None:
        now = time.monotonic()
        adopt_due, refresh_due = now + ADOPT_SECONDS, now + REFRESH_SECONDS
        while not self._end.wait(LOOK_AFTER_SECONDS) and not self._is_closing:
            now = time.monotonic()
            self._note_age(now)
            try:
                for spool in (self._own, *self._adopted):
                    spool.retry_if_asked()
                if now >= adopt_due:
                    adopt_due = now + ADOPT_SECONDS
                    self._let_go_of_ended()
                    self._adopt()
                if now >= refresh_due:
                    refresh_due = now + REFRESH_SECONDS
                    self._refresh()
            except (HoldfastError, OSError, KafkaException) as error:
                self._say(f"{self._home.path}: {error}")
        try:
            self._left = self._close_all()
        except BaseException as error:
            # Whoever closes must not wait for ever; what is stored stays stored.
            refused = self.seen_refused()
            self._left = LeftBehind(refused.named, refused.total, f"{self._home.path}: {error!r}")
            raise
        finally:
            self._waiting.wake()

    def _note_age(self, now: float) -> None:
        noted, end = self._stored_by, self._own.store.end
        while noted and noted[0][0] <= self._own.deliverer.window.prefix:
            noted.popleft()
        if end > (noted[-1][0] if noted else self._own.deliverer.window.prefix):
            noted.append((end, now))
        if len(noted) > NOTED_MAX:
            self._stored_by = deque(islice(noted, 0, None, 2))

    def numbers(self) -> dict[str, float]:
        """For `metrics`."""
        spools = (self._own, *list(self._adopted))
        prefix = self._own.deliverer.window.prefix
        oldest = next((at for end, at in list(self._stored_by) if end > prefix), None)
        return {
            "holdfast_producer_delivered_total": self.delivered,
            "holdfast_producer_refused_total": sum(each.deliverer.aside.refused_count for each in spools),
            "holdfast_producer_under_way": self.left,
            "holdfast_spool_messages": sum(each.deliverer.left for each in spools),
            "holdfast_spool_bytes": sum(each.store.end - each.deliverer.window.prefix for each in spools),
            "holdfast_spool_oldest_seconds": 0.0 if oldest is None else time.monotonic() - oldest,
            "holdfast_spool_set_aside_messages": self.set_aside,
            "holdfast_spool_waiting_causes": len(self.waiting),
        }

    def _refresh(self) -> None:
        """Partitions may have been added; new messages go there too."""
        for topic in self._tools.layout.topics():
            if self._is_closing:
                return
            answer = self._own.deliverer.ask(topic, ANSWER_SECONDS)
            if not answer.is_heard:
                return
            if answer.partitions:
                self._own.topics.learn(topic, answer.partitions)

    def _adopt(self) -> None:
        for spool_id in self._home.ids():
            if len(self._adopted) >= ADOPTED_MAX:
                return
            if time.monotonic() < self._left_behind.get(spool_id, 0.0):
                continue
            try:
                self._adopt_one(spool_id)
            except (HoldfastError, OSError, KafkaException) as error:
                self._leave(spool_id, error)

    def _adopt_one(self, spool_id: str) -> None:
        owned = self._home.take(spool_id)
        if owned is None:
            return
        with _released_on_failure(owned):
            if is_delivered(self._fs, owned.directory):
                remove_or_release(self._fs, self._home, owned)
                return
            if not self._is_for_us(read_identity(self._fs, owned.directory)):
                owned.lock.release()
                return
            # What its owner began goes on in its owner's way.
            tools = self._tools._replace(mode=read_delivery_mode(self._fs, owned.directory))
            self._adopted.append(OpenSpool(tools, owned, Waiting(), UNBOUNDED))
        self._say(f"spool {owned.id}: its owner is gone; delivering what it left")

    def _is_for_us(self, identity: Identity) -> bool:
        """Whether a spool is for the cluster that we send to; raises when nobody can tell."""
        cluster_id = self._own.identity.now.cluster_id
        if identity.bootstrap_servers in (None, self._tools.address):
            # At another cluster it would wait.
            return True
        if cluster_id is not None and identity.cluster_id is None:
            raise StorageError(
                f"it was opened for the brokers at {identity.bootstrap_servers}, and no cluster has taken a message "
                "from it yet. `holdfast spool drain --bootstrap-server` delivers it to the cluster you name"
            )
        return cluster_id is not None and identity.cluster_id == cluster_id

    def _let_go_of_ended(self) -> None:
        """Of what is delivered for good, and of what will not be delivered here: others may fare better with it."""
        for spool in list(self._adopted):
            failure = spool.deliverer.failure
            if failure is not None:
                self._leave(spool.owned.id, failure)
            elif not spool.is_finished:
                continue
            self._adopted.remove(spool)
            self._end_adopted(spool)

    def _end_adopted(self, spool: OpenSpool) -> None:
        try:
            spool.close()
            if spool.is_finished:
                remove_or_release(self._fs, self._home, spool.owned)
        except OSError as error:
            self._leave(spool.owned.id, error)
        finally:
            spool.owned.lock.release()

    # Ending

    @property
    def delivered(self) -> int:
        return self._own.deliverer.delivered

    def seen_refused(self) -> Seen:
        own = self._own
        adopted = [spool.deliverer.aside.failures for spool in self._adopted]
        return seen_together([own.writer.failures, own.deliverer.aside.failures, *adopted])

    @property
    def set_aside(self) -> int:
        """How many messages are set aside in the spools that are open here: refused, and not delivered."""
        return sum(spool.deliverer.aside.count for spool in (self._own, *list(self._adopted)))

    @property
    def waiting(self) -> list[str]:
        """Why messages wait that are stored, while brokers answer: one line for each cause."""
        return [line for spool in (self._own, *list(self._adopted)) for line in spool.deliverer.reasons]

    @property
    def left(self) -> int:
        spools = (self._own, *list(self._adopted))
        return self._own.writer.unstored + sum(spool.deliverer.left for spool in spools)

    def flush(self, timeout: float | None) -> int:
        """Wait until everything is delivered; returns how many messages are not."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._own.writer.wait_stored(timeout)
        adopted = list(self._adopted)
        for spool in (self._own, *adopted):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if spool is self._own or spool.deliverer.failure is None:
                spool.deliverer.wait_delivered(left)
        return self.left

    def close(self) -> LeftBehind:
        """End; may be called again, by a signal handler too, and then says the same."""
        self._is_closing = True
        self._end.ring()
        self._waiting.wait(lambda: self._left is not None, None)
        assert self._left is not None
        return self._left

    def check_thread(self) -> None:
        self._waiting.check_thread()

    def orphan(self, why: ClientError) -> None:
        self._waiting.orphaned = why
        for spool in (self._own, *self._adopted):
            spool.orphan()

    def _close_all(self) -> LeftBehind:
        """In our thread, which nobody interrupts."""
        self._own.close()
        for spool in self._adopted:
            self._end_adopted(spool)
        refused = self.seen_refused()
        left = self._own.deliverer.left
        self._waiting.stop(
            DeliveryStopped("the producer was closed before the message was delivered; the spool keeps it")
        )
        # Our own stays, empty or not: the next process that opens the home goes on with it, and with its id.
        self._own.owned.lock.release()
        line = None
        if left:
            line = (
                f"{left} message{'' if left == 1 else 's'} in {self._home.path} {'is' if left == 1 else 'are'} stored "
                "and not delivered yet: the next producer with this spool delivers them, or `holdfast spool drain`"
            )
        return LeftBehind(refused.named, refused.total, line)

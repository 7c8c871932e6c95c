"""What is on its way to the broker: groups in the order of the spool, and how far all of them have arrived.

Confirmations come in any order. The spool can let go of its beginning only up to the first group that is not done:
`prefix`. Behind it, each partition has a prefix of its own: the sequence of its first message that is not done. With
both, a process that takes over sends nothing again but what nobody knows to have arrived, and one stuck partition does
not make the others' messages be sent twice.

One thread sends, which adds; another may hear reports, which lets go: the lock is taken once for a group. Only threads
of ours take it; the application, which a signal may interrupt anywhere, looks without it (`_steady`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from time import sleep

from holdfast.client.spool.format import PartitionKey
from holdfast.client.spool.groups import SpooledDelivery, StoredGroup
from holdfast.client.spool.progress import Progress, messages_left


class Window:
    def __init__(self, progress: Progress) -> None:
        self.prefix = progress.prefix
        """Every message in front of this position is done."""
        self._confirmed = dict(progress.confirmed)
        """For each partition the sequence up to which all is done, but for what groups here say."""
        self._lock = Lock()
        self._version = 0
        """Odd while groups are being added or let go of."""
        self._groups: deque[StoredGroup] = deque()
        self.bytes = 0
        """About how much of messages that are not done is in memory."""
        self.messages = 0
        """How many messages are in groups that are not done; see `recount`."""
        self._gone = 0
        """How many messages were done in groups that have been let go of."""
        self._let_go: deque[list[SpooledDelivery]] = deque()
        """Their messages; see `forget`."""

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def confirmed(self) -> Mapping[PartitionKey, int]:
        return self._confirmed

    @property
    def done(self) -> int:
        """How many messages are done, delivered or set aside, of those that were sent from here."""
        return self._steady(lambda: self._gone + self._done_here())

    def _done_here(self) -> int:
        return sum(group.count - group.left for group in self._groups.copy())

    def _steady(self, look: Callable[[], int]) -> int:
        """What is seen while nothing is added or let go of."""
        while True:
            version = self._version
            if not version & 1:
                try:
                    seen = look()
                except RuntimeError:
                    # Changed while it was looked at.
                    continue
                if version == self._version:
                    return seen
            sleep(0)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            self._version += 1
            try:
                yield
            finally:
                self._version += 1

    def add(self, group: StoredGroup) -> None:
        """The group, next in the spool, is being sent."""
        with self._changing():
            last = self._groups[-1] if self._groups else None
            if last is not None and not group.left and not last.left:
                last.absorb(group)
                return
            self.bytes += group.bytes
            self.messages += group.left
            self._groups.append(group)

    def advance(self) -> bool:
        """Let go of what is done; whether that was anything."""
        if not self._groups or self._groups[0].left:
            return False
        with self._changing():
            before = self.prefix
            while self._groups and self._groups[0].is_done:
                first = self._groups.popleft()
                # Messages and their group know each other: without this, only the cycle collector would free them.
                self._let_go.append(first.items)
                first.items = []
                self._gone += first.count
                self.bytes -= first.bytes
                self.messages -= min(first.count, self.messages)
                _raise(self._confirmed, first.following)
                self.prefix = first.end
            return self.prefix != before

    def forget(self, count: int | None = None) -> None:
        """Forget messages of groups that were let go of, all of them or about so many.

        Python's cycle collector goes by how many more objects were made than freed. While an application sends, as
        many messages are freed as it makes, and the collector need not look at those that are under way.
        """
        while self._let_go and (count is None or count > 0):
            try:
                items = self._let_go[0]
                if count is not None and len(items) > count:
                    del items[-count:]
                    return
                self._let_go.popleft()
            except IndexError:
                # Another thread forgets, too.
                return
            if count is not None:
                count -= len(items)

    def recount(self) -> None:
        """Count only what is really left: in one group, some may be done and others wait for long."""
        with self._lock:
            self._recount()

    def _recount(self) -> None:
        self.bytes = self.messages = 0
        for group in self._groups:
            self.messages += group.left
            self.bytes += group.bytes * group.left // max(1, len(group.items))

    def progress(self) -> Progress:
        """How far everything is; keeps in memory only what is still needed."""
        stuck: dict[PartitionKey, int] = {}
        with self._lock:
            confirmed = dict(self._confirmed)
            for group in self._groups:
                group.forget_settled()
                for item in group.items:
                    stuck.setdefault(item.where, item.sequence)
                following = group.following.items()
                _raise(confirmed, {where: after for where, after in following if where not in stuck})
            self._recount()
            _raise(confirmed, stuck)
            return Progress(self.prefix, confirmed)

    def progress_with(self, done: Collection[SpooledDelivery]) -> Progress:
        """How far everything will be when these messages are done too."""
        stuck: dict[PartitionKey, int] = {}
        with self._lock:
            confirmed = dict(self._confirmed)
            prefix = self.prefix
            is_whole = True
            for group in self._groups:
                left = [item for item in group.items if not item.is_settled and item not in done]
                for item in left:
                    stuck.setdefault(item.where, item.sequence)
                following = group.following.items()
                _raise(confirmed, {where: after for where, after in following if where not in stuck})
                is_whole = is_whole and not left and not group.held
                if is_whole:
                    prefix = group.end
            _raise(confirmed, stuck)
            return Progress(prefix, confirmed)

    def is_held_up(self) -> bool:
        """Whether all that keeps the spool from letting go of its beginning are messages that wait for their topics."""
        with self._lock:
            return bool(self._groups) and not self._groups[0].left and self._groups[0].held > 0

    def rewind(self, progress: Progress) -> list[SpooledDelivery]:
        """Begin again at this progress, with nothing under way; returns what is not known to have arrived."""
        with self._changing():
            unsettled = [item for group in self._groups for item in group.items if not item.is_settled]
            self._gone += sum(group.count - group.left for group in self._groups)
            self._groups.clear()
            self.bytes = self.messages = 0
            self.prefix, self._confirmed = progress.prefix, dict(progress.confirmed)
            return unsettled

    def left(self, counters: Mapping[PartitionKey, int]) -> int:
        """How many messages of those counted are not done."""
        return self._steady(lambda: max(0, messages_left(counters, self._confirmed) - self._done_here()))

    def unsettled(self) -> list[SpooledDelivery]:
        """Every message that is not known to have arrived, in order."""
        with self._lock:
            return [item for group in self._groups for item in group.items if not item.is_settled]


def _raise(counters: dict[PartitionKey, int], following: Mapping[PartitionKey, int]) -> None:
    for where, after in following.items():
        if after > counters.get(where, 0):
            counters[where] = after

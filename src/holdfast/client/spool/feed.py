"""What is to be sent next: groups in the spool's order, from memory while sending keeps up, from disk when not.

Memory is bounded: so many bytes of fresh groups are kept, the rest are on disk alone. The deliveries of those are found
again by what names their message, as long as somebody holds them; one that nobody holds is not kept.

Groups come out whole and in order, from the position given at the beginning; messages that are known to be done are
left out, and so are those whose topic or partition takes none now (`topics`): their group counts them as held. When it
takes messages again, `rewind` begins anew at what is done. The thread that writes adds, and one at a time takes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Set
from typing import Final
from weakref import WeakValueDictionary

from holdfast.client.delivery import Waiting
from holdfast.client.spool.format import Group, SpooledMessage, counters_of
from holdfast.client.spool.groups import SpooledDelivery, StoredGroup, make_item
from holdfast.client.spool.progress import Progress, stored
from holdfast.client.spool.store import SpoolStore
from holdfast.client.spool.topics import SpoolTopics

FRESH_BYTES_MAX: Final = 16 * 1024 * 1024


class Feed:
    def __init__(
        self,
        store: SpoolStore,
        progress: Progress,
        aside: Set[tuple[str, int, int]],
        waiting: Waiting,
        topics: SpoolTopics,
        *,
        fresh_bytes_max: int = FRESH_BYTES_MAX,
    ) -> None:
        self._store = store
        self._confirmed = progress.confirmed
        self._aside = aside
        """Topic, partition and sequence of messages that were set aside; it grows."""
        self._waiting = waiting
        self._topics = topics
        self._fresh_bytes_max = fresh_bytes_max
        self._lock = threading.Lock()
        self._next = progress.prefix
        self._end = self._resumed_end = store.end
        """Up to here everything was handed over; what the disk shows behind it is not this object's yet."""
        self._fresh: deque[StoredGroup] = deque()
        self.fresh_bytes = 0
        self._prepared: StoredGroup | None = None
        self._held: WeakValueDictionary[tuple[str, int, int], SpooledDelivery] = WeakValueDictionary()
        """Deliveries of messages that are on disk alone, by topic, partition and sequence."""

    def rewind(self, progress: Progress, unsettled: Iterable[SpooledDelivery]) -> None:
        """Begin again at this progress: what was taken and is not done comes again, from disk."""
        with self._lock:
            self._hold(unsettled)
            if self._prepared is not None:
                self._hold(self._prepared.items)
                self._prepared = None
            for group in self._fresh:
                self._hold(group.items)
            self._fresh.clear()
            self.fresh_bytes = 0
            self._confirmed = progress.confirmed
            self._next = progress.prefix
            self._resumed_end = self._end

    def add(self, group: StoredGroup) -> None:
        """A group is on disk and shall be sent."""
        with self._lock:
            if self.fresh_bytes + group.bytes <= self._fresh_bytes_max:
                group.count = group.left = len(group.items)
                self._fresh.append(group)
                self.fresh_bytes += group.bytes
            else:
                self._hold(group.items)
                group.items = []
            # Only now may the disk be looked at: whoever wants to hear of a message can be found.
            self._end = group.end

    def _hold(self, items: Iterable[SpooledDelivery]) -> None:
        """Let go of messages that will come back from disk."""
        for item in items:
            item.spill()
            self._held[(*item.where, item.sequence)] = item

    def claim(self, message: SpooledMessage) -> SpooledDelivery:
        """The delivery of a message that is on disk alone; a new one when nobody holds it."""
        item = self._held.pop((message.topic, message.partition, message.sequence), None)
        if item is None:
            return make_item(message, self._waiting)
        item.refill(message)
        return item

    @property
    def has_more(self) -> bool:
        with self._lock:
            return self._prepared is not None or self._next < self._end

    def prepare(self) -> None:
        """Read from disk what comes next, unless it is in memory already."""
        if self._prepared is None:
            self._prepared = self._take(from_disk=True)

    def take(self, *, from_disk: bool) -> StoredGroup | None:
        """The next group; None when there is none, or none in memory."""
        group, self._prepared = self._prepared, None
        if group is None:
            group = self._take(from_disk=from_disk)
        if group is not None and (self._topics.held or any(line < 0 for _, line in group.following)):
            self._hold_back(group)
        return group

    def _take(self, *, from_disk: bool) -> StoredGroup | None:
        with self._lock:
            if self._fresh and self._fresh[0].start == self._next:
                group = self._fresh.popleft()
                self.fresh_bytes -= group.bytes
                self._next = group.end
                return group
            until = self._fresh[0].start if self._fresh else self._end
        if not from_disk or self._next >= until:
            return None
        groups, following = self._store.read(self._next, until=until)
        assembled = self._assemble(groups, self._next, following)
        self._next = following
        return assembled

    def _hold_back(self, group: StoredGroup) -> None:
        """Give undecided messages their partitions, and leave out those that cannot be sent now."""
        sent: list[SpooledDelivery] = []
        held: list[SpooledDelivery] = []
        for item in group.items:
            (sent if self._topics.decide(item) else held).append(item)
        if not held:
            return
        lines = {item.where for item in held}
        with self._lock:
            self._hold(held)
        group.bytes = group.bytes * len(sent) // len(group.items)
        group.items, group.held = sent, len(held)
        group.count = group.left = len(sent)
        group.following = {where: after for where, after in group.following.items() if where not in lines}

    def _assemble(self, groups: list[Group], start: int, end: int) -> StoredGroup:
        """What was read from disk, as one group."""
        whole = StoredGroup()
        whole.start, whole.position, whole.end = start, start, end
        whole.bytes = end - start
        whole.is_stored = True
        whole.opening = self._store.opening_at(start)
        # When nobody holds any, nobody needs to be looked for: whatever can be read has been noted before.
        is_any_held = len(self._held) > 0
        for group in groups:
            whole.following.update(stored(counters_of(group)))
            for message in group.messages:
                if not self.is_done(message, group.position):
                    item = self.claim(message) if is_any_held else make_item(message, self._waiting)
                    item.group = whole
                    whole.items.append(item)
        whole.count = whole.left = len(whole.items)
        return whole

    def is_done(self, message: SpooledMessage, position: int) -> bool:
        """Whether a message of a group that stands there was delivered or set aside."""
        if position >= self._resumed_end:
            return False
        confirmed = self._confirmed.get((message.topic, message.partition), 0)
        return (
            message.sequence < confirmed
            or (message.topic, message.partition, message.sequence) in self._aside
        )

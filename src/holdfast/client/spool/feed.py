"""What is to be sent next: groups in the spool's order, from memory while sending keeps up, from disk when not.

Memory is bounded: so many bytes of fresh groups are kept, the rest are on disk alone. The deliveries of those are found
again by the place of their message, as long as somebody holds them; one that nobody holds is not kept.

Groups come out whole and in order, from the position given at the beginning; messages that are known to be done, from
an earlier process, and undecided ones are left out. The thread that writes adds, and one at a time takes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Mapping
from typing import Final
from weakref import WeakValueDictionary

from holdfast.client.delivery import Waiting
from holdfast.client.spool.format import UNDECIDED, Group, Message, PartitionKey, counters_of
from holdfast.client.spool.groups import SpooledDelivery, StoredGroup, make_item
from holdfast.client.spool.progress import Progress
from holdfast.client.spool.store import SpoolStore

FRESH_BYTES_MAX: Final = 16 * 1024 * 1024


class Feed:
    def __init__(
        self,
        store: SpoolStore,
        progress: Progress,
        aside: Collection[tuple[str, int, int]],
        waiting: Waiting,
        *,
        fresh_bytes_max: int = FRESH_BYTES_MAX,
    ) -> None:
        self._store = store
        self._confirmed = progress.confirmed
        self._aside = frozenset(aside)
        """Topic, partition and sequence of messages that were set aside."""
        self._waiting = waiting
        self._fresh_bytes_max = fresh_bytes_max
        self._lock = threading.Lock()
        self._next = progress.prefix
        self._end = self._resumed_end = store.end
        """Up to here everything was handed over; what the disk shows behind it is not this object's yet."""
        self._fresh: deque[StoredGroup] = deque()
        self.fresh_bytes = 0
        self._prepared: StoredGroup | None = None
        self._held: WeakValueDictionary[int, SpooledDelivery] = WeakValueDictionary()
        """Deliveries of messages that are on disk alone: by the position of their group, plus their number in it."""

    def resume(self, progress: Progress) -> None:
        """More was done by earlier processes than was known at the beginning. Nothing may have been taken yet."""
        self._confirmed = progress.confirmed
        with self._lock:
            self._next = max(self._next, progress.prefix)

    def add(self, group: StoredGroup) -> None:
        """A group is on disk and shall be sent."""
        with self._lock:
            fits = self.fresh_bytes + group.bytes <= self._fresh_bytes_max
        if not fits:
            self._hold(group, undecided_only=False)
        elif any(partition == UNDECIDED for _, partition in group.following):
            self._hold(group, undecided_only=True)
        group.count = group.left = len(group.items)
        # Only now may the disk be looked at: whoever wants to hear of a message has its place.
        with self._lock:
            self._end = group.end
            if fits:
                self._fresh.append(group)
                self.fresh_bytes += group.bytes

    def _hold(self, group: StoredGroup, *, undecided_only: bool) -> None:
        """Let go of messages that will come back from disk."""
        kept = []
        for number, item in enumerate(group.items):
            if undecided_only and item.partition is not None:
                kept.append(item)
            else:
                item.spill()
                self._held[group.position + number] = item
        group.bytes = group.bytes * len(kept) // max(1, len(group.items))
        group.items = kept
        group.following, group.undecided = split_counters(group.following)

    def claim(self, place: int) -> SpooledDelivery | None:
        """The delivery of the message at this place, if somebody still holds it."""
        return self._held.get(place)

    @property
    def position(self) -> int:
        """Where the group starts that comes next."""
        return self._next

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
        return group if group is not None else self._take(from_disk=from_disk)

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

    def _assemble(self, groups: list[Group], start: int, end: int) -> StoredGroup:
        """What was read from disk, as one group."""
        whole = StoredGroup()
        whole.start, whole.position, whole.end = start, start, end
        whole.bytes = end - start
        whole.is_stored = True
        # When nobody holds any, nobody needs to be looked for: whatever can be read has been noted before.
        is_any_held = len(self._held) > 0
        for group in groups:
            following, undecided = split_counters(counters_of(group))
            whole.following.update(following)
            whole.undecided.update(undecided)
            for number, message in enumerate(group.messages):
                if message.partition != UNDECIDED and not self._is_done(message, group.position):
                    place = group.position + number
                    item = self._held_item(message, place) if is_any_held else None
                    if item is None:
                        item = make_item(message, self._waiting)
                    item.group = whole
                    whole.items.append(item)
        whole.count = whole.left = len(whole.items)
        return whole

    def _is_done(self, message: Message, position: int) -> bool:
        if position >= self._resumed_end:
            return False
        confirmed = self._confirmed.get((message.topic, message.partition), 0)
        return (
            message.sequence < confirmed
            or (message.topic, message.partition, message.sequence) in self._aside
        )

    def _held_item(self, message: Message, place: int) -> SpooledDelivery | None:
        item = self._held.pop(place, None)
        if item is not None:
            item.refill(message)
        return item


def split_counters(counters: Mapping[PartitionKey, int]) -> tuple[dict[PartitionKey, int], dict[str, int]]:
    """What a group holds for partitions, and how many undecided messages of a topic there are up to its end."""
    following = {where: after for where, after in counters.items() if where[1] >= 0}
    return following, {
        topic: after for (topic, partition), after in counters.items() if partition == UNDECIDED
    }

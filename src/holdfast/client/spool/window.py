"""What is on its way to the broker: which messages, in the order of the spool, and how far all of them have arrived.

Confirmations come in any order. The spool can let go of its beginning only up to the first message that is not done:
`prefix`. Behind it, each partition has a prefix of its own, `confirmed`: the sequence of its first message that is not
done. With both, a process that takes over sends nothing again but what nobody knows to have arrived, and one stuck
partition does not make the others' messages be sent twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from holdfast.client.spool.format import Entry, PartitionKey


class _Slot:
    __slots__ = ("end", "is_done", "position", "sequence")

    def __init__(self, position: int, end: int, sequence: int) -> None:
        self.position = position
        self.end = end
        self.sequence = sequence
        self.is_done = False


class Window:
    def __init__(self, prefix: int, confirmed: Mapping[PartitionKey, int]) -> None:
        self.prefix = prefix
        """Every message in front of this position is done."""
        self.confirmed: dict[PartitionKey, int] = dict(confirmed)
        """The sequence of the first message of each partition that is not done."""
        self._slots: deque[_Slot] = deque()
        self._partitions: dict[PartitionKey, deque[_Slot]] = {}
        self._by_position: dict[int, _Slot] = {}
        self._done_before: set[int] = set()
        """Positions that were done out of order when `restart` was called."""
        self.bytes = 0
        """Bytes of messages sent and not done."""

    def __len__(self) -> int:
        return len(self._slots)

    def is_done(self, entry: Entry) -> bool:
        """Whether the message is known to have arrived, from this process or the one before it."""
        message = entry.message
        return (
            entry.sequence < self.confirmed.get((message.topic, message.partition), 0)
            or entry.position < self.prefix
            or entry.position in self._done_before
        )

    def begin(self, entry: Entry) -> None:
        """The message, next in the spool, is being sent, or is known to be done."""
        message = entry.message
        slot = _Slot(entry.position, entry.end, entry.sequence)
        self._slots.append(slot)
        self._partitions.setdefault((message.topic, message.partition), deque()).append(slot)
        self._by_position[entry.position] = slot
        self.bytes += entry.end - entry.position

    def done(self, entry: Entry) -> None:
        """The message was delivered or set aside."""
        slot = self._by_position.pop(entry.position, None)
        if slot is None:
            return
        slot.is_done = True
        self.bytes -= entry.end - entry.position
        message = entry.message
        key = (message.topic, message.partition)
        slots = self._partitions[key]
        while slots and slots[0].is_done:
            following = slots.popleft().sequence + 1
            if following > self.confirmed.get(key, 0):
                self.confirmed[key] = following
        if not slots:
            del self._partitions[key]
        slots = self._slots
        while slots and slots[0].is_done:
            first = slots.popleft()
            self.prefix = first.end
            self._done_before.discard(first.position)

    def restart(self) -> int:
        """Nothing is under way any more; returns where to begin sending again."""
        self._done_before.update(slot.position for slot in self._slots if slot.is_done)
        self._slots.clear()
        self._partitions.clear()
        self._by_position.clear()
        self.bytes = 0
        return self.prefix

    def skip_to(self, position: int) -> None:
        """No message lies between the prefix and `position`."""
        if not self._slots and position > self.prefix:
            self.prefix = position

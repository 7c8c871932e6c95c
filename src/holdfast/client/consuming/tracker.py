"""How far a partition has been worked through: the first message that is not finished, whatever finished behind it.

Messages are begun in the order of their offsets, which may have gaps (compaction, markers and aborted records), and
finish in any order. Only the front of finished work may be committed: an offset that is committed says that everything
before it is done. One slow message holds back its own partition and no other.

A tracker belongs to one assignment of its partition. When the partition is taken away the tracker is closed, and
whatever finishes afterwards is told that it does not count: another member may have the partition by now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from holdfast.client.process import close_in_child
from holdfast.errors import UsageError


class PartitionTracker:
    def __init__(self, topic: str, partition: int, start: int, *, is_stored: bool = True) -> None:
        """`start` is the committed offset of the group; negative when it has none, and begins wherever the log does.

        One that was decided on and is not stored is to be committed, or it would be decided on again.
        """
        self.topic = topic
        self.partition = partition
        self._is_placed = start >= 0
        """Whether it is known where the log begins, for a group that begins there."""
        self.commit_offset = max(start, 0)
        """What may be committed: everything before it is finished."""
        self._under_way: deque[int] = deque()
        self._finished: set[int] = set()
        """Finished behind the first that is not."""
        self.next_offset = max(start, 0)
        """Where the next message begins at the earliest: none before it will be begun."""
        self.is_closed = False
        self.is_draining = False
        """The partition is about to go, or gone: what a worker is at finishes, nothing else is begun."""
        self.committed = start if is_stored else -1
        """What is committed, as far as this member knows; negative: nothing."""
        close_in_child(self)

    def __repr__(self) -> str:
        return f"<{self.topic}-{self.partition} at {self.commit_offset}, {len(self)} under way>"

    def __len__(self) -> int:
        """Messages begun and not finished."""
        return len(self._under_way) - len(self._finished)

    @property
    def span(self) -> int:
        """Messages that are remembered: those under way, and those finished behind them."""
        return len(self._under_way)

    @property
    def has_news(self) -> bool:
        """Whether there is something to commit: where a new group begins, too, so that what expires from then on
        is missed."""
        return self._is_placed and self.commit_offset != self.committed

    def begin(self, offset: int) -> None:
        """A message was taken up."""
        self.begin_all((offset,))

    def begin_all(self, offsets: Sequence[int]) -> None:
        """Messages were taken up, in the order of their offsets."""
        if not offsets:
            return
        if offsets[0] < self.next_offset:
            raise UsageError(
                f"{self.topic}-{self.partition}: {offsets[0]} was begun behind {self.next_offset}"
            )
        if not self._under_way:
            # What lies between was never a message for us: nothing before this one is unfinished.
            self.commit_offset = offsets[0]
            self._is_placed = True
        self._under_way.extend(offsets)
        self.next_offset = offsets[-1] + 1

    def finish(self, offset: int) -> bool:
        """A message's work is done; false when that does not count any more."""
        return self.finish_all((offset,))

    def finish_all(self, offsets: Sequence[int]) -> bool:
        """The work on some messages, in the order of their offsets, is done; false when that does not count any
        more."""
        if self.is_closed:
            return False
        under_way, finished = self._under_way, self._finished
        if not finished and self._are_first(offsets):
            for _ in offsets:
                under_way.popleft()
            offsets = ()
        for offset in offsets:
            if under_way and under_way[0] == offset:
                under_way.popleft()
                while finished and under_way and under_way[0] in finished:
                    finished.discard(under_way.popleft())
            elif not under_way or offset < under_way[0] or offset in finished:
                raise UsageError(f"{self.topic}-{self.partition}: {offset} is not under way")
            else:
                finished.add(offset)
        self.commit_offset = under_way[0] if under_way else self.next_offset
        return True

    def _are_first(self, offsets: Sequence[int]) -> bool:
        """Whether these are the first under way: both ascend, so the ends tell."""
        under_way, count = self._under_way, len(offsets)
        return (
            0 < count <= len(under_way) and under_way[0] == offsets[0] and under_way[count - 1] == offsets[-1]
        )

    def passed(self, offset: int) -> None:
        """The reader has come to `offset` and found no message before it that was not begun."""
        self._is_placed = True
        if offset > self.next_offset:
            self.next_offset = offset
            if not self._under_way:
                self.commit_offset = offset

    def close(self) -> None:
        """The partition is taken away: nothing that finishes from now on counts."""
        self.is_draining = True
        self.is_closed = True

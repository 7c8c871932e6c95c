"""What a handler failed on, and what is to become of it: for clients that do their work in transactions.

One message of a partition at most is being tried again: those behind it wait. How often it failed is kept as long as
the partition is ours, through transactions that are taken back; a successor begins to count anew. A message that was
set aside is passed over until its position has moved past it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.client.messages import Message
from holdfast.client.retries import Again, Enough, RetryPolicy
from holdfast.client.spool.format import PartitionKey


@dataclass(slots=True)
class _Failing:
    offset: int
    began: float
    attempts: int = 0


class Failures:
    def __init__(self, policy: RetryPolicy) -> None:
        self.policy = policy
        self._failing: dict[PartitionKey, _Failing] = {}
        self._set_aside: dict[PartitionKey, set[int]] = {}

    def judge(self, message: Message, error: BaseException, now: float, began: float) -> Again | Enough:
        """The handler failed on a message once more, now, in an attempt that began before: what follows."""
        key = (message.topic, message.partition)
        failing = self._failing.get(key)
        if failing is None or failing.offset != message.offset:
            failing = self._failing[key] = _Failing(message.offset, began)
        failing.attempts += 1
        return self.policy.judge(error, failing.attempts, now - failing.began)

    def attempts(self, message: Message) -> int:
        """How often the handler has failed on it."""
        failing = self._failing.get((message.topic, message.partition))
        return failing.attempts if failing is not None and failing.offset == message.offset else 0

    def set_aside(self, message: Message) -> None:
        """It is safe elsewhere: no handler gets it again."""
        self._set_aside.setdefault((message.topic, message.partition), set()).add(message.offset)

    def is_set_aside(self, message: Message) -> bool:
        aside = self._set_aside
        return bool(aside) and message.offset in aside.get((message.topic, message.partition), ())

    def passed(self, key: PartitionKey, position: int) -> None:
        """Everything before the position is over."""
        failing = self._failing.get(key)
        if failing is not None and failing.offset < position:
            del self._failing[key]
        if key in self._set_aside:
            self._set_aside[key] = {offset for offset in self._set_aside[key] if offset >= position}
            if not self._set_aside[key]:
                del self._set_aside[key]

    def forget(self, keys: Iterable[PartitionKey]) -> None:
        """Partitions are not ours any more."""
        for key in keys:
            self._failing.pop(key, None)
            self._set_aside.pop(key, None)

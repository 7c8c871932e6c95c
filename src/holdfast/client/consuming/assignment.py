"""Where a member begins on the partitions it is given, and what it makes of errors while it reads.

It begins at the group's committed position; where there is none, at the beginning, on partitions that were added later
too (HF304). A position that the log does not hold any more means that messages expired before they were handled, or
that the topic was made anew: the member stops and says so, unless it was told where to go on (HF305, HF206).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, TypeAlias

from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, TopicPartition

from holdfast.client.errors import ClientError
from holdfast.client.spool.format import PartitionKey

LostPositions: TypeAlias = Literal["stop", "earliest", "latest"]
ANSWER_SECONDS: Final = 30.0
"""How long the broker has to say where a group is."""
WAY_OUT: Final = (
    "Decide where to go on: lost_positions='earliest' or 'latest', or `holdfast groups reset-offsets`."
)


class PositionLost(ClientError):
    """The position of a group is no longer in the log; going on would skip or repeat, which is not ours to decide."""


def messages(consumer: Any, seconds: float, most: int) -> Iterator[Any]:
    """Up to `most` messages, the first of which may take so long.

    One at a time: a batch could hold messages that were read before a rebalance took their partition away, or gave
    it back at another position.
    """
    raw = consumer.poll(seconds)
    while raw is not None:
        yield raw
        most -= 1
        raw = consumer.poll(0) if most > 0 else None


class Assignment:
    def __init__(
        self,
        consumer: Any,
        lost_positions: LostPositions,
        *,
        is_incremental: bool,
        say: Callable[[str], None],
    ) -> None:
        self._consumer = consumer
        self._lost_positions = lost_positions
        self._is_incremental = is_incremental
        """Whether rebalances take single partitions: cooperative assignors, and the new group protocol."""
        self._say = say

    def begin(self, partitions: list[TopicPartition]) -> dict[PartitionKey, int]:
        """Take partitions over; returns where each begins, negative where that is the beginning of its log."""
        starts = [
            TopicPartition(each.topic, each.partition, self._start(each))
            for each in self._consumer.committed(partitions, timeout=ANSWER_SECONDS)
        ]
        if self._is_incremental:
            self._consumer.incremental_assign(starts)
        else:
            self._consumer.assign(starts)
        return {(each.topic, each.partition): each.offset for each in starts}

    def end(self, partitions: list[TopicPartition]) -> None:
        """Let partitions go."""
        if self._is_incremental:
            self._consumer.incremental_unassign(partitions)
        else:
            self._consumer.unassign()

    def _start(self, committed: TopicPartition) -> int:
        if committed.error is not None:
            raise KafkaException(committed.error)
        if committed.offset < 0:
            return OFFSET_BEGINNING
        low, high = self._consumer.get_watermark_offsets(committed, timeout=ANSWER_SECONDS)
        if low <= committed.offset <= high:
            return int(committed.offset)
        if self._lost_positions == "stop":
            raise PositionLost(
                f"{committed.topic}-{committed.partition}: this group's position {committed.offset} is outside the "
                f"log, which holds {low} to {high}: {max(0, low - committed.offset)} messages expired before they "
                f"were handled. {WAY_OUT}"
            )
        self._say(
            f"{committed.topic}-{committed.partition}: position {committed.offset} is outside the log "
            f"({low} to {high}); going on at the {self._lost_positions}"
        )
        return int(low if self._lost_positions == "earliest" else high)

    def judge(self, raw: Any, error: KafkaError) -> BaseException | None:
        """What an error among the messages means: a reason to stop, or nothing that lasts."""
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            return PositionLost(
                f"{raw.topic()}-{raw.partition()}: the position {raw.offset()} of this group is not in the log any "
                f"more ({error.str()}). Messages may have expired before they were handled. {WAY_OUT}"
            )
        if error.fatal() or error.code() in (
            KafkaError.GROUP_AUTHORIZATION_FAILED,
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
        ):
            return KafkaException(error)
        if not error.retriable() and error.code() not in (
            KafkaError._PARTITION_EOF,
            KafkaError._ALL_BROKERS_DOWN,
        ):
            self._say(f"{error.name()}: {error.str()}")
        return None

"""Messages that a spool sets aside: those that no attempt can deliver, kept on disk before they are let go of.

When the disk has no room for that, it is tried again, and until then the spool keeps the message.

What an error says of a message: that it can never arrive, or that its topic or partition takes none now.

Nothing is final that may pass with time. A message is set aside for an error of its own alone: it is too large, or not
what its topic allows, or no topic can have its name, or its timestamp is wrong on this machine too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from confluent_kafka import KafkaError

from holdfast.client.delivery import Failures
from holdfast.client.direct import failure
from holdfast.client.errors import DeliveryFailed
from holdfast.client.spool.format import RETRIED
from holdfast.client.spool.groups import SpooledDelivery
from holdfast.client.spool.home import REFUSED_DIRECTORY
from holdfast.client.spool.refused import Refused, RefusedMessages
from holdfast.client.spool.store import NO_ROOM, SpoolStore
from holdfast.client.spool.topics import Place
from holdfast.seams import FileSystem

SAY_SECONDS: Final = 60.0
"""Between two lines about messages that were set aside."""
AGAIN_SECONDS: Final = 1.0
"""Until room for what was refused is looked for again."""


class SetAside:
    """What a spool has set aside, and what is about to be; belongs to the thread that delivers."""

    def __init__(self, fs: FileSystem, store: SpoolStore, say: Callable[[str], None]) -> None:
        self._directory = f"{store.directory}/{REFUSED_DIRECTORY}"
        self._say = say
        self._messages = RefusedMessages(fs, store.directory)
        self.ids = self._messages.ids()
        self.count = sum(1 for _ in islice(self._messages, store.counters.get(RETRIED, 0), None))
        """How many messages are set aside, and were not stored again since."""
        self.refused_count = 0
        """How many of them were refused by a broker since the spool was opened."""
        self.failures = Failures()
        self._pending: list[tuple[SpooledDelivery, Refused]] = []
        """Refused for good; the disk had no room for them yet."""
        self._due = 0.0
        self._said_at = float("-inf")

    @property
    def pending(self) -> set[SpooledDelivery]:
        return {item for item, _ in self._pending}

    def refuse(self, refused: Sequence[tuple[SpooledDelivery, KafkaError]]) -> None:
        """No attempt can succeed: keep the messages and the reasons, and let go of them."""
        now_ms = time.time_ns() // 1_000_000
        pending = self.pending
        for item, error in refused:
            if not item.is_settled and item not in pending:
                said = failure(error, item.topic, item.partition)
                self._pending.append((item, Refused(item.as_message(), said.code, said.reason, now_ms)))
        self.try_again()

    def try_again(self) -> None:
        if not self._pending or time.monotonic() < self._due:
            return
        if not self.keep([refused for _, refused in self._pending]):
            self._due = time.monotonic() + AGAIN_SECONDS
            return
        done, self._pending = self._pending, []
        self.refused_count += len(done)
        for item, refused in done:
            assert item.group is not None, "a message is stored before it is sent"
            item.group.left -= 1
            self.settle(item, refused)
        self.tell(done[-1][1])

    def keep(self, refused: Sequence[Refused]) -> bool:
        """Write messages and reasons down, durably; false when the disk has no room for them."""
        try:
            self._messages.add(refused)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self._say(f"no room to set messages aside; it is tried again: {error}")
            return False
        return True

    def settle(self, item: SpooledDelivery, refused: Refused) -> None:
        """Tell whoever sent the message that it was refused, once it is kept."""
        message = refused.message
        self.ids.add((message.topic, message.partition, message.sequence))
        self.count += 1
        item.set_failed(
            DeliveryFailed(
                refused.reason,
                code=refused.code,
                is_final=True,
                topic=message.topic,
                partition=message.partition if message.partition >= 0 else None,
            )
        )
        item.value = None
        self.failures.add(item)

    def tell(self, last: Refused) -> None:
        """Say how many messages are set aside, once in a while."""
        if time.monotonic() - self._said_at >= SAY_SECONDS:
            self._said_at = time.monotonic()
            count = f"{self.count} message{' is' if self.count == 1 else 's are'}"
            self._say(
                f"{count} set aside in {self._directory}, and not delivered; the last one "
                f"for {last.message.topic}: {last.reason} (`holdfast spool inspect --refused` shows them, "
                "`holdfast spool retry --refused` sends them again)"
            )

    def close(self) -> None:
        self._messages.close()


RECENT_MS: Final = 24 * 3_600_000
"""A message stamped within so long of this machine's clock is stamped right, as far as anybody can tell."""

NO_TOPIC_CODES: Final = frozenset((KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC))
TOPIC_CODES: Final = NO_TOPIC_CODES | {KafkaError.TOPIC_AUTHORIZATION_FAILED}
"""No message of the topic can arrive now: there is none, or nobody may write to it."""
PARTITION_CODES: Final = frozenset(
    (KafkaError._UNKNOWN_PARTITION, KafkaError.POLICY_VIOLATION, KafkaError.UNSUPPORTED_COMPRESSION_TYPE)
)
"""No message of the partition can arrive now."""
REFUSED_CODES: Final = frozenset((KafkaError.TOPIC_EXCEPTION,))
"""No message of the topic can ever arrive: no topic can have its name."""
BATCH_CODES: Final = frozenset(
    (
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
    )
)
"""Errors of a message that no attempt can mend; a broker may give them to a whole batch for one message's sake."""
FINAL_CODES: Final = REFUSED_CODES | BATCH_CODES


def place_to_hold(item: SpooledDelivery, error: KafkaError) -> Place | None:
    """What cannot take messages now, and may later; None when it is not for the place's sake that one was refused."""
    code = error.code()
    if code in TOPIC_CODES:
        return item.topic, None
    # Brokers hold a timestamp against their own clock. One that is right here was refused for theirs.
    if code in PARTITION_CODES or (code == KafkaError.INVALID_TIMESTAMP and is_recent(item)):
        return item.topic, item.partition
    return None


def is_recent(item: SpooledDelivery) -> bool:
    return abs(item.timestamp_ms - time.time_ns() // 1_000_000) <= RECENT_MS


def misdated_places(failed: Iterable[tuple[SpooledDelivery, KafkaError]]) -> set[Place]:
    """Partitions with a refused message whose timestamp is wrong here too: others may be refused for its sake alone."""
    return {
        (item.topic, item.partition)
        for item, error in failed
        if error.code() == KafkaError.INVALID_TIMESTAMP and not is_recent(item)
    }

"""Messages that a spool sets aside: those that no attempt can deliver, kept on disk before they are let go of.

When the disk has no room for that, it is tried again, and until then the spool keeps the message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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

"""Delivering what spools hold whose owners are dead, without sending anything new.

With `retry_refused`, messages that were set aside are stored again and delivered with the rest; the owner of a spool
that is in use finds a note that asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from confluent_kafka import KafkaException

from holdfast.atomic import write_atomically
from holdfast.client.delivery import Waiting
from holdfast.client.errors import DeliveryStopped
from holdfast.client.settings import Settings
from holdfast.client.spool.deliverer import logged_producer
from holdfast.client.spool.home import RETRY_FILE, DeliveryMode, OwnedSpool, SpoolHome, read_delivery_mode
from holdfast.client.spool.peek import SpoolPeek
from holdfast.client.spool.sender import (
    UNBOUNDED,
    OpenSpool,
    Tools,
    has_refused,
    is_delivered,
    remove_or_release,
)
from holdfast.client.spool.topics import TopicLayout
from holdfast.errors import HoldfastError
from holdfast.seams import FileSystem, Randomness

LOOK_SECONDS = 0.2


class Drained(NamedTuple):
    """What became of one spool."""

    id: str
    delivered: int
    refused: int
    """How many messages are set aside in it now."""
    left: int
    problem: str | None
    """Why not all of it was delivered, when that is so."""


class Drain:
    def __init__(
        self,
        fs: FileSystem,
        home: SpoolHome,
        randomness: Randomness,
        settings: Settings,
        *,
        say: Callable[[str], None],
        is_over: Callable[[], bool],
        make: Callable[[Settings], Any] = logged_producer,
    ) -> None:
        self._fs = fs
        self._home = home
        self._tools = Tools(
            fs,
            home,
            TopicLayout(fs, home.path, str(settings["bootstrap.servers"]), say),
            randomness,
            settings,
            DeliveryMode(),
            say,
            make,
        )
        self._is_over = is_over

    def run(
        self, spool_ids: list[str], timeout: float | None, *, retry_refused: bool = False
    ) -> Iterator[Drained]:
        """One spool after the other, until the time has passed. One that cannot be read holds up no other."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for spool_id in spool_ids:
            try:
                drained = self._drain(spool_id, deadline, retry_refused)
            except (HoldfastError, OSError, KafkaException) as error:
                drained = self._as_it_is(spool_id, str(error))
            if drained is not None:
                yield drained

    def _drain(self, spool_id: str, deadline: float | None, retry_refused: bool) -> Drained | None:
        owned = self._home.take(spool_id)
        if owned is None:
            if not retry_refused:
                return self._as_it_is(spool_id, "in use: its owner delivers it")
            write_atomically(self._fs, f"{self._home.directory(spool_id)}/{RETRY_FILE}", b"")
            return self._as_it_is(spool_id, "in use: its owner was asked to send again what was refused")
        try:
            is_asked = retry_refused and has_refused(self._fs, owned.directory)
            if is_delivered(self._fs, owned.directory) and not is_asked:
                drained = self._as_it_is(spool_id, None)
                remove_or_release(self._fs, self._home, owned)
                return drained if drained.refused else None
            return self._deliver(owned, deadline, is_asked)
        finally:
            owned.lock.release()

    def _as_it_is(self, spool_id: str, problem: str | None) -> Drained:
        try:
            state = SpoolPeek(self._fs, self._home.directory(spool_id)).state(spool_id, is_in_use=True)
        except (HoldfastError, OSError) as error:
            return Drained(spool_id, 0, 0, 0, problem or str(error))
        return Drained(spool_id, 0, state.refused, state.left, problem)

    def _deliver(self, owned: OwnedSpool, deadline: float | None, is_asked: bool) -> Drained:
        tools = self._tools._replace(mode=read_delivery_mode(self._fs, owned.directory))
        spool = OpenSpool(tools, owned, Waiting(), UNBOUNDED)
        if is_asked:
            spool.retry_refused()
        problem = self._wait(spool, deadline)
        spool.close()
        left = spool.deliverer.left
        if spool.is_finished:
            remove_or_release(self._fs, self._home, owned)
        return Drained(
            owned.id, spool.deliverer.delivered, spool.deliverer.aside.count, left, problem if left else None
        )

    def _wait(self, spool: OpenSpool, deadline: float | None) -> str | None:
        deliverer = spool.deliverer
        try:
            while spool.writer.is_retrying or not deliverer.wait_delivered(LOOK_SECONDS):
                if self._is_over():
                    return "interrupted"
                if deliverer.home.elsewhere is not None:
                    return deliverer.home.elsewhere
                if deadline is not None and time.monotonic() >= deadline:
                    return "; ".join(["not delivered in time", *deliverer.reasons])
        except DeliveryStopped as stopped:
            return str(stopped)
        return None

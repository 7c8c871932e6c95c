"""Delivering what spools hold whose owners are dead, without sending anything new."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from holdfast.client.delivery import Waiting
from holdfast.client.errors import DeliveryStopped
from holdfast.client.library_log import logged_producer
from holdfast.client.settings import Settings
from holdfast.client.spool.format import DamagedSpool
from holdfast.client.spool.home import Manner, OwnedSpool, SpoolHome, read_manner
from holdfast.client.spool.layout import TopicLayout
from holdfast.client.spool.peek import SpoolPeek
from holdfast.client.spool.sender import (
    OpenSpool,
    Tools,
    ask_about_unknown,
    is_delivered,
    remove_or_release,
)
from holdfast.client.spool.store import SEGMENT_BYTES
from holdfast.seams import FileSystem, Randomness

LOOK_SECONDS = 0.2


class Drained(NamedTuple):
    """What became of one spool."""

    id: str
    delivered: int
    refused: int
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
            TopicLayout(fs, home.path, say),
            randomness,
            settings,
            Manner(),
            say,
            make,
        )
        self._is_over = is_over

    def run(self, spool_ids: list[str], timeout: float | None) -> Iterator[Drained]:
        """One spool after the other, until the time has passed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for spool_id in spool_ids:
            owned = self._home.take(spool_id)
            if owned is None:
                yield Drained(spool_id, 0, 0, self._left(spool_id), "in use: its owner delivers it")
            elif is_delivered(self._fs, owned.directory):
                remove_or_release(self._fs, self._home, owned)
            else:
                yield self._drain(owned, deadline)

    def _left(self, spool_id: str) -> int:
        return SpoolPeek(self._fs, self._home.directory(spool_id)).state(spool_id, is_in_use=True).left

    def _drain(self, owned: OwnedSpool, deadline: float | None) -> Drained:
        was = SpoolPeek(self._fs, owned.directory).state(owned.id, is_in_use=False)
        tools = self._tools._replace(manner=read_manner(self._fs, owned.directory))
        try:
            spool = OpenSpool(tools, owned, Waiting(), SEGMENT_BYTES)
        except DamagedSpool as damaged:
            owned.lock.release()
            return Drained(owned.id, 0, 0, was.left, str(damaged))
        problem = self._deliver(spool, deadline)
        spool.close()
        refused = spool.deliverer.refused.seen().total
        left = spool.deliverer.left
        if spool.is_finished:
            remove_or_release(self._fs, self._home, owned)
        else:
            owned.lock.release()
        return Drained(owned.id, spool.deliverer.delivered, refused, left, problem if left else None)

    def _deliver(self, spool: OpenSpool, deadline: float | None) -> str | None:
        missing: dict[str, float] = {}
        try:
            while not spool.deliverer.wait_delivered(LOOK_SECONDS):
                ask_about_unknown(spool, missing, self._is_over)
                if self._is_over():
                    return "interrupted"
                if deadline is not None and time.monotonic() >= deadline:
                    return "not delivered in time"
        except DeliveryStopped as stopped:
            return str(stopped)
        return None

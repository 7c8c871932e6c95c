"""Looking into spools without touching them: also while another process writes and delivers.

Nothing is locked, cut or written. What is read is what was there at some moment: a segment that goes meanwhile was
delivered, and an end that is being written is left out. Damage does not end the looking: it is named, and reading goes
on at the next group that is whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from holdfast.atomic import read_whole
from holdfast.client.spool import format as frames
from holdfast.client.spool.format import (
    MOVED,
    RETRIED,
    UNDECIDED,
    Body,
    PartitionKey,
    SpooledMessage,
    counters_of,
)
from holdfast.client.spool.home import SpoolHome, read_delivery_mode
from holdfast.client.spool.identity import read_identity
from holdfast.client.spool.progress import WAITING_FILE, Progress, merged, messages_left, moved, read_progress
from holdfast.client.spool.refused import Refused, RefusedMessages
from holdfast.client.spool.store import list_segments, scan
from holdfast.seams import File, FileSystem


class Damage(NamedTuple):
    """Bytes that nobody stored, in front of messages that somebody did."""

    path: str
    at: int
    bytes: int
    """How many cannot be read."""


class Kept(NamedTuple):
    """A message in a spool."""

    position: int
    """Of its group."""
    message: SpooledMessage
    is_left: bool
    """Whether it is still to be sent, as far as was written down."""


class PartitionState(NamedTuple):
    topic: str
    partition: int
    stored: int
    """How many messages there have been, from the first on."""
    confirmed: int
    """How many of them, from the first on, are delivered or set aside."""
    moved: int = 0
    """Of those without a partition, -1: how many, from the first on, an earlier version has stored again with one."""


class SpoolState(NamedTuple):
    id: str
    is_in_use: bool
    delivery: str
    """How it was delivered last."""
    left: int
    bytes: int
    """What its segments take on disk."""
    refused: int
    oldest_ms: int | None
    """When the first message that is still to be sent was stored."""
    partitions: list[PartitionState]
    undecided: dict[str, int]
    """How many messages of each topic have no partition yet."""
    damages: list[Damage]
    waiting: list[str]
    """Why messages wait although brokers answer, as the process said that delivered last."""
    cluster_id: str | None
    """The cluster that its messages are for; None before the first was delivered."""


class SpoolPeek:
    """One spool, from outside."""

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._fs = fs
        self.directory = directory
        self.damages: list[Damage] = []
        """What was found by the last reading."""

    def messages(self, *, is_left_only: bool = False) -> Iterator[Kept]:
        """Every message that can be read, in order; or those that are still to be sent."""
        counters = self._counters()
        progress = self._progress(counters)
        aside = RefusedMessages(self._fs, self.directory).ids()
        for body in self._bodies(progress.prefix if is_left_only else 0):
            if body.kind not in frames.GROUPS:
                continue
            group = frames.decode_group(body)
            for message in group.messages:
                is_left = _is_left(group.position, message, progress, aside)
                if is_left or not is_left_only:
                    yield Kept(group.position, message, is_left)

    def _progress(self, counters: Mapping[PartitionKey, int]) -> Progress:
        return merged(read_progress(self._fs, self.directory), Progress(0, moved(counters)))

    def refused(self, *, is_all: bool = False) -> Iterator[Refused]:
        """Messages that were set aside; all there ever were, or those that were not stored again since."""
        found = iter(RefusedMessages(self._fs, self.directory))
        return found if is_all else islice(found, self._counters().get(RETRIED, 0), None)

    def _waiting(self) -> list[str]:
        path = f"{self.directory}/{WAITING_FILE}"
        try:
            said = json.loads(read_whole(self._fs, path)) if self._fs.exists(path) else {}
        except (FileNotFoundError, ValueError):
            # It was replaced meanwhile, or never written whole: nothing but these words depends on it.
            return []
        held = [
            f"{each['topic']}{'' if each['partition'] is None else '-' + str(each['partition'])}: {each['reason']}"
            for each in said.get("held", ())
        ]
        return [*filter(None, [said.get("elsewhere")]), *held]

    def state(self, spool_id: str, *, is_in_use: bool) -> SpoolState:
        counters = self._counters()
        progress = self._progress(counters)
        aside = RefusedMessages(self._fs, self.directory).ids()
        confirmed = progress.confirmed
        passed_over = sum(number >= confirmed.get((topic, line), 0) for topic, line, number in aside)
        oldest_ms = next((kept.message.timestamp_ms for kept in self.messages(is_left_only=True)), None)
        for _ in self._bodies(0):
            # Read to the end, for the damage.
            continue
        return SpoolState(
            spool_id,
            is_in_use,
            read_delivery_mode(self._fs, self.directory).delivery,
            max(0, messages_left(counters, confirmed) - passed_over),
            sum(size for _, _, size in list_segments(self._fs, self.directory)),
            sum(1 for _ in self.refused()),
            oldest_ms,
            [
                PartitionState(
                    topic,
                    partition,
                    stored,
                    confirmed.get((topic, partition), 0),
                    counters.get((topic, MOVED), 0) if partition == UNDECIDED else 0,
                )
                for (topic, partition), stored in sorted(counters.items())
                if partition >= UNDECIDED and topic
            ],
            {
                topic: stored - confirmed.get((topic, UNDECIDED), 0)
                for (topic, partition), stored in sorted(counters.items())
                if partition == UNDECIDED and stored > confirmed.get((topic, UNDECIDED), 0)
            },
            self.damages,
            self._waiting(),
            read_identity(self._fs, self.directory).cluster_id,
        )

    def _bodies(self, prefix: int) -> Iterator[Body]:
        """Every frame that is whole, in order, from the segment with `prefix` on."""
        self.damages = []
        segments = list_segments(self._fs, self.directory)
        for number, (base, path, size) in enumerate(segments):
            is_last = number == len(segments) - 1
            if base + size <= prefix and not is_last:
                continue
            try:
                file = self._fs.open(path, "read")
            except FileNotFoundError:
                # Delivered and let go of since it was listed.
                continue
            try:
                yield from self._bodies_of(file, base, size, is_last=is_last)
            finally:
                file.close()

    def _bodies_of(self, file: File, base: int, size: int, *, is_last: bool) -> Iterator[Body]:
        position = base
        while True:
            for body in scan(file, base, size, position):
                position = body.end
                yield body
            if position >= base + size:
                return
            tail = file.pread(base + size - position, position - base)
            following = frames.find_group(tail, position)
            if following is not None or not is_last:
                lost = len(tail) if following is None else following
                self.damages.append(Damage(file.path, position - base, lost))
            if following is None:
                return
            position += following

    def _counters(self) -> dict[PartitionKey, int]:
        """The counters after the last group that can be read."""
        for base, path, size in reversed(list_segments(self._fs, self.directory)):
            counters: dict[PartitionKey, int] | None = None
            try:
                file = self._fs.open(path, "read")
            except FileNotFoundError:
                continue
            try:
                for body in self._bodies_of(file, base, size, is_last=True):
                    if body.kind == frames.COUNTERS:
                        counters = frames.decode_counters(body)
                    elif body.kind in frames.GROUPS:
                        counters = {**(counters or {}), **counters_of(frames.decode_group(body))}
            finally:
                file.close()
            if counters is not None:
                return counters
        return {}


def _is_left(
    position: int, message: SpooledMessage, progress: Progress, aside: set[tuple[str, int, int]]
) -> bool:
    where = message.topic, message.partition
    return (
        position >= progress.prefix
        and (*where, message.sequence) not in aside
        and message.sequence >= progress.confirmed.get(where, 0)
    )


def is_in_use(home: SpoolHome, spool_id: str) -> bool:
    """Whether a process owns the spool. Asking takes the lock for a moment, when nobody has it."""
    owned = home.take(spool_id)
    if owned is None:
        return True
    owned.lock.release()
    return False

"""What windows must hold, recomputed from the log: number and digest of their rows, and in which batch they appear.

A row that is not late adds one and its hash to each window it belongs to, in the batch that took it. From that, and
from the watermark after each batch, follows which rows a window step gave out and when:

- `emit: changes`: a window is given out in every batch that added to it, with all it has by then.
- `emit: closed`: it is given out in the first batch after which the watermark has passed its end; and again in each
  later one that still added to it (`late: correct`).

Sessions are rows of a key whose events are no more than the gap apart; they close a gap after their end. Given out once
closed, they never change; given out while they grow, only what stands in the end is recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from holdfast.audit.memory.keys import Codes, sorting
from holdfast.audit.memory.lateness import Measure
from holdfast.audit.memory.rows import Flags, Hashes, Numbers, Times

NEVER: Final = 2**31 - 1
"""In place of a batch: not within the audit's scope."""


@dataclass(frozen=True)
class Windows:
    """Windows, or states of windows, one beside the other."""

    keys: Codes
    starts: Times
    ends: Times
    turns: Numbers
    """The batch, by its place in the chain, in which this was given out."""
    counts: Numbers
    digests: Hashes
    sample: Numbers
    """A row that is in it."""

    def __len__(self) -> int:
        return len(self.keys)

    def where(self, chosen: Flags | Numbers) -> Windows:
        return Windows(
            self.keys[chosen],
            self.starts[chosen],
            self.ends[chosen],
            self.turns[chosen],
            self.counts[chosen],
            self.digests[chosen],
            self.sample[chosen],
        )


@dataclass(frozen=True)
class Parts:
    """Rows in windows: one for each window a row belongs to."""

    rows: Numbers
    keys: Codes
    starts: Times


@dataclass(frozen=True)
class Pieces:
    """Rows of one batch and one key that belong to the same windows, taken together."""

    keys: Codes
    firsts: Times
    lasts: Times
    turns: Numbers
    counts: Numbers
    digests: Hashes
    sample: Numbers


def pieces(
    measure: Measure,
    rows: Numbers,
    keys: Codes,
    events: Times,
    watermarks: Times,
    turns: Numbers,
    hashes: Hashes,
) -> Pieces:
    """Of these rows, none of which is late; tumbling and sliding. All arrays are by row of the source but `rows`."""
    keys, turns = keys[rows], turns[rows]
    lasts = measure.last_starts(events[rows])
    firsts = measure.first_starts(events[rows], watermarks[rows]) if measure.kind == "sliding" else lasts
    behind = (lasts - firsts) // measure.every_ms
    order = sorting(keys, lasts // measure.every_ms, behind, turns)
    keys, lasts, firsts, turns = keys[order], lasts[order], firsts[order], turns[order]
    begins = changes(keys, lasts, firsts, turns)
    digests = np.add.reduceat(hashes[rows[order]], begins) if len(begins) else np.zeros(0, np.uint64)
    return Pieces(
        keys[begins],
        firsts[begins],
        lasts[begins],
        turns[begins],
        np.diff(np.append(begins, len(keys))),
        digests,
        rows[order][begins],
    )


def assign(measure: Measure, firsts: Times, lasts: Times) -> tuple[Numbers, Times]:
    """From a first to a last start: the number of what belongs there, and each of the starts."""
    if measure.kind != "sliding":
        return np.arange(len(lasts)), lasts
    counts = (lasts - firsts) // measure.every_ms + 1
    which = np.repeat(np.arange(len(lasts)), counts)
    number = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    return which, firsts[which] + number * measure.every_ms


def given_out(measure: Measure, found: Pieces, ends_ms: Times, *, is_closed: bool) -> Windows:
    """Every row that windows give out, in the batches up to the end; those that stay open are given out `NEVER`.

    `ends_ms` is the watermark after each batch.
    """
    which, starts = assign(measure, found.firsts, found.lasts)
    keys, when = found.keys[which], found.turns[which].astype(np.int64)
    if is_closed:
        closing = np.searchsorted(ends_ms, starts + measure.size_ms, side="left").astype(np.int64)
        closing[closing == len(ends_ms)] = NEVER
        when = np.maximum(when, closing)
    order = sorting(keys, starts // measure.every_ms, np.where(when == NEVER, len(ends_ms), when))
    keys, starts, when, which = keys[order], starts[order], when[order], which[order]
    begins = changes(keys, starts, when)
    nothing = np.zeros(0, np.int64)
    states = Windows(
        keys[begins],
        starts[begins],
        starts[begins] + measure.size_ms,
        when[begins],
        np.add.reduceat(found.counts[which], begins) if len(begins) else nothing,
        np.add.reduceat(found.digests[which], begins) if len(begins) else nothing.view(np.uint64),
        found.sample[which][begins],
    )
    return _accumulated(states)


def _accumulated(states: Windows) -> Windows:
    """Each state with what its window had before."""
    if len(states) == 0:
        return states
    begins = changes(states.keys, states.starts)
    sizes = np.diff(np.append(begins, len(states)))
    counts, digests = np.cumsum(states.counts), np.cumsum(states.digests, dtype=np.uint64)
    return replace(
        states,
        counts=counts - np.repeat(counts[begins] - states.counts[begins], sizes),
        digests=digests - np.repeat(digests[begins] - states.digests[begins], sizes),
    )


def sessions(measure: Measure, parts: Parts, hashes: Hashes, ends_ms: Times) -> tuple[Windows, Times]:
    """The sessions of these rows, which start at their events, and the batch after which each was closed; and for each
    row the start of its session."""
    nothing = np.zeros(0, np.int64)
    if len(parts.rows) == 0:
        return Windows(nothing, nothing, nothing, nothing, nothing, np.zeros(0, np.uint64), nothing), nothing
    order = sorting(parts.keys, parts.starts)
    keys, events, rows = parts.keys[order], parts.starts[order], parts.rows[order]
    begins = np.concatenate(([True], (np.diff(keys) != 0) | (np.diff(events) > measure.size_ms)))
    firsts = np.flatnonzero(begins)
    lasts = np.append(firsts[1:], len(keys)) - 1
    ends = events[lasts] + measure.size_ms
    closing = np.searchsorted(ends_ms, ends + measure.wait_ms, side="left").astype(np.int64)
    closing[closing == len(ends_ms)] = NEVER
    counts = np.diff(np.append(firsts, len(keys)))
    starts = np.zeros(len(rows), np.int64)
    starts[order] = np.repeat(events[firsts], counts)
    digests = np.add.reduceat(hashes[rows], firsts)
    return Windows(keys[firsts], events[firsts], ends, closing, counts, digests, rows[firsts]), starts


def last_states(windows: Windows) -> Windows:
    """Of each window the newest of these."""
    if len(windows) == 0:
        return windows
    order = sorting(windows.keys, windows.starts, windows.turns)
    chosen = windows.where(order)
    is_last = np.ones(len(chosen), np.bool_)
    is_last[:-1] = (np.diff(chosen.keys) != 0) | (np.diff(chosen.starts) != 0)
    return chosen.where(is_last)


def changes(*columns: Numbers) -> Numbers:
    """Where, in sorted columns, something else begins."""
    if len(columns[0]) == 0:
        return np.zeros(0, np.int64)
    differs = np.zeros(len(columns[0]) - 1, np.bool_)
    for column in columns:
        differs |= column[1:] != column[:-1]
    return np.concatenate(([0], np.flatnonzero(differs) + 1))

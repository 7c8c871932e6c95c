"""Whether deduplication let exactly the right rows go.

Not by doing it again, but by what must hold of its outcome. Of the rows of one key, in the order in which they were
judged (batch, topic, partition, offset):

- any two that went on are `within` or more apart: one of them was a duplicate otherwise;
- each that was let go as a duplicate is less than `within` from one that went on *before* it: else it was the first of
  its kind, and is lost.

Given who went on, both are decided row by row, so one wrong verdict is one finding and does not blame its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.audit.stateful.rows import Flags, Numbers, sorting


@dataclass(frozen=True)
class Judged:
    """Rows that were wrongly treated, by their number."""

    repeated: Numbers
    """Went on, though one of their key had gone on near them."""
    lost: Numbers
    """Let go, though nothing of their key had gone on near them."""


def judge(
    keys: Numbers, events: Numbers, order: Numbers, went_on: Flags, duplicate: Flags, within_ms: int
) -> Judged:
    """`order` is the rank in which rows were judged; rows that are neither were not judged."""
    passed = np.flatnonzero(went_on)
    passed = passed[sorting(keys[passed], events[passed])]
    repeated = _too_near(keys, events, order, passed, within_ms)
    doubled = np.flatnonzero(duplicate)
    lost = doubled[~_has_one_before(keys, events, order, passed, doubled, within_ms)]
    return Judged(np.sort(repeated), lost)


def _too_near(keys: Numbers, events: Numbers, order: Numbers, passed: Numbers, within_ms: int) -> Numbers:
    """Of each two neighbours in time that are too near, the one that was judged later."""
    one, other = passed[:-1], passed[1:]
    near = (keys[one] == keys[other]) & (events[other] - events[one] < within_ms)
    later = np.where(order[one] > order[other], one, other)
    return np.unique(later[near])


def _has_one_before(
    keys: Numbers, events: Numbers, order: Numbers, passed: Numbers, doubled: Numbers, within_ms: int
) -> Flags:
    if len(doubled) == 0 or len(passed) == 0:
        return np.zeros(len(doubled), np.bool_)
    slots = _slots(keys, events, passed, doubled)
    found = np.zeros(len(doubled), np.bool_)
    # Those that went on are `within` apart where all is well, so that two on each side are more than can be near.
    for step in (-2, -1, 0, 1):
        at = slots + step
        inside = (at >= 0) & (at < len(passed))
        other = passed[np.clip(at, 0, len(passed) - 1)]
        near = np.abs(events[other] - events[doubled]) < within_ms
        found |= inside & near & (keys[other] == keys[doubled]) & (order[other] < order[doubled])
    return found


def _slots(keys: Numbers, events: Numbers, passed: Numbers, doubled: Numbers) -> Numbers:
    """Where each of the doubled would stand among the passed, which are sorted by key and time."""
    both = np.concatenate((passed, doubled))
    is_new = np.concatenate((np.zeros(len(passed), np.int64), np.ones(len(doubled), np.int64)))
    order = sorting(keys[both], events[both], is_new)
    before = np.cumsum(1 - is_new[order])
    found = np.zeros(len(both), np.int64)
    found[order] = before
    return found[len(passed) :]

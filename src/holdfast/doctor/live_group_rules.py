"""What groups are about to lose: committed offsets against the log, against retention, and against their own past; and
open transactions that hold them back.

From one look, a committed offset in the older half of what retention keeps is dated, and the time left is when
retention passes it if the group stays where it is. Brokers remove whole segments, so that is the earliest moment.

With earlier looks there are rates. Let the log be written `w` and the group read `c` messages a second: the edge that
retention cuts at moves through the log about as fast as it was written, so the time left grows to left * w / (w - c),
and a group at least as fast as its log is in no danger. Where size removes messages, the log's own start is the edge.

Stalled is a committed offset that did not move over looks at least a minute apart, while the log grew and the group was
behind throughout: nothing to set. Rewinding is a committed offset that is smaller than one committed before.

New is a partition behind all that a group has committed offsets in, with messages and without one: partitions are added
at the end. A group that assigns itself only the first ones looks the same, so without members it is a note.

Open transactions: who holds a partition's readers back, and until when retention will wait for them.

A transaction within its own time-out is at work. One past it should have been aborted by its coordinator. One that a
partition has open and no coordinator knows of hangs: nobody will ever end it, and no read_committed reader passes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final

from holdfast.doctor.findings import Finding, Fix, Severity, finding
from holdfast.doctor.findings import Location as Spot
from holdfast.doctor.live_cluster_rules import alter_topic, readers_of, shown, spell
from holdfast.doctor.live_snapshot import (
    Bounds,
    GroupFacts,
    Look,
    OpenProducer,
    Place,
    Snapshot,
    TransactionFacts,
    named,
    plain,
    quoted,
)

SOON: Final = 4
"""Less than this part of retention left, as 1/4, is an error; more is a warning."""
LOOKS_FOR_RATES: Final = 10
"""A rate is that of the last looks: what was before them says little about now."""
STALLED_MS_MIN: Final = 60_000
"""Clients commit every few seconds by default: looks closer together than this prove nothing."""


@dataclass(frozen=True)
class _Trouble:
    """One partition of a group that is in trouble."""

    place: Place
    words: str
    weight: float
    """The smallest is told first."""
    severity: Severity | None = None


def group_findings(snapshot: Snapshot, looks: Sequence[Look] = ()) -> Iterator[Finding]:
    """`looks` are earlier ones, the oldest first."""
    earlier = [look for look in looks if look.time_ms < snapshot.time_ms]
    for group in sorted(snapshot.groups.values(), key=lambda each: each.name):
        yield from _outside_the_log(group, snapshot)
        yield from _time_to_loss(group, snapshot, earlier)
        if earlier:
            yield from _stalled(group, snapshot, earlier)
            yield from _rewinding(group, snapshot, earlier)
    yield from _recreated(snapshot, earlier)


def _told(
    risk_id: str,
    group: GroupFacts,
    troubles: Iterable[_Trouble],
    fix: Callable[[str], Fix],
    *,
    severity: Severity | None = None,
    loses: str | None = None,
    related: tuple[str, ...] = (),
) -> Iterator[Finding]:
    """One finding for a group and topic, about its worst partition; the others are counted."""
    by_topic: defaultdict[str, list[_Trouble]] = defaultdict(list)
    for trouble in troubles:
        by_topic[trouble.place[0]].append(trouble)
    for topic, some in sorted(by_topic.items()):
        some.sort(key=lambda each: (each.weight, each.place))
        rest = [each.place[1] for each in some[1:]]
        yield finding(
            risk_id,
            Spot(resource=f"group {plain(group.name)} on topic {plain(topic)}"),
            some[0].words
            + (f"; likewise partition{'s' if len(rest) > 1 else ''} {shown(rest)}" if rest else ""),
            severity=some[0].severity or severity,
            loses=loses,
            fix=fix(topic),
            related=related,
        )


# ---------------------------------------------------------------------- one look


def _outside_the_log(group: GroupFacts, snapshot: Snapshot) -> Iterator[Finding]:
    gone, beyond = [], []
    for place, position in group.committed_offsets.items():
        bounds = snapshot.bounds.get(place)
        if bounds is None:
            continue
        if position < bounds.start:
            count = bounds.start - position
            words = (
                f"{named(place)}: the log begins at {bounds.start}, the committed offset is {position}: "
                f"{count} removed unread"
            )
            gone.append(_Trouble(place, words, -count))
        elif position > bounds.end:
            words = f"{named(place)}: the committed offset is {position}, and the log ends at {bounds.end}"
            beyond.append(_Trouble(place, words, bounds.end - position))
    yield from _told(
        "HF206",
        group,
        gone,
        lambda topic: _reset(group, topic, "earliest"),
        loses="the offsets named are gone; where the group goes on is up to its auto.offset.reset",
        related=("HF305",),
    )
    yield from _told(
        "HF408",
        group,
        beyond,
        lambda topic: _reset(group, topic, "earliest"),
        severity=Severity.ERROR,
        loses="what is written up to the old committed offset: the topic was recreated, or its log cut back",
        related=("HF204", "HF305"),
    )


def _reset(group: GroupFacts, topic: str, where: str) -> Fix:
    which = f"--group {quoted(group.name)} --topic {quoted(topic)}"
    command = f"holdfast groups reset-offsets {which} --to-{where} --execute"
    stop = "  # stop its members first" if group.has_members else ""
    return Fix(command + stop, "command")


def time_to_loss_ms(
    group: GroupFacts, snapshot: Snapshot, looks: Sequence[Look]
) -> Iterator[tuple[Place, float]]:
    """Where a group is in danger of losing messages that it has not read, and how long it takes."""
    for trouble in _endangered(group, snapshot, looks):
        yield trouble.place, trouble.weight


def _endangered(group: GroupFacts, snapshot: Snapshot, looks: Sequence[Look]) -> Iterator[_Trouble]:
    for place, position in group.committed_offsets.items():
        bounds, topic = snapshot.bounds.get(place), snapshot.topic_of(place)
        if bounds is None or topic is None or not bounds.start <= position < bounds.end:
            continue
        rates = _rates(group.name, place, position, bounds, snapshot.time_ms, looks)
        trouble = _by_time(group, place, position, snapshot, rates)
        if trouble is None and rates is not None and topic.keeps_by_size:
            trouble = _by_size(group, place, position, bounds, rates)
        if trouble is not None:
            yield trouble


def _time_to_loss(group: GroupFacts, snapshot: Snapshot, looks: Sequence[Look]) -> Iterator[Finding]:
    def longer(topic: str) -> Fix:
        retention = snapshot.topics[topic].retention_ms
        if retention is None:
            return Fix(f"more readers in {plain(group.name)}, or a larger retention.bytes for {topic}")
        return alter_topic(topic, "retention.ms", str(2 * retention))

    yield from _told("HF206", group, _endangered(group, snapshot, looks), longer)


@dataclass(frozen=True)
class _Rates:
    """Messages a millisecond, since the oldest look that knows this committed offset's past."""

    read: float
    written: float
    removed: float


def _rates(
    group: str, place: Place, position: int, bounds: Bounds, now_ms: int, looks: Sequence[Look]
) -> _Rates | None:
    for look in looks[-LOOKS_FOR_RATES:]:
        before, log = look.committed_offsets.get(group, {}).get(place), look.bounds.get(place)
        if before is None or log is None or log[1] > bounds.end:
            continue
        span_ms = now_ms - look.time_ms
        return _Rates(
            (position - before) / span_ms, (bounds.end - log[1]) / span_ms, (bounds.start - log[0]) / span_ms
        )
    return None


def _by_time(
    group: GroupFacts, place: Place, position: int, snapshot: Snapshot, rates: _Rates | None
) -> _Trouble | None:
    written_ms = snapshot.written_ms.get((place, position))
    retention_ms = snapshot.topics[place[0]].retention_ms
    if written_ms is None or retention_ms is None:
        return None
    left_ms: float = max(0, written_ms + retention_ms - snapshot.time_ms)
    lag = snapshot.bounds[place].end - position
    if left_ms == 0:
        words = f"{named(place)}: {lag} behind, and retention has passed the committed offset: it goes with its segment"
        return _Trouble(place, words, 0, Severity.ERROR)
    if rates is not None and rates.written > 0:
        if rates.read >= rates.written:
            return None  # it catches up
        left_ms *= rates.written / (rates.written - rates.read)
        words = (
            f"at this rate retention passes group {plain(group.name)} on {named(place)} in {spell(left_ms)} "
            f"({lag} behind)"
        )
    elif rates is not None and rates.read > 0:
        return None  # nothing is written, and it reads
    else:
        words = (
            f"{named(place)}: {lag} behind; if it stays where it is, retention passes it in {spell(left_ms)} "
            "at the earliest"
        )
    soon = left_ms * SOON < retention_ms
    return _Trouble(place, words, left_ms, Severity.ERROR if soon else Severity.WARNING)


def _by_size(
    group: GroupFacts, place: Place, position: int, bounds: Bounds, rates: _Rates
) -> _Trouble | None:
    """The log's start comes nearer, whatever moves it."""
    if rates.read >= min(rates.removed, rates.written):
        return None
    left_ms = (position - bounds.start) / (rates.removed - rates.read)
    # The start moves in steps of segments; far from it, a look or two say nothing.
    if position - bounds.start > bounds.end - position:
        return None
    lag = bounds.end - position
    words = (
        f"at this rate the start of the log passes group {plain(group.name)} on {named(place)} in {spell(left_ms)} "
        f"({lag} behind)"
    )
    return _Trouble(place, words, left_ms)


def new_partitions(snapshot: Snapshot, from_the_start: Collection[str] = ()) -> Iterator[Finding]:
    """Partitions that a group does not know yet; `from_the_start` are the groups known to begin at the earliest."""
    for group in sorted(snapshot.groups.values(), key=lambda each: each.name):
        if group.name in from_the_start:
            continue
        last: dict[str, int] = {}
        for topic, partition in group.committed_offsets:
            last[topic] = max(partition, last.get(topic, partition))
        troubles = []
        for name, highest in last.items():
            live = snapshot.topics.get(name)
            for partition in sorted(live.partitions) if live is not None else ():
                bounds = snapshot.bounds.get((name, partition))
                if partition > highest and bounds is not None and bounds.end > 0:
                    words = (
                        f"{named((name, partition))}: {bounds.end} written, and the group has no committed offset "
                        f"there as it has up to {named((name, highest))}: auto.offset.reset=latest skips them"
                    )
                    troubles.append(_Trouble((name, partition), words, partition))
        yield from _told(
            "HF304",
            group,
            troubles,
            partial(_reset_new, group),
            severity=None if group.has_members else Severity.NOTE,
            related=("HF305",),
        )


def _reset_new(group: GroupFacts, topic: str) -> Fix:
    return Fix(
        f"auto.offset.reset=earliest in the consumers of {plain(group.name)}, before they begin there; if they have "
        f"begun, read the first messages of the new partitions of {plain(topic)} by themselves"
    )


# ---------------------------------------------------------------------- with earlier looks


def _stalled(group: GroupFacts, snapshot: Snapshot, looks: Sequence[Look]) -> Iterator[Finding]:
    held = {producer.place: producer.start_offset for producer in snapshot.open_producers}
    stuck, moving = [], 0
    for place, position in group.committed_offsets.items():
        bounds = snapshot.bounds.get(place)
        if bounds is None:
            continue
        since = _unmoved_since(group.name, place, position, bounds, looks)
        if since is None or snapshot.time_ms - since < STALLED_MS_MIN:
            moving += any(
                look.committed_offsets.get(group.name, {}).get(place, position) != position for look in looks
            )
            continue
        if place in held and held[place] <= position:
            continue  # an open transaction holds it, which is told as that
        span = spell(snapshot.time_ms - since)
        words = (
            f"{named(place)}: the committed offset has been {position} for {span} while the log grew, "
            f"{bounds.end - position} behind"
        )
        stuck.append(_Trouble(place, words, since))
    if not stuck:
        return
    if group.has_members and moving:
        yield from _told(
            "HF306",
            group,
            stuck,
            lambda topic: Fix(
                f"look at the message at that offset of {topic}, and at the logs of its member"
            ),
            severity=Severity.WARNING,
            loses="everything behind the message, once retention passes it; other partitions of the group move",
            related=("HF206",),
        )
        return
    state = f"its state is {group.state}" if group.state else "its state is unknown"
    yield from _told(
        "HF206",
        group,
        stuck,
        lambda _: Fix(f"start or repair the members of {plain(group.name)} ({state})"),
        severity=Severity.WARNING,
        related=("HF306",) if group.has_members else (),
    )


def _unmoved_since(
    group: str, place: Place, position: int, bounds: Bounds, looks: Sequence[Look]
) -> int | None:
    """The time of the first look since which the committed offset stayed, behind all the while, as the log grew."""
    since = end_then = None
    for look in reversed(looks):
        log = look.bounds.get(place)
        if look.committed_offsets.get(group, {}).get(place) != position or log is None or log[1] <= position:
            break
        since, end_then = look.time_ms, log[1]
    return since if end_then is not None and end_then < bounds.end else None


def _rewinding(group: GroupFacts, snapshot: Snapshot, looks: Sequence[Look]) -> Iterator[Finding]:
    troubles = []
    for place, position in group.committed_offsets.items():
        topic = snapshot.topic_of(place)
        before = [
            offset
            for look in looks
            if (offset := look.committed_offsets.get(group.name, {}).get(place)) is not None
            and topic is not None
            and look.topic_ids.get(place[0], topic.topic_id) == topic.topic_id
        ]
        path = [*before, position]
        steps = [(earlier, later) for earlier, later in pairwise(path) if later < earlier]
        if steps:
            earlier, later = steps[-1]
            times = f", {len(steps)} times in {len(path)} looks" if len(steps) > 1 else ""
            words = f"{named(place)}: the committed offset went back from {earlier} to {later}{times}"
            troubles.append(_Trouble(place, words, later - earlier))
    yield from _told(
        "HF307",
        group,
        troubles,
        lambda _: Fix("drain, commit and release when partitions are revoked; if it was a reset, nothing"),
        loses="order: what lies between is read twice, or was handled by two members",
    )


def _recreated(snapshot: Snapshot, looks: Sequence[Look]) -> Iterator[Finding]:
    if not looks:
        return
    last: dict[str, str] = {}
    for look in looks:
        last.update(look.topic_ids)
    readers = readers_of(snapshot.groups)
    for topic in snapshot.topics.values():
        before = last.get(topic.name)
        if before and topic.topic_id and before != topic.topic_id and readers.get(topic.name):
            yield finding(
                "HF408",
                topic.spot,
                f"recreated since the last look; {shown(readers[topic.name])} kept committed offsets in it",
                fix=Fix(
                    f"reset the committed offsets of these groups on {topic.name} to its earliest messages"
                ),
            )


DEFAULT_LONGEST_MS: Final = 15 * 60_000
"""transaction.max.timeout.ms of brokers that were told nothing: no transaction of a live producer lasts longer."""


def transaction_findings(snapshot: Snapshot) -> Iterator[Finding]:
    for transaction in snapshot.transactions or ():
        yield from _overdue(transaction, snapshot)
    for producer in hanging_producers(snapshot):
        yield _hanging(producer, snapshot)
    yield from _longer_than_retention(snapshot)


def _overdue(transaction: TransactionFacts, snapshot: Snapshot) -> Iterator[Finding]:
    if transaction.start_ms is None:
        return
    open_ms = snapshot.time_ms - transaction.start_ms
    if open_ms <= transaction.timeout_ms:
        return
    yield finding(
        "HF411",
        Spot(resource=f"transactional id {plain(transaction.transactional_id)}"),
        f"producer {transaction.producer_id} has had its transaction open for {spell(open_ms)}, past its time-out "
        f"of {spell(transaction.timeout_ms)} ({transaction.state}), in {shown([named(e) for e in transaction.places])}",
        fix=Fix(
            f"holdfast transactions abort --transactional-id {quoted(transaction.transactional_id)}",
            "command",
        ),
    )


def hanging_producers(snapshot: Snapshot) -> Iterator[OpenProducer]:
    """Who has a transaction open that nobody will end."""
    if snapshot.transactions is None or any("transactions" in gap.what for gap in snapshot.gaps):
        return  # whether a coordinator knows it, nobody could say
    longest = max(
        (
            each.settings.number("transaction.max.timeout.ms") or DEFAULT_LONGEST_MS
            for each in snapshot.brokers.values()
            if each.settings is not None
        ),
        default=DEFAULT_LONGEST_MS,
    )
    places = {each.producer_id: each.places for each in snapshot.transactions}
    for producer in snapshot.open_producers:
        is_silent = snapshot.time_ms - producer.last_timestamp_ms > longest
        if is_silent and producer.place not in places.get(producer.producer_id, ()):
            yield producer


def _hanging(producer: OpenProducer, snapshot: Snapshot) -> Finding:
    silent_ms = snapshot.time_ms - producer.last_timestamp_ms
    topic, partition = producer.place
    retention = snapshot.topics[topic].retention_ms
    left = "" if retention is None else _left(producer, retention, snapshot.time_ms)
    return finding(
        "HF411",
        Spot(resource=f"topic {plain(topic)}"),
        f"{named(producer.place)}: producer {producer.producer_id} has had a transaction open from offset "
        f"{producer.start_offset} for {spell(silent_ms)}, and no coordinator will end it{left}",
        severity=Severity.ERROR,
        fix=Fix(
            f"holdfast transactions abort --topic {quoted(topic)} --partition {partition} "
            f"--start-offset {producer.start_offset}",
            "command",
        ),
    )


def _left(producer: OpenProducer, retention_ms: int, now_ms: int) -> str:
    left_ms = producer.last_timestamp_ms + retention_ms - now_ms
    if left_ms <= 0:
        return "; retention has passed it"
    return f"; retention passes it in {spell(left_ms)} at most"


def _longer_than_retention(snapshot: Snapshot) -> Iterator[Finding]:
    """A transaction that may legally stay open longer than its messages are kept."""
    shortest: defaultdict[str, list[int]] = defaultdict(list)
    for transaction in snapshot.transactions or ():
        for topic in dict.fromkeys(topic for topic, _ in transaction.places):
            live = snapshot.topics.get(topic)
            if (
                live is not None
                and live.retention_ms is not None
                and transaction.timeout_ms > live.retention_ms
            ):
                shortest[transaction.transactional_id].append(live.retention_ms)
    for transactional_id, retentions in sorted(shortest.items()):
        yield finding(
            "HF411",
            Spot(resource=f"transactional id {plain(transactional_id)}"),
            f"its time-out is longer than a topic it writes to keeps messages ({spell(min(retentions))})",
            severity=Severity.WARNING,
            fix=Fix("transaction.timeout.ms well below retention.ms", "settings"),
        )

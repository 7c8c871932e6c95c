"""The checker: what a history says was lost, twice, out of order or seen though it should not have been.

    lost                 acknowledged, or let go by its program, and in the end in no log and kept nowhere; or in the
                         log, and a group's position has passed it although the group never handled it; or removed by
                         retention or compaction before a group had handled it
    unseen               acknowledged and never handed to a group that has read its topic to the end
    duplicated           in the log twice, or handled twice by one group
    inconsistent offset  one offset that held two messages, or a message elsewhere than its sender was told
    reordered            behind a message that its sender sent later; or handed to a reader after a later one
    aborted read         handed out although its transaction was rolled back, or is not decided
    torn transaction     of writes that belong together some are visible and some are not
    skipped poll         a reader went from one offset to a later one, and something lay between
    moved-back position  a group's position went back, or vanished, without being asked to
    zombie write         acknowledged to a writer that had been replaced when it sent

A send without an answer is *unknown*: it may be there or not, and neither is a violation; unless its program let go
of it. A history is void when what it was to show did not come about: a planned fault that did not fire, too few
successes. A void history proves nothing, whatever else is found in it. The rules look at a history and nothing else.

A history put in order for the rules: what was sent, what became of it, what the log holds, what readers did.

One pass over the events, no judgement. Acknowledgements of a transaction that was rolled back count for nothing: they
are left out here, once, so that no rule has to think of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from holdfast.lab.history import Event, History

Partition = tuple[str, int]
Place = tuple[str, int, int]


@dataclass
class Group:
    """What one group of readers did."""

    handled: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """How often, by message."""
    delivered: set[str] = field(default_factory=set)
    positions: dict[Partition, int] = field(default_factory=dict)
    """The last known position of each partition; −1: it has none."""
    ends: dict[str, dict[int | None, int | None]] = field(default_factory=lambda: defaultdict(dict))
    """Topics read to their ends: by partition (None: all of them), up to which offset (None: whatever there is)."""

    def saw(self, message: str) -> bool:
        return message in self.delivered or message in self.handled


@dataclass
class LogEnd:
    """What is known of a topic's log after everything: read whole, and what may have left it."""

    starts: dict[int | None, int] = field(default_factory=dict)
    is_compacted: bool = False

    def start_of(self, partition: int) -> int:
        return self.starts.get(partition, self.starts.get(None, 0))


@dataclass
class Facts:
    topic_of: dict[str, str] = field(default_factory=dict)
    """Where each message was to go."""
    sends: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    acks: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    failed: set[str] = field(default_factory=set)
    dropped: dict[str, str] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    stored: dict[str, list[Place]] = field(default_factory=lambda: defaultdict(list))
    log: dict[Partition, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    log_ends: dict[str, LogEnd] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=lambda: defaultdict(Group))
    units: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The messages of each transaction, or of writes that belong together."""
    outcomes: dict[str, str] = field(default_factory=dict)
    units_of: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    @property
    def sent(self) -> set[str]:
        return set(self.sends)

    @property
    def unknown(self) -> set[str]:
        return {each for each in self.sends if each not in self.acks and each not in self.failed}

    def is_rolled_back(self, message: str) -> bool:
        """Whether every transaction it was part of was rolled back."""
        units = self.units_of.get(message, set())
        return bool(units) and all(self.outcomes.get(unit) == "aborted" for unit in units)

    def removed_from(self, message: str) -> Place | None:
        """The place of a message that retention or compaction may have taken."""
        for ack in self.acks.get(message, ()):
            if (place := ack.place) is None or place[0] not in self.log_ends:
                continue
            end = self.log_ends[place[0]]
            if end.is_compacted or place[2] < end.start_of(place[1]):
                return place
        return None


def facts_of(history: History) -> Facts:
    facts = Facts()
    acks: list[Event] = []
    for event in history:
        kind, message = event.kind, event.id
        if kind == "send":
            facts.topic_of.setdefault(message, event.text("topic"))
            facts.sends[message].append(event)
            if txn := event.text("txn"):
                facts.units_of[message].add(txn)
        elif kind == "ack":
            acks.append(event)
        elif kind == "fail":
            facts.failed.add(message)
        elif kind == "drop":
            facts.dropped[message] = event.text("why")
        elif kind == "keep":
            facts.kept.add(message)
        elif kind == "begin":
            facts.units[event.text("txn")] = tuple(event.fields["ids"])
            for each in event.fields["ids"]:
                facts.units_of[each].add(event.text("txn"))
        elif kind == "end":
            facts.outcomes[event.text("txn")] = event.text("outcome")
        else:
            _note_log_or_reader(facts, event)
    _keep_what_counts(facts, acks)
    return facts


def _keep_what_counts(facts: Facts, acks: Iterable[Event]) -> None:
    for ack in acks:
        txn = ack.text("txn")
        if txn and facts.outcomes.get(txn) != "committed":
            continue
        if not txn and facts.is_rolled_back(ack.id):
            continue
        facts.acks[ack.id].append(ack)


def _note_log_or_reader(facts: Facts, event: Event) -> None:
    kind, place = event.kind, event.place
    topic, partition, offset = event.text("topic"), event.number("partition"), event.number("offset")
    if kind == "stored" and place is not None:
        facts.stored[event.id].append(place)
        facts.log[place[:2]][place[2]] = event.id
    elif kind == "log-end":
        end = facts.log_ends.setdefault(topic, LogEnd())
        end.starts[partition] = event.number("start") or 0
        end.is_compacted = end.is_compacted or event.fields.get("compacted") is True
    elif kind == "deliver":
        facts.groups[event.text("group")].delivered.add(event.id)
    elif kind == "handle":
        facts.groups[event.text("group")].handled[event.id] += 1
    elif kind in ("commit", "position") and place is not None:
        facts.groups[event.text("group")].positions[place[:2]] = place[2]
    elif kind == "read-end":
        facts.groups[event.text("group")].ends[topic][partition] = offset


SCHEMA_VERSION: Final = 1
LOST: Final = "lost"
UNSEEN: Final = "unseen"
DUPLICATED: Final = "duplicated"
INCONSISTENT: Final = "inconsistent offset"
REORDERED: Final = "reordered"
ABORTED_READ: Final = "aborted read"
TORN: Final = "torn transaction"
SKIPPED: Final = "skipped poll"
MOVED_BACK: Final = "moved-back position"
ZOMBIE: Final = "zombie write"


class Violation(NamedTuple):
    kind: str
    id: str
    """The message, or what else it is about: a transaction, a group's partition."""
    why: str


@dataclass(frozen=True)
class Judgement:
    counts: Mapping[str, int]
    """Of messages: sent, acknowledged, failed, unknown, dropped, kept, stored, delivered, handled."""
    violations: tuple[Violation, ...]
    void: tuple[str, ...] = ()
    """Why the history proves nothing."""
    partial: tuple[str, ...] = ()
    """Lines that could not be read."""

    def ids(self, kind: str) -> list[str]:
        """What is in violation of one kind, each once, in order."""
        return list(dict.fromkeys(each.id for each in self.violations if each.kind == kind))

    def count(self, name: str) -> int:
        """A count, or the number of violations of a kind."""
        return self.counts[name] if name in self.counts else len(self.ids(name))

    @property
    def verdict(self) -> str:
        if self.void:
            return "void"
        if self.violations:
            return "violated"
        return "partial" if self.partial else "clean"

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA_VERSION,
            "verdict": self.verdict,
            "counts": dict(self.counts),
            "violations": {kind: self.ids(kind) for kind in RULES},
            "reasons": [each._asdict() for each in self.violations],
            "void": list(self.void),
            "partial": list(self.partial),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Judgement:
        reasons = tuple(Violation(each["kind"], each["id"], each["why"]) for each in document["reasons"])
        return cls(dict(document["counts"]), reasons, tuple(document["void"]), tuple(document["partial"]))


def judge(history: History) -> Judgement:
    facts = facts_of(history)
    found: dict[Violation, None] = {}
    for kind, rule in RULES.items():
        for message, why in rule(facts, history):
            found.setdefault(Violation(kind, message, why))
    return Judgement(_counts(facts), tuple(found), tuple(_void(history, facts)), history.problems)


def _counts(facts: Facts) -> dict[str, int]:
    groups = facts.groups.values()
    return {
        "sent": len(facts.sent),
        "acknowledged": len(facts.acks),
        "failed": len(facts.failed - facts.acks.keys()),
        "unknown": len(facts.unknown),
        "dropped": len(facts.dropped),
        "kept": len(facts.kept),
        "stored": len(facts.stored),
        "delivered": len({each for group in groups for each in group.delivered}),
        "handled": len({each for group in groups for each in group.handled}),
    }


def _void(history: History, facts: Facts) -> Iterator[str]:
    fired = {event.text("what") for event in history.of("fault")}
    wanted = 1
    for plan in history.of("plan"):
        fault = plan.text("fault")
        if fault and fault not in fired:
            yield f"the fault did not fire: {fault}"
        wanted = max(wanted, plan.number("successes") or 0)
    handled = {each for group in facts.groups.values() for each in group.handled}
    succeeded = {*facts.acks, *facts.stored, *handled}
    if len(succeeded) < wanted:
        yield f"too few successes: {len(succeeded)} of {wanted}"


Found = Iterator[tuple[str, str]]


# ---------------------------------------------------------------- lost, unseen


def _lost(facts: Facts, _: History) -> Found:
    yield from _lost_in_the_log(facts)
    for name, group in facts.groups.items():
        for partition, position in group.positions.items():
            for offset, message in sorted(facts.log.get(partition, {}).items()):
                if offset < position and message not in group.handled and message not in facts.kept:
                    where = "{}-{}".format(*partition)
                    yield message, f"{name} stands at {position} of {where}; it is at {offset}, never handled"


def _lost_in_the_log(facts: Facts) -> Found:
    for message in {**facts.acks, **facts.dropped}:
        if message in facts.stored or message in facts.kept:
            continue
        places = {ack.text("topic") for ack in facts.acks.get(message, ())} - {""}
        topics = places or {facts.topic_of.get(message, "")}
        if not topics <= facts.log_ends.keys():
            continue
        removed = facts.removed_from(message)
        if removed is not None:
            for name, group in facts.groups.items():
                if message not in group.handled:
                    yield message, f"it was removed from {removed[0]}-{removed[1]} before {name} handled it"
        elif message in facts.acks:
            yield message, "it was acknowledged, and is not in the log"
        elif not facts.is_rolled_back(message):
            yield message, f"its program let go of it ({facts.dropped[message]}), and it is not in the log"


def _unseen(facts: Facts, history: History) -> Found:
    lost = {message for message, _ in _lost(facts, history)}
    for name, group in facts.groups.items():
        for topic, ends in group.ends.items():
            for message in facts.acks:
                if facts.topic_of.get(message) != topic or message in lost or message in facts.kept:
                    continue
                if not group.saw(message) and _was_reached(facts, message, topic, ends):
                    yield message, f"{name} has read {topic} to the end, and was never given it"


def _was_reached(facts: Facts, message: str, topic: str, ends: Mapping[int | None, int | None]) -> bool:
    """Whether a reader that reached these ends must have come by."""
    places = [place for place in facts.stored.get(message, ()) if place[0] == topic]
    if not places:
        return None in ends  # it was to be in that topic, and is not
    for _, partition, offset in places:
        if partition in ends or None in ends:
            end = ends.get(partition, ends.get(None))
            return end is None or offset < end
    return False


# ---------------------------------------------------------------- twice, elsewhere, out of order


def _duplicated(facts: Facts, _: History) -> Found:
    for message, places in facts.stored.items():
        by_topic: dict[str, set[tuple[int, int]]] = defaultdict(set)
        for topic, partition, offset in places:
            by_topic[topic].add((partition, offset))
        for topic, different in by_topic.items():
            if len(different) > 1:
                where = ", ".join(f"{partition}@{offset}" for partition, offset in sorted(different))
                yield message, f"it is in {topic} {len(different)} times: {where}"
    for name, group in facts.groups.items():
        for message, times in group.handled.items():
            if times > 1:
                yield message, f"{name} handled it {times} times"


def _inconsistent(facts: Facts, history: History) -> Found:
    held: dict[tuple[str, int, int], dict[str, None]] = defaultdict(dict)
    acks = [ack for each in facts.acks.values() for ack in each]
    for event in (*acks, *history.of("stored", "deliver")):
        if event.place is not None:
            held[event.place].setdefault(event.id)
    for (topic, partition, offset), messages in held.items():
        if len(messages) > 1:
            for message in messages:
                others = ", ".join(each for each in messages if each != message)
                yield message, f"{topic}-{partition}@{offset} held it and {others}"
    for ack in acks:
        place = ack.place
        if place is None:
            continue
        stored = [other for other in facts.stored.get(ack.id, ()) if other[0] == place[0]]
        if stored and place not in stored:
            yield ack.id, f"it was acknowledged at {place[1]}@{place[2]} of {place[0]}, and is not there"


def _reordered(facts: Facts, history: History) -> Found:
    number = {id(event): index for index, event in enumerate(history.of("send"))}
    for (topic, partition), log in facts.log.items():
        newest: dict[str, tuple[int, str]] = {}
        for offset, message in sorted(log.items()):
            sends = facts.sends.get(message)
            if not sends:
                continue
            before = newest.get(sends[0].actor, (-1, ""))
            # A message may be sent again on purpose: a copy is in order if any of its sends is.
            later = [number[id(send)] for send in sends if number[id(send)] >= before[0]]
            if later:
                newest[sends[0].actor] = (later[0], message)
            else:
                yield message, f"{topic}-{partition}@{offset}: behind {before[1]}, which was sent later"
    for key, turns in _turns(history).items():
        for turn in turns:
            highest = -1
            for event in turn.deliveries:
                offset = event.fields["offset"]
                if offset <= highest:
                    yield event.id, f"{key[0]} was given {key[2]}-{key[3]}@{offset} after {highest}"
                highest = max(highest, offset)


# ---------------------------------------------------------------- transactions


def _aborted_read(facts: Facts, history: History) -> Found:
    for event in history.of("deliver", "handle"):
        units = facts.units_of.get(event.id, set())
        ends = {facts.outcomes.get(unit) for unit in units}
        if not units or ends & {"committed", "unknown"}:
            continue
        state = "is not decided" if None in ends else "was rolled back"
        yield event.id, f"{event.text('group')} was given it, and its transaction {state}"


def _torn(facts: Facts, _: History) -> Found:
    for unit, messages in facts.units.items():
        # One that was never sent is in no log; the logs of the others must have been read.
        topics = {facts.topic_of[each] for each in messages if each in facts.topic_of}
        if not topics or not topics <= facts.log_ends.keys():
            continue
        visible = {each for each in messages if each in facts.stored}
        if facts.outcomes.get(unit) == "aborted":
            left = [each for each in visible if facts.is_rolled_back(each)]
            if left:
                yield unit, f"it was rolled back, and of it {', '.join(sorted(left))} can be read"
        elif visible and visible != set(messages):
            missing = sorted(set(messages) - visible)
            yield unit, f"{', '.join(sorted(visible))} can be read, {', '.join(missing)} cannot"


# ---------------------------------------------------------------- readers


@dataclass
class _Turn:
    """What one reader was given of one partition, from its assignment on."""

    start: int | None
    deliveries: list[Event]


def _turns(history: History) -> dict[tuple[str, str, str, int], list[_Turn]]:
    """By reader, group, topic and partition."""
    turns: dict[tuple[str, str, str, int], list[_Turn]] = defaultdict(list)
    for event in history.of("assign", "deliver"):
        key = (event.actor, event.text("group"), event.text("topic"), event.fields["partition"])
        if event.kind == "assign":
            turns[key].append(_Turn(event.number("offset"), []))
        else:
            if not turns[key]:
                turns[key].append(_Turn(None, []))
            turns[key][-1].deliveries.append(event)
    return turns


def _skipped(facts: Facts, history: History) -> Found:
    known: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    for acks in facts.acks.values():
        for ack in acks:
            if ack.place is not None:
                known[ack.place[:2]][ack.place[2]] = ack.id
    for (actor, _, topic, partition), turns in _turns(history).items():
        # What the log held, also where it was removed since.
        log = sorted({**known[topic, partition], **facts.log.get((topic, partition), {})}.items())
        for turn in turns:
            seen = {event.fields["offset"] for event in turn.deliveries}
            if not seen:
                continue
            start = min(seen) if turn.start is None else turn.start
            for offset, message in log:
                if start <= offset < max(seen) and offset not in seen:
                    after = min(each for each in seen if each > offset)
                    yield message, f"{actor} went on to {after} of {topic}-{partition}; it is at {offset}"


def _moved_back(_: Facts, history: History) -> Found:
    highest: dict[tuple[str, str, int], int] = {}
    for event in history.of("commit", "position", "reset"):
        group, topic, partition = event.text("group"), event.text("topic"), event.fields["partition"]
        key = (group, topic, partition)
        if event.kind == "reset":
            highest.pop(key, None)
            continue
        offset, before = event.fields["offset"], highest.get(key, -1)
        if offset < before:
            to = f"went back to {offset}" if offset >= 0 else "vanished"
            yield f"{group} {topic}-{partition}", f"its position was {before}, and {to}"
        highest[key] = max(before, offset)


def _zombie(_: Facts, history: History) -> Found:
    current: dict[str, int] = {}
    stale: dict[tuple[str, str], str] = {}
    for event in history.of("takeover", "send", "ack", "commit"):
        role, epoch = event.text("role"), event.number("epoch")
        if event.kind == "takeover":
            current[role] = max(current.get(role, epoch or 0), epoch or 0)
            continue
        is_stale = role != "" and epoch is not None and epoch < current.get(role, epoch)
        if event.kind == "send":
            stale.pop((event.actor, event.id), None)
            if is_stale:
                stale[event.actor, event.id] = f"epoch {epoch} of {role}, now at {current[role]}"
        elif event.kind == "ack" and (event.actor, event.id) in stale:
            yield event.id, f"{event.actor} wrote it in {stale[event.actor, event.id]}"
        elif event.kind == "commit" and is_stale:
            where = f"{event.text('group')} {event.text('topic')}-{event.fields['partition']}"
            yield where, f"{event.actor} committed in epoch {epoch} of {role}, now at {current[role]}"


Rule = Callable[[Facts, History], Found]
RULES: Final[Mapping[str, Rule]] = {
    LOST: _lost,
    UNSEEN: _unseen,
    DUPLICATED: _duplicated,
    INCONSISTENT: _inconsistent,
    REORDERED: _reordered,
    ABORTED_READ: _aborted_read,
    TORN: _torn,
    SKIPPED: _skipped,
    MOVED_BACK: _moved_back,
    ZOMBIE: _zombie,
}
"""Every kind of violation, in the order it is reported."""

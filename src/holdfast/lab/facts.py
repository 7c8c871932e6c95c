"""A history put in order for the rules: what was sent, what became of it, what the log holds, what readers did.

One pass over the events, no judgement. Acknowledgements of a transaction that was rolled back count for nothing: they
are left out here, once, so that no rule has to think of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

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
    said_unknown: set[str] = field(default_factory=set)
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
        elif kind == "unknown":
            facts.said_unknown.add(message)
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

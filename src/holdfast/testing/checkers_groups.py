"""What must hold of groups and their members: one owner at a time, and who was fenced stays out until it joins anew.

Classic groups (`GenerationAssigned`):
    double-owner         two members of one generation never own the same partition
    torn-generation      the members of one generation have parts of one assignment
KIP-848 groups (`PartitionsHeld`, `PartitionsGiven`):
    given-before-release no member is given a partition before its last owner has confirmed release or was fenced
    epoch-moved-back     a member's epoch never falls
    fenced-heartbeat     a member whose partition another one has, since it was fenced, is told so
Both:
    member-lost          the broker does not drop a member whose session has not run out

The observer does not see a member being fenced for its silence. It knows when the last heartbeat that the broker
took had left: until its patience has passed from then, the member holds what it was given.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.testing import history
from holdfast.testing.checkers_base import Checker, broken
from holdfast.testing.history import Partition


@dataclass(slots=True)
class _Generation:
    assignment: str
    owners: dict[Partition, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Member:
    alive_until_ms: int = -1
    """Until then the broker may not drop it; -1 when it is not a member as far as anybody knows."""
    epoch: int = -1
    fenced: bool = False
    """Another one has what it held, and it did not let go."""


@dataclass(slots=True)
class _Group:
    generations: dict[int, _Generation] = field(default_factory=dict)
    instances: dict[str, str] = field(default_factory=dict)
    """The member that each static instance was last."""
    last_generation: int = -1
    members: dict[str, _Member] = field(default_factory=dict)
    holders: dict[Partition, str] = field(default_factory=dict)

    def member(self, name: str) -> _Member:
        found = self.members.get(name)
        if found is None:
            found = self.members[name] = _Member()
        return found


class MembershipChecker(Checker):
    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        super().__init__(
            {
                history.GroupDeletionRequested: self._deletion_requested,
                history.GenerationAssigned: self._assigned,
                history.MemberAlive: self._alive,
                history.MemberDropped: self._dropped,
                history.MemberLeaving: self._leaving,
                history.PartitionsHeld: self._held,
                history.PartitionsGiven: self._given,
            }
        )

    def _of(self, group: str) -> _Group:
        return self._groups.setdefault(group, _Group())

    def is_fenced(self, group: str, member: str, generation: int) -> bool:
        """Whether what this member sends now, with this generation, must change nothing."""
        known = self._groups.get(group)
        if known is None or not member:
            return False
        return (member in known.members and known.members[member].fenced) or (
            0 <= generation < known.last_generation
        )

    def _deletion_requested(self, event: history.GroupDeletionRequested) -> None:
        self._groups.pop(event.group, None)

    # Classic groups

    def _assigned(self, event: history.GenerationAssigned) -> None:
        group = self._of(event.group)
        name = f"{event.member} in generation {event.generation} of {event.group}"
        generation = group.generations.setdefault(event.generation, _Generation(event.assignment))
        if generation.assignment != event.assignment:
            broken("torn-generation", f"{name} is told {event.assignment}; others, {generation.assignment}")
        owner = event.instance or event.member
        for partition in event.partitions:
            other = generation.owners.setdefault(partition, owner)
            if other != owner:
                broken("double-owner", f"{name} owns {partition}, and so does {other}")
        group.last_generation = max(group.last_generation, event.generation)
        if event.instance is not None:
            before = group.instances.get(event.instance)
            if before is not None and before != event.member:
                group.member(before).fenced = True
            group.instances[event.instance] = event.member

    # Sessions

    def _alive(self, event: history.MemberAlive) -> None:
        member = self._of(event.group).member(event.member)
        member.alive_until_ms = max(member.alive_until_ms, event.sent_at_ms + event.patience_ms)

    def _dropped(self, event: history.MemberDropped) -> None:
        group = self._of(event.group)
        member = group.member(event.member)
        if event.at_ms < member.alive_until_ms and not member.fenced:
            broken(
                "member-lost",
                f"{event.member} of {event.group} is told {event.error} at {event.at_ms}; "
                f"its session lasts until {member.alive_until_ms}",
            )
        self._forget(group, event.member)

    def _leaving(self, event: history.MemberLeaving) -> None:
        self._forget(self._of(event.group), event.member)

    def _forget(self, group: _Group, name: str) -> None:
        group.members.pop(name, None)
        for partition in [partition for partition, holder in group.holders.items() if holder == name]:
            del group.holders[partition]

    # KIP-848 groups

    def _held(self, event: history.PartitionsHeld) -> None:
        group = self._of(event.group)
        for partition, holder in list(group.holders.items()):
            if holder == event.member and partition not in event.partitions:
                del group.holders[partition]

    def _given(self, event: history.PartitionsGiven) -> None:
        group = self._of(event.group)
        member = group.member(event.member)
        name = f"{event.member} of {event.group}"
        if event.sent_epoch <= 0:
            member.fenced = False
            member.epoch = -1
        elif member.fenced:
            broken(
                "fenced-heartbeat",
                f"{name}, epoch {event.sent_epoch}, was taken for a member after it was fenced",
            )
        if event.epoch < member.epoch:
            broken("epoch-moved-back", f"{name}: epoch {event.epoch}, and was {member.epoch}")
        member.epoch = event.epoch
        for partition in event.partitions or ():
            self._give(group, event, partition)

    def _give(self, group: _Group, event: history.PartitionsGiven, partition: Partition) -> None:
        holder = group.holders.get(partition)
        if holder is not None and holder != event.member:
            before = group.member(holder)
            if event.at_ms < before.alive_until_ms:
                broken(
                    "given-before-release",
                    f"{event.member} of {event.group} is given {partition} at {event.at_ms}; {holder} has not let "
                    f"it go and is alive until {before.alive_until_ms}",
                )
            before.fenced = True
        group.holders[partition] = event.member

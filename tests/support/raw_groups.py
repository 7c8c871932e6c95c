"""Members of classic groups that say exactly what a test tells them, each over a connection of its own.

A JoinGroup or SyncGroup may have to wait for other members. `tell_join` and `tell_sync` send it and go on;
`answer` takes what was answered, or `PARKED` when nothing comes within a moment. A whole rebalance of members that
behave is `settle`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from tests.support.differential import Side

from holdfast.testing.wire_client import WireClient
from holdfast.wire.api_keys import DESCRIBE_GROUPS, HEARTBEAT, JOIN_GROUP, LEAVE_GROUP, SYNC_GROUP
from holdfast.wire.consumer_protocol import ConsumerAssignment, ConsumerSubscription, OwnedPartitions

PARKED: Final[Literal["parked"]] = "parked"
PARKED_AFTER_SECONDS: Final = 0.4
"""What was not answered for so long waits for something; answers that are due come within milliseconds."""
MEMBER_ID_REQUIRED: Final = 79
UNKNOWN_MEMBER_ID: Final = 25
WITH_ITS_ID: Final = " with its id"


def subscription(name: str, *topics: str, version: int = 1) -> bytes:
    """What a consumer says it wants to read; its name in the part that belongs to its assignor.

    Apache Kafka looks inside, and leaves members without an answer for good if what it finds makes no sense.
    """
    return ConsumerSubscription(topics=topics, user_data=name.encode() or None).encode(version)


def assignment(note: str, topic: str = "", *partitions: int) -> bytes:
    """What a leader gives a member to read, with a note."""
    given = (OwnedPartitions(topic, partitions),) if partitions else ()
    return ConsumerAssignment(assigned_partitions=given, user_data=note.encode() or None).encode(1)


class RawMember:
    """One member of one group. It remembers its id and generation from the answers it got."""

    def __init__(self, side: Side, group: str, name: str, *, version: int = 9, **defaults: Any) -> None:
        self._side = side
        self._client: WireClient = side.connect()
        self._pending: tuple[str, int, int, int] | None = None
        self.group = group
        self.name = name
        self.version = version
        """Of JoinGroup; the other APIs take theirs that goes with it."""
        self.member_id = ""
        self.generation = -1
        self.leader = ""
        self.members: list[str] = []
        self._defaults = {
            "session_timeout": 30_000,
            "rebalance_timeout": 30_000,
            "group_instance_id": None,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": subscription(name)}],
            **defaults,
        }

    # Sending and taking

    def tell(self, label: str, api_key: int, version: int, fields: Mapping[str, Any]) -> None:
        assert self._pending is None, f"{self.name} still waits for {self._pending}"
        correlation_id = self._client.tell(api_key, version, fields)
        self._pending = (label, api_key, version, correlation_id)

    def answer(self, *, patiently: bool = True) -> Any:
        """What the request under way was answered, noted down under its label; or PARKED."""
        assert self._pending is not None
        label, api_key, version, correlation_id = self._pending
        raw = self._client.receive_within(None if patiently else PARKED_AFTER_SECONDS)
        if raw is None:
            return PARKED
        decoded = raw if isinstance(raw, str) else self._client.decode(raw, api_key, version, correlation_id)
        if label.endswith(WITH_ITS_ID) and getattr(decoded, "error_code", 0) == UNKNOWN_MEMBER_ID:
            self._come_in_again()
            return self.answer(patiently=patiently)
        self._pending = None
        self._side.note(f"{self.name}: {label}", decoded)
        if api_key == JOIN_GROUP and not isinstance(decoded, str):
            self._joined(decoded)
        return decoded

    @property
    def is_waiting(self) -> bool:
        return self._pending is not None

    def ask(self, label: str, api_key: int, version: int, fields: Mapping[str, Any]) -> Any:
        self.tell(label, api_key, version, fields)
        return self.answer()

    def _joined(self, decoded: Any) -> None:
        if decoded.error_code in (0, MEMBER_ID_REQUIRED):
            self.member_id = decoded.member_id
        if decoded.error_code == 0:
            self.generation = decoded.generation_id
            self.leader = decoded.leader
            self.members = [each.member_id for each in decoded.members]

    def await_members(self, count: int) -> None:
        """Return when the broker counts so many, so that those who come over other connections come after them."""

        def are_there() -> bool:
            answer = self._side.client.ask(DESCRIBE_GROUPS, 5, {"groups": [self.group]})
            return len(answer.groups[0].members) == count

        self._side.wait_until(are_there)

    # The APIs

    def tell_join(self, label: str, **fields: Any) -> None:
        wanted = {"group_id": self.group, "member_id": self.member_id, **self._defaults, **fields}
        self.tell(label, JOIN_GROUP, fields.get("version", self.version), wanted)

    def join(self, label: str = "joins", **fields: Any) -> Any:
        self.tell_join(label, **fields)
        return self.answer()

    def come_in(self, label: str = "comes in") -> None:
        """Ask to join, with the id that the broker gives out first where it does; the answer is awaited later."""
        self.tell_join(label)
        if self.version >= 4 and not self.member_id and self._defaults["group_instance_id"] is None:
            found = self.answer()
            assert found.error_code == MEMBER_ID_REQUIRED, found
            self.tell_join(f"{label}{WITH_ITS_ID}")

    def _come_in_again(self) -> None:
        """Ask for another id and join with it, as if it had been the first.

        A group without members and positions is cleared away, in Apache Kafka even while somebody was given an id.
        """
        assert self._pending is not None
        label = self._pending[0]
        self._pending = None
        old, self.member_id = self.member_id, ""
        version = self.version
        wanted = {"group_id": self.group, "member_id": "", **self._defaults}
        self.member_id = self._client.ask(JOIN_GROUP, version, wanted).member_id
        self._side.normalise.rename("member", old, self.member_id)
        self.tell_join(label)

    def tell_sync(self, label: str, assignments: Mapping[str, bytes] | None = None, **fields: Any) -> None:
        wanted = {
            "group_id": self.group,
            "generation_id": self.generation,
            "member_id": self.member_id,
            "group_instance_id": self._defaults["group_instance_id"],
            "protocol_type": self._defaults["protocol_type"],
            "protocol_name": self._defaults["protocols"][0]["name"],
            "assignments": [
                {"member_id": name, "assignment": what} for name, what in (assignments or {}).items()
            ],
            **fields,
        }
        self.tell(label, SYNC_GROUP, fields.get("version", min(self.version, 5)), wanted)

    def sync(
        self, label: str = "syncs", assignments: Mapping[str, bytes] | None = None, **fields: Any
    ) -> Any:
        self.tell_sync(label, assignments, **fields)
        return self.answer()

    def heartbeat(self, label: str = "is alive", **fields: Any) -> Any:
        wanted = {
            "group_id": self.group,
            "generation_id": self.generation,
            "member_id": self.member_id,
            "group_instance_id": self._defaults["group_instance_id"],
            **fields,
        }
        return self.ask(label, HEARTBEAT, fields.get("version", min(self.version, 4)), wanted)

    def leave(self, label: str = "leaves", **fields: Any) -> Any:
        identity = {
            "member_id": self.member_id,
            "group_instance_id": self._defaults["group_instance_id"],
            **fields,
        }
        wanted = {"group_id": self.group, "member_id": identity["member_id"], "members": [identity]}
        return self.ask(label, LEAVE_GROUP, min(self.version, 5), wanted)


def settle(
    present: Sequence[RawMember], newcomers: Sequence[RawMember], label: str, *, noted: bool = True
) -> None:
    """One rebalance of members that behave: the newcomers come in, those present join again, all get something.

    Somebody has to open the group before others can wait for it.
    """
    if not present:
        opener, *newcomers = newcomers
        opener.come_in(f"{label}: opens")
        opener.answer()
        hand_out([opener], label, noted=noted)
        present = [opener]
        if not newcomers:
            return
    for count, member in enumerate(newcomers, start=len(present) + 1):
        member.come_in(f"{label}: joins")
        member.await_members(count)
    # It learns of them with its heartbeat; only when all who are present have joined again is anybody answered.
    for member in present:
        member.heartbeat(f"{label}: is told")
    for member in present:
        member.come_in(f"{label}: joins again")
    # A newcomer's own answer names it before the leader's tells of everybody.
    everybody = [*newcomers, *present]
    for member in everybody:
        member.answer()
    hand_out(everybody, label, noted=noted)


def hand_out(members: Sequence[RawMember], label: str, *, noted: bool = True) -> None:
    """Everybody syncs, the leader with an assignment for each."""
    given = {
        member.member_id: assignment(f"given to {member.name}: {label}" if noted else "")
        for member in members
    }
    for member in members:
        member.tell_sync(f"{label}: syncs", given if member.leader == member.member_id else None)
    for member in members:
        member.answer()

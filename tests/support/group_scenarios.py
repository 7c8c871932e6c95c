"""Scenario files: commands in, a readable trace out, reviewed like prose.

A scenario is a text file. A line is a command; the indented lines under it are what it led to. Lines that begin with
`#` and empty lines are for the reader.

    # The second member makes the first join again.
    join bob
    beat alice
      alice: REBALANCE_IN_PROGRESS

`check_scenario` runs the commands through an interpreter and compares the trace with the file, whole. When the
environment variable `HOLDFAST_SCENARIOS` is `write`, it writes the file anew instead: read the difference before you
believe it.

An interpreter is anything with `execute(verb, words, options) -> lines`. `options` are the words of the form
`name=value`; `words` are the others, in order, without the verb.

The language of scenarios about groups: people with short names join, sync, heartbeat, commit and leave.

    settings NAME=VALUE…             settings of the broker, from here on
    topic orders 4                   make a topic, or let it grow; `delete-topic orders`
    join ann [instance=i] [topics=a,b] [protocols=range,sticky] [type=consumer] [session=45s] [rebalance=5m] [version=9]
    sync ann ann=0,1 bob=2           from a leader with assignments, from others without
    beat ann [generation=3]
    leave ann bob | leave instance=i
    commit ann orders-0=5 [metadata=text] [generation=3] | commit - orders-0=5 (nobody's, generation -1)
    txn-commit 7 orders-0=5 [member=ann]     in the transaction of producer 7; `end-txn 7 commit|abort`
    fetch [stable=yes] | delete-offsets orders-0 | delete-group
    pass 3s | reload | compact | refuse CODE | accept
    describe | list [states=…] [types=…] | log

Every command takes `group=`, "group" unless said otherwise. A member that is asked to come back with an id keeps it;
ids are shown as names: the first of ann's as `ann`, the next as `ann/2`. `as=ann/1` speaks with an older one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import unified_diff
from pathlib import Path
from typing import Any, Protocol

from kio.schema.errors import ErrorCode
from tests.support.coordinator_worlds import GroupWorld

from holdfast.broker.groups.model import (
    CommitRequest,
    GroupType,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    LeavingMember,
    MemberProtocol,
    PartitionCommit,
    SyncReply,
    SyncRequest,
    TopicCommit,
    TransactionalCommit,
)
from holdfast.errors import ApiError
from holdfast.wire.batch import Record, build_batch, iterate_records, read_header
from holdfast.wire.consumer_protocol import ConsumerSubscription
from holdfast.wire.control_records import EndTransactionMarker
from holdfast.wire.coordinator_records import (
    GroupMetadataKey,
    GroupMetadataValue,
    OffsetCommitKey,
    OffsetCommitValue,
    decode_group_record,
)

REWRITE_VARIABLE = "HOLDFAST_SCENARIOS"
INDENT = "  "


class Interpreter(Protocol):
    def execute(self, verb: str, words: Sequence[str], options: Mapping[str, str]) -> Iterable[str]:
        """Carry out one command; what came of it, line by line."""
        ...


def scenario_files(directory: Path) -> list[Path]:
    """Every scenario of a directory, for `pytest.mark.parametrize`."""
    found = sorted(directory.glob("*.txt"))
    if not found:
        raise FileNotFoundError(f"no scenario in {directory}")
    return found


def check_scenario(path: Path, interpreter: Interpreter) -> None:
    written = path.read_text()
    traced = "\n".join(run_scenario(written, interpreter)) + "\n"
    if os.environ.get(REWRITE_VARIABLE) == "write":
        path.write_text(traced)
        return
    if traced != written:
        difference = unified_diff(
            written.splitlines(), traced.splitlines(), "as written", "as it is", lineterm="", n=6
        )
        raise AssertionError(f"{path.name} went another way:\n" + "\n".join(difference))


def run_scenario(text: str, interpreter: Interpreter) -> Iterator[str]:
    """The scenario as it goes: its comments and commands, each with what it leads to."""
    for line in text.splitlines():
        if line.startswith(INDENT) and line.strip():
            continue
        yield line.rstrip()
        command = line.split("#", 1)[0].strip() if not line.startswith("#") else ""
        if command:
            verb, words, options = parse_command(command)
            yield from (INDENT + said for said in interpreter.execute(verb, words, options))


def parse_command(command: str) -> tuple[str, list[str], dict[str, str]]:
    verb, *rest = command.split()
    words = [word for word in rest if "=" not in word]
    options = dict(word.split("=", 1) for word in rest if "=" in word)
    return verb, words, options


MEMBER_ID = re.compile(r"((\w+)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")
UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def duration_ms(text: str) -> int:
    for unit in ("ms", "s", "m", "h", "d"):
        number = text.removesuffix(unit)
        if text.endswith(unit) and number.isdigit():
            return int(number) * UNITS_MS[unit]
    raise ValueError(f"{text!r} is no duration")


class Person:
    """Somebody who takes part in a group and remembers what it was told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.member_id = ""
        self.instance_id: str | None = None
        self.generation = -1
        self.protocol_type = "consumer"
        self.protocol: str | None = None


class GroupInterpreter:
    def __init__(self, world: GroupWorld | None = None) -> None:
        self.world = world or GroupWorld()
        self.people: dict[tuple[str, str], Person] = {}
        self.settings: dict[str, str] = {}
        self._shown: dict[str, str] = {}
        self._names: dict[str, int] = {}
        self._instances: dict[str, str] = {}
        self._lines: list[str] = []
        self._logged = 0

    def execute(self, verb: str, words: Sequence[str], options: Mapping[str, str]) -> Iterable[str]:
        self._lines = []
        action: Callable[..., None] = getattr(self, "do_" + verb.replace("-", "_"))
        action(list(words), dict(options))
        return self._lines

    def say(self, text: str) -> None:
        for member_id, name in MEMBER_ID.findall(text):
            self._show(member_id, self._instances.get(name, name))
        for member_id in sorted(self._shown, key=len, reverse=True):
            text = text.replace(member_id, self._shown[member_id])
        self._lines.append(text)

    # Who is who

    def person(self, name: str, group: str) -> Person:
        return self.people.setdefault((name, group), Person(name))

    def id_of(self, name: str, group: str) -> str:
        """The member id of a name, or of a name with a number: one it had before."""
        for member_id, shown in self._shown.items():
            if name in (shown, shown + "/1") and "/" in name:
                return member_id
        person = self.people.get((name, group))
        return person.member_id if person is not None else name

    def _learn(self, person: Person, member_id: str) -> None:
        if member_id:
            self._show(member_id, person.name)
            person.member_id = member_id

    def _show(self, member_id: str, name: str) -> None:
        if member_id not in self._shown:
            count = self._names[name] = self._names.get(name, 0) + 1
            self._shown[member_id] = name if count == 1 else f"{name}/{count}"

    # The world

    def do_settings(self, words: list[str], options: dict[str, str]) -> None:
        self.settings |= {name.replace(".", "_"): value for name, value in options.items()}
        self.world.configure(**self.settings)

    def do_topic(self, words: list[str], options: dict[str, str]) -> None:
        name, partitions = words
        if self.world.topics.by_name(name) is None:
            self.world.topics.create(name, int(partitions))
        else:
            self.world.topics.grow(name, int(partitions))

    def do_delete_topic(self, words: list[str], options: dict[str, str]) -> None:
        self.world.topics.delete(words[0])

    def do_pass(self, words: list[str], options: dict[str, str]) -> None:
        self.world.advance(duration_ms(words[0]))

    def do_reload(self, words: list[str], options: dict[str, str]) -> None:
        self.world.reload()

    def do_compact(self, words: list[str], options: dict[str, str]) -> None:
        self.world.journal.compact()
        self._logged = len(self.world.journal.batches)

    def do_refuse(self, words: list[str], options: dict[str, str]) -> None:
        self.world.journal.refuses = ErrorCode[words[0].lower()]

    def do_accept(self, words: list[str], options: dict[str, str]) -> None:
        self.world.journal.refuses = None

    # The classic protocol

    def do_join(self, words: list[str], options: dict[str, str]) -> None:
        (name,) = words
        group = options.get("group", "group")
        person = self.person(name, group)
        person.instance_id = options.get("instance", person.instance_id)
        if person.instance_id is not None:
            self._instances[person.instance_id] = name
        person.protocol_type = options.get("type", person.protocol_type)
        if "restarted" in options:
            person.member_id = ""
        version = int(options.get("version", "9"))
        metadata = options["metadata"].encode() if "metadata" in options else self.join_metadata(options)
        request = JoinRequest(
            group,
            self.id_of(options.get("as", name), group),
            person.instance_id,
            name,
            "/10.0.0.9",
            duration_ms(options.get("session", "45s")),
            duration_ms(options.get("rebalance", "5m")),
            person.protocol_type,
            tuple(
                MemberProtocol(protocol, metadata)
                for protocol in options.get("protocols", "range").split(",")
                if protocol
            ),
            version >= 4,
            version >= 9,
        )
        self.world.coordinator.join(request, lambda reply: self._joined(person, reply), self.world.now)

    def join_metadata(self, options: Mapping[str, str]) -> bytes:
        topics = tuple(filter(None, options.get("topics", "").split(",")))
        return ConsumerSubscription(topics=topics).encode()

    def assigned(self, assignment: bytes) -> str:
        """An assignment as a scenario's leader writes it."""
        return assignment.decode() or "nothing"

    def _joined(self, person: Person, reply: JoinReply) -> None:
        if reply.error not in (ErrorCode.none, ErrorCode.member_id_required):
            self.say(f"{person.name}: {reply.error.name.upper()}")
            if reply.error is ErrorCode.unknown_member_id:
                person.member_id = ""
            return
        self._learn(person, reply.member_id)
        if reply.error is not ErrorCode.none:
            self.say(f"{person.name}: {reply.error.name.upper()} {reply.member_id}")
            return
        person.generation, person.protocol = reply.generation, reply.protocol_name
        text = f"{person.name}: joined generation {reply.generation}, {reply.protocol_name}, led by {reply.leader}"
        if reply.members:
            text += ", with " + " ".join(member.member_id for member in reply.members)
        self.say(text + (", skip the assignment" if reply.skip_assignment else ""))

    def do_sync(self, words: list[str], options: dict[str, str]) -> None:
        (name,) = words
        group = options.pop("group", "group")
        person = self.person(name, group)
        generation = int(options.pop("generation", person.generation))
        protocol = options.pop("protocol", person.protocol)
        member_id = self.id_of(options.pop("as", name), group)
        assignments = tuple((self.id_of(who, group), part.encode()) for who, part in options.items())
        request = SyncRequest(
            group, generation, member_id, person.instance_id, person.protocol_type, protocol, assignments
        )
        self.world.coordinator.sync(request, lambda reply: self._synced(person, reply), self.world.now)

    def _synced(self, person: Person, reply: SyncReply) -> None:
        if reply.error is ErrorCode.none:
            self.say(f"{person.name}: assigned {self.assigned(reply.assignment)}")
        else:
            self.say(f"{person.name}: {reply.error.name.upper()}")

    def do_beat(self, words: list[str], options: dict[str, str]) -> None:
        group = options.get("group", "group")
        for name in words:
            person = self.person(name, group)
            generation = int(options.get("generation", person.generation))
            member_id = self.id_of(options.get("as", name), group)
            request = HeartbeatRequest(group, generation, member_id, person.instance_id)
            self.say(f"{name}: {self.world.coordinator.heartbeat(request, self.world.now).name.upper()}")

    def do_leave(self, words: list[str], options: dict[str, str]) -> None:
        group = options.get("group", "group")
        leaving = [
            LeavingMember(
                self.id_of(options.get("as", name), group), self.person(name, group).instance_id, None
            )
            for name in words
        ]
        if "instance" in options:
            leaving.append(LeavingMember("", options["instance"]))
        reply = self.world.coordinator.leave(LeaveRequest(group, tuple(leaving)), self.world.now)
        if reply.error is not ErrorCode.none:
            self.say(reply.error.name.upper())
        for member, error in reply.members:
            self.say(f"{member.member_id or member.group_instance_id}: {error.name.upper()}")

    # Positions

    def _commits(self, options: Mapping[str, str], metadata: str) -> tuple[TopicCommit, ...]:
        topics: dict[str, list[PartitionCommit]] = {}
        for place, offset in options.items():
            topic, _, index = place.rpartition("-")
            if topic and index.isdigit():
                commit = PartitionCommit(int(index), int(offset), -1, metadata)
                topics.setdefault(topic, []).append(commit)
        return tuple(
            TopicCommit(topic, facts.topic_id, tuple(commits))
            for topic, commits in topics.items()
            if (facts := self.world.topics.by_name(topic)) is not None
        )

    def do_commit(self, words: list[str], options: dict[str, str]) -> None:
        (name,) = words
        group = options.get("group", "group")
        person = Person("-") if name == "-" else self.person(name, group)
        request = CommitRequest(
            group,
            "" if name == "-" else self.id_of(options.get("as", name), group),
            person.instance_id,
            int(options.get("generation", person.generation)),
            self._commits(options, options.get("metadata", "")),
            duration_ms(options["retention"]) if "retention" in options else -1,
        )
        self._outcomes(lambda: self.world.coordinator.commit(request, self.world.now))

    def do_txn_commit(self, words: list[str], options: dict[str, str]) -> None:
        group = options.get("group", "group")
        name = options.get("member")
        person = self.person(name, group) if name else Person("-")
        request = TransactionalCommit(
            group,
            self.id_of(name, group) if name else "",
            person.instance_id,
            int(options.get("generation", person.generation)),
            self._commits(options, options.get("metadata", "")),
            int(words[0]),
            0,
        )
        self._outcomes(lambda: self.world.coordinator.commit_in_transaction(request, self.world.now))

    def do_end_txn(self, words: list[str], options: dict[str, str]) -> None:
        producer_id, outcome = words
        marker = EndTransactionMarker(outcome == "commit", 0)
        self.world.journal.batches.append(
            build_batch(
                [Record(0, 0, marker.encode_key(), marker.encode_value())],
                producer_id=int(producer_id),
                producer_epoch=0,
                is_transactional=True,
                is_control=True,
            )
        )
        self.world.coordinator.end_transaction(int(producer_id), marker.is_commit, self.world.now)

    def do_delete_offsets(self, words: list[str], options: dict[str, str]) -> None:
        places = [(place.rpartition("-")[0], int(place.rpartition("-")[2])) for place in words]
        group = options.get("group", "group")
        self._outcomes(lambda: self.world.coordinator.delete_offsets(group, places, self.world.now))

    def _outcomes(self, ask: Callable[[], Mapping[tuple[str, int], ErrorCode]]) -> None:
        try:
            outcomes = ask()
        except ApiError as error:
            self.say(error.code.name.upper())
            return
        wrong = [f"{topic}-{index}: {code.name.upper()}" for (topic, index), code in outcomes.items() if code]
        self.say(", ".join(wrong) or "NONE")

    def do_fetch(self, words: list[str], options: dict[str, str]) -> None:
        group = options.get("group", "group")
        coordinator = self.world.coordinator
        stable = options.get("stable") == "yes"
        places = coordinator.offsets.of_group(group).keys() | coordinator.offsets.pending_of(group)
        for topic, index in sorted(places):
            error, position = coordinator.committed(group, topic, index, require_stable=stable)
            if position is None:
                self.say(f"{topic}-{index}: {error.name.upper() if error else 'nothing'}")
            else:
                self.say(f"{topic}-{index}: {position.offset} {position.metadata}".rstrip())

    # Looking

    def do_delete_group(self, words: list[str], options: dict[str, str]) -> None:
        def delete() -> dict[tuple[str, int], ErrorCode]:
            self.world.coordinator.delete(options.get("group", "group"), self.world.now)
            return {}

        self._outcomes(delete)

    def do_describe(self, words: list[str], options: dict[str, str]) -> None:
        try:
            described = self.world.coordinator.describe(options.get("group", "group"))
        except ApiError as error:
            self.say(error.code.name.upper())
            return
        self.say(f"{described.state} {described.protocol_type or '-'} {described.protocol or '-'}")
        for member in described.members:
            instance = f" ({member.group_instance_id})" if member.group_instance_id else ""
            self.say(f"{INDENT}{member.member_id}{instance}: {self.assigned(member.assignment)}")

    def do_list(self, words: list[str], options: dict[str, str]) -> None:
        states = [state.lower() for state in options.get("states", "").split(",") if state]
        types = [GroupType(kind) for kind in options.get("types", "").split(",") if kind]
        for group in self.world.coordinator.list(states, types):
            self.say(f"{group.group_id} {group.type.value} {group.state} {group.protocol_type or '-'}")

    def do_log(self, words: list[str], options: dict[str, str]) -> None:
        """What was recorded since the last look."""
        batches = self.world.journal.batches
        for batch in batches[self._logged :]:
            header = read_header(batch)
            if header.is_control:
                self.say(f"marker of producer {header.producer_id}")
                continue
            by = f" in the transaction of {header.producer_id}" if header.is_transactional else ""
            for record in iterate_records(batch):
                self.say(self._record(*decode_group_record(record.key, record.value)) + by)
        self._logged = len(batches)

    def _record(self, key: Any, value: Any) -> str:
        if isinstance(key, OffsetCommitKey):
            place = f"{key.group} {key.topic}-{key.partition}"
            return f"{place}: {value.offset}" if isinstance(value, OffsetCommitValue) else f"{place}: gone"
        if isinstance(key, GroupMetadataKey):
            if not isinstance(value, GroupMetadataValue):
                return f"{key.group}: gone"
            members = "".join(
                f", {member.member_id} has {member.assignment.decode() or 'nothing'}"
                for member in value.members
            )
            return f"{key.group}: generation {value.generation}{members}"
        return f"{type(key).__name__}: {'gone' if value is None else value}"

"""Data directories that earlier versions left: everything in them is served, and everything goes on from there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode
from tests.golden.opening import (
    EARLIEST,
    GENERATIONS,
    LATEST,
    PACKED,
    StoppedClock,
    broker_at,
    bytes_of,
    expected_of,
    fetch,
    fetch_all,
    offset_at,
    produce,
    text_of,
    unpack,
)

from holdfast.broker.dump.batches import DumpOptions
from holdfast.broker.dump.path import dump_path
from holdfast.real import RealFileSystem
from holdfast.saying import Level, Line
from holdfast.testing.committed_reader import read_through, whole_batches
from holdfast.testing.wire_client import WireClient
from holdfast.wire.api_keys import (
    CONSUMER_GROUP_DESCRIBE,
    CONSUMER_GROUP_HEARTBEAT,
    DESCRIBE_CONFIGS,
    DESCRIBE_GROUPS,
    DESCRIBE_TRANSACTIONS,
    END_TXN,
    HEARTBEAT,
    INIT_PRODUCER_ID,
    LIST_GROUPS,
    METADATA,
    OFFSET_FETCH,
)
from holdfast.wire.batch import HEADER, Record, build_batch, iterate_records

pytestmark = pytest.mark.xdist_group("golden")

ARCHIVES = [path for generation in GENERATIONS for path in sorted(generation.glob(f"broker-*{PACKED}"))]
KILLED = [path for path in ARCHIVES if path.name.startswith("broker-killed")]
SEED = 4711
TOPIC, BROKER = 2, 4
INTERNAL = {"__consumer_offsets", "__transaction_state"}
COMMITTED_FATES = ("plain", "committed")


def name_of(archive: Path) -> str:
    return f"{archive.parent.name}-{archive.name.removesuffix(PACKED)}"


class Opened(NamedTuple):
    client: WireClient
    directory: Path
    archive: Path
    expected: Any
    said: list[str]

    def ask(self, api_key: int, version: int, **fields: Any) -> Any:
        return self.client.ask(api_key, version, fields)

    def partitions(self) -> Iterator[tuple[str, int, Any]]:
        for topic, described in self.expected["topics"].items():
            for number, partition in enumerate(described["partitions"]):
                yield topic, number, partition


@contextmanager
def started(archive: Path, directory: Path, boot_id: str | None = None) -> Iterator[Opened]:
    expected = expected_of(archive)
    said: list[str] = []
    log_dirs = ",".join(str(directory / each) for each in expected["log_dirs"])
    with (
        broker_at(
            StoppedClock(expected["clock_ms"]),
            log_dirs,
            boot_id=boot_id or expected["boot_id"],
            seed=SEED,
            settings=expected["settings"],
            said=said,
        ) as broker,
        WireClient(broker.bootstrap_servers) as client,
    ):
        yield Opened(client, directory, archive, expected, said)


@pytest.fixture(
    scope="module",
    params=[(archive, boot) for archive in ARCHIVES for boot in ("same boot", "another boot")],
    ids=lambda param: f"{name_of(param[0])}-{param[1].replace(' ', '-')}",
)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """A golden directory under the broker, only to be looked at; after a kill, and after the machine went down."""
    archive, boot = request.param
    directory = tmp_path_factory.mktemp("golden")
    unpack(archive, directory)
    with started(archive, directory, None if boot == "same boot" else boot) as broker:
        yield broker


# Looking


def test_every_batch_is_served_byte_for_byte(opened: Opened, tmp_path: Path) -> None:
    unpack(opened.archive, tmp_path)
    for topic, number, _ in opened.partitions():
        (home,) = tmp_path.glob(f"*/{topic}-{number}")
        stored = b"".join(path.read_bytes() for path in sorted(home.glob("*.log")))
        served = b"".join(batch for _, batch in fetch_all(opened.client, topic, number))
        at = stored.find(served)
        assert at >= 0, f"{topic}-{number}"
        # What lies in front is below the first offset, what lies behind was written ahead or torn.
        batches_before = [header.next_offset for header, _ in whole_batches(stored[:at])]
        start = opened.expected["topics"][topic]["partitions"][number]["start"]
        assert all(offset <= start for offset in batches_before), f"{topic}-{number}"
        behind = stored[at + len(served) :]
        torn = bytes_of(opened.expected["torn"].get(f"{topic} {number}")) or b""
        assert behind.rstrip(b"\0") in (b"", torn.rstrip(b"\0")), f"{topic}-{number}"


def test_every_record_is_the_one_that_was_sent(opened: Opened) -> None:
    for topic, number, partition in opened.partitions():
        found = [
            {
                "offset": header.base_offset + record.offset_delta,
                "timestamp": header.max_timestamp
                if header.is_log_append_time
                else header.base_timestamp + record.timestamp_delta,
                "key": text_of(record.key),
                "value": text_of(record.value),
                "headers": [[name, text_of(value)] for name, value in record.headers],
            }
            for header, batch in fetch_all(opened.client, topic, number)
            if not header.is_control
            for record in iterate_records(batch)
            if header.base_offset + record.offset_delta >= partition["start"]
        ]
        wanted = [
            {name: each[name] for name in ("offset", "timestamp", "key", "value", "headers")}
            for each in partition["records"]
            if each["offset"] >= partition["start"]
        ]
        assert found == wanted, f"{topic}-{number}"
        assert offset_at(opened.client, topic, number, EARLIEST) == partition["start"]
        assert offset_at(opened.client, topic, number, LATEST) == partition["end"]


def test_read_committed_shows_what_was_committed_and_stops_at_what_is_open(opened: Opened) -> None:
    is_open = 0
    for topic, number, partition in opened.partitions():
        undecided = [each["offset"] for each in partition["records"] if each["fate"] == "open"]
        stable = min([partition["end"], *undecided])
        shown = read_through(
            lambda offset, topic=topic, number=number: fetch(  # type: ignore[misc]
                opened.client, topic, number, offset, committed=True
            ),
            partition["start"],
        )
        assert [(each.offset, text_of(each.value)) for each in shown] == [
            (each["offset"], each["value"])
            for each in partition["records"]
            if partition["start"] <= each["offset"] < stable and each["fate"] in COMMITTED_FATES
        ], f"{topic}-{number}"
        assert offset_at(opened.client, topic, number, LATEST, committed=True) == stable
        is_open += bool(undecided)
    assert is_open == (2 if opened.archive in KILLED else 0)


def test_topics_have_their_ids_partitions_and_settings(opened: Opened) -> None:
    topics = opened.expected["topics"]
    found = {topic.name: topic for topic in opened.ask(METADATA, 12, topics=None).topics}
    assert found.keys() == topics.keys() | INTERNAL
    for name, described in topics.items():
        assert found[name].topic_id == UUID(described["id"]), name
        assert {each.partition_index for each in found[name].partitions} == set(
            range(len(described["partitions"]))
        )
        assert all(each.leader_id == 1 and not each.error_code for each in found[name].partitions)
        assert own_settings(opened, TOPIC, name) == described["configs"]
    for name, settings in opened.expected["brokers"].items():
        assert own_settings(opened, BROKER, name).items() >= settings.items()


def own_settings(opened: Opened, kind: int, name: str) -> dict[str, str]:
    """What was set for this resource itself."""
    asked = {"resource_type": kind, "resource_name": name, "configuration_keys": None}
    (found,) = opened.ask(DESCRIBE_CONFIGS, 4, resources=[asked], include_synonyms=True).results
    own = {TOPIC: (1,), BROKER: (2, 3)}[kind]
    return {each.name: each.value for each in found.configs if each.config_source in own}


def test_groups_have_their_positions(opened: Opened) -> None:
    for group, topics in opened.expected["positions"].items():
        assert positions(opened, group) == topics, group
    listed = {each.group_id for each in opened.ask(LIST_GROUPS, 5).groups}
    assert listed == {
        group for kind in ("positions", "classic", "consumer") for group in opened.expected[kind]
    }


def positions(opened: Opened, group: str) -> dict[str, dict[str, list[Any]]]:
    asked = {"group_id": group, "topics": None}
    (found,) = opened.ask(OFFSET_FETCH, 9, groups=[asked], require_stable=False).groups
    return {
        topic.name: {
            str(each.partition_index): [each.committed_offset, each.metadata] for each in topic.partitions
        }
        for topic in found.topics
    }


def test_groups_are_in_their_states_with_their_members(opened: Opened) -> None:
    for group, known in opened.expected["classic"].items():
        (found,) = opened.ask(DESCRIBE_GROUPS, 5, groups=[group]).groups
        assert found.group_state == known["state"], group
        if "member_id" in known:
            (member,) = found.members
            assert (member.member_id, member.group_instance_id) == (
                known["member_id"],
                known["group_instance_id"],
            )
            assert text_of(member.member_assignment) == known["assignment"]
            assert found.protocol_data == known["protocol"]
    for group, known in opened.expected["consumer"].items():
        (described,) = opened.ask(CONSUMER_GROUP_DESCRIBE, 1, group_ids=[group]).groups
        assert (described.group_state, described.group_epoch) == (known["state"], known["epoch"]), group
        if "member_id" in known:
            (one,) = described.members
            assert (one.member_id, one.instance_id) == (known["member_id"], known["instance_id"])
            held = {str(each.topic_id): list(each.partitions) for each in one.assignment.topic_partitions}
            assert held == known["assignment"]


def test_transactions_are_in_their_states(opened: Opened) -> None:
    for transactional_id, known in opened.expected["transactions"].items():
        (found,) = opened.ask(
            DESCRIBE_TRANSACTIONS, 0, transactional_ids=[transactional_id]
        ).transaction_states
        assert (found.transaction_state, found.producer_id, found.producer_epoch) == (
            known["state"],
            known["producer_id"],
            known["epoch"],
        ), transactional_id


@pytest.mark.parametrize("archive", ARCHIVES, ids=name_of)
def test_every_file_can_be_dumped(archive: Path, tmp_path: Path) -> None:
    """`dump-log` knows every file of every version, and finds them sound."""
    unpack(archive, tmp_path)
    torn = expected_of(archive)["torn"] if archive in KILLED else {}
    fs, options = RealFileSystem(), DumpOptions()
    for home in sorted({path.parent for path in tmp_path.rglob("*") if path.is_file()}):
        findings = [event for event in dump_path(fs, str(home), options) if event["type"] == "finding"]
        is_torn = any(home.name == place.replace(" ", "-") for place in torn)
        assert bool(findings) == is_torn, (home, findings)


# Going on


@pytest.fixture(params=ARCHIVES, ids=name_of)
def going_on(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    unpack(request.param, tmp_path)
    with started(request.param, tmp_path) as broker:
        yield broker


def test_producers_are_recognised_and_go_on(going_on: Opened) -> None:
    for place, known in going_on.expected["producers"].items():
        topic, number = place.split()
        batch = bytes_of(known["last_batch"])
        assert batch is not None
        answer = produce(going_on.client, topic, int(number), batch)
        assert (answer.error_code, answer.base_offset) == (0, known["last_offset"])
        end = offset_at(going_on.client, topic, int(number), LATEST)
        assert end == going_on.expected["topics"][topic]["partitions"][int(number)]["end"]

        def following(sequence: int, known: Any = known) -> bytes:
            return build_batch(
                [Record(0, 0, b"key", b"next")],
                base_timestamp=going_on.expected["clock_ms"],
                producer_id=known["producer_id"],
                producer_epoch=known["producer_epoch"],
                base_sequence=sequence,
            )

        behind_a_gap = produce(going_on.client, topic, int(number), following(known["next_sequence"] + 3))
        assert behind_a_gap.error_code == ErrorCode.out_of_order_sequence_number
        assert (
            produce(going_on.client, topic, int(number), following(known["next_sequence"])).base_offset == end
        )


def test_no_producer_id_is_given_twice(going_on: Opened) -> None:
    known = {each["producer_id"] for each in going_on.expected["transactions"].values()}
    known |= {
        HEADER.unpack_from(batch)[9]
        for topic, number, _ in going_on.partitions()
        for _, batch in fetch_all(going_on.client, topic, number)
    }
    answer = going_on.ask(
        INIT_PRODUCER_ID,
        5,
        transactional_id=None,
        transaction_timeout=60_000,
        producer_id=-1,
        producer_epoch=-1,
    )
    assert answer.producer_id > max(known) >= 0


@pytest.mark.parametrize("archive", ARCHIVES, ids=name_of)
def test_what_was_opened_is_stopped_and_opened_again(archive: Path, tmp_path: Path) -> None:
    """Whatever opening converts, it leaves a directory that is opened as well; and nothing is amiss with either."""
    unpack(archive, tmp_path)
    with started(archive, tmp_path) as first:
        before = everything(first)
    with started(archive, tmp_path) as second:
        assert everything(second) == before
    torn = first.expected["torn"] if archive in KILLED else {}
    assert (len(warnings(first)), warnings(second)) == (len(torn), []), first.said
    for place, data in torn.items():
        (home,) = tmp_path.glob(f"*/{place.replace(' ', '-')}")
        assert any("never acknowledged" in line and str(home) in line for line in warnings(first))
        assert bytes_of(data) in [path.read_bytes() for path in home.glob("*.cut")]


def warnings(opened: Opened) -> list[str]:
    """What a broker that has stopped said of something that went wrong."""
    return [line for line in opened.said if Line.of(line).level >= Level.WARN]


def everything(opened: Opened) -> Any:
    batches = {
        (topic, number): [batch for _, batch in fetch_all(opened.client, topic, number)]
        for topic, number, _ in opened.partitions()
    }
    return batches, {group: positions(opened, group) for group in opened.expected["positions"]}


# What a kill interrupted


@pytest.fixture(params=KILLED, ids=name_of)
def after_kill(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    unpack(request.param, tmp_path)
    with started(request.param, tmp_path) as broker:
        yield broker


def test_members_that_were_there_still_are(after_kill: Opened) -> None:
    for group, known in after_kill.expected["classic"].items():
        answer = after_kill.ask(
            HEARTBEAT,
            4,
            group_id=group,
            generation_id=known["generation"],
            member_id=known["member_id"],
            group_instance_id=known["group_instance_id"],
        )
        assert ErrorCode(answer.error_code) is ErrorCode.none, group
    for group, known in after_kill.expected["consumer"].items():
        answer = after_kill.ask(
            CONSUMER_GROUP_HEARTBEAT,
            1,
            group_id=group,
            member_id=known["member_id"],
            member_epoch=known["epoch"],
            instance_id=known["instance_id"],
            rebalance_timeout=-1,
        )
        assert (ErrorCode(answer.error_code), answer.member_epoch) == (ErrorCode.none, known["epoch"]), group


@pytest.mark.parametrize("is_commit", [True, False], ids=["committed", "aborted"])
def test_an_open_transaction_is_ended_by_its_producer(after_kill: Opened, is_commit: bool) -> None:
    (transactional_id,) = (
        name for name, known in after_kill.expected["transactions"].items() if known["state"] == "Ongoing"
    )
    known = after_kill.expected["transactions"][transactional_id]
    (group,) = after_kill.expected["pending"]
    asked = [{"group_id": group, "topics": None}]
    (pending,) = after_kill.ask(OFFSET_FETCH, 9, groups=asked, require_stable=True).groups
    codes = {each.error_code for topic in pending.topics for each in topic.partitions}
    assert ErrorCode.unstable_offset_commit in codes

    answer = after_kill.ask(
        END_TXN,
        5,
        transactional_id=transactional_id,
        producer_id=known["producer_id"],
        producer_epoch=known["epoch"],
        committed=is_commit,
    )
    assert ErrorCode(answer.error_code) is ErrorCode.none
    for topic, number, partition in after_kill.partitions():
        fates = COMMITTED_FATES + (("open",) if is_commit else ())
        shown = read_through(
            lambda offset, topic=topic, number=number: fetch(  # type: ignore[misc]
                after_kill.client, topic, number, offset, committed=True
            ),
            partition["start"],
        )
        assert [each.offset for each in shown] == [
            each["offset"]
            for each in partition["records"]
            if each["offset"] >= partition["start"] and each["fate"] in fates
        ], f"{topic}-{number}"
    wanted = dict(after_kill.expected["positions"][group])
    if is_commit:
        for topic, places in after_kill.expected["pending"][group].items():
            wanted[topic] = {**wanted[topic], **places}
    assert positions(after_kill, group) == wanted

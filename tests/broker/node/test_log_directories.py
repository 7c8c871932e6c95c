"""Log directories that are away, added, moved or swapped at a start: nothing that was stored is taken for new."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from kio.schema.errors import ErrorCode

from holdfast.broker.log.checkpoints import encode_uuid
from holdfast.errors import DataDirectoryError
from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.testing.disk import Fault, Operation, PowerLost, SimulatedDisk
from holdfast.wire.batch import make_batch

TWO = {"log.dirs": "/one,/two"}
PARTITIONS = 4


def batch(value: bytes) -> bytes:
    return make_batch([value], timestamp=1_700_000_000_000)


def fill(client: BareClient, index: int, count: int = 10, topic: str = "t") -> None:
    for number in range(count):
        assert client.produce(topic, batch(b"%d" % number), index).error_code is ErrorCode.none


def started(log_dirs: str, before: BareNode, *, accept_loss: Sequence[str] = ()) -> BareNode:
    """Kill a node, if it was not stopped, and start one on these directories of its disk."""
    before.disk.kill()
    settings = {**before.settings, "log.dirs": log_dirs}
    return BareNode(settings, disk=before.disk, clock=before.clock, accept_loss=accept_loss)


def ends(node: BareNode) -> dict[int, int | None]:
    """The end of each partition of t; None for one that answers storage errors."""
    client = node.connect()
    found: dict[int, int | None] = {}
    for index in range(PARTITIONS):
        answer = client.fetch("t", 0, index)
        assert answer.error_code in (ErrorCode.none, ErrorCode.kafka_storage_error)
        found[index] = answer.high_watermark if answer.error_code is ErrorCode.none else None
    return found


def in_directory(node: BareNode, path: str) -> set[int]:
    return {each.index for each in node.node.partitions if each.directory.path == path and each.topic == "t"}


def move(disk: SimulatedDisk, old: str, new: str) -> None:
    disk.rename(old, new)
    for directory in {old.rpartition("/")[0] or "/", new.rpartition("/")[0] or "/"}:
        disk.flush_directory(directory)


@pytest.fixture
def two() -> BareNode:
    """A stopped node whose topic t has ten messages in each of four partitions, two in either directory."""
    node = BareNode(TWO)
    client = node.connect()
    client.create_topic("t", PARTITIONS)
    for index in range(PARTITIONS):
        fill(client, index)
    node.node.stop(node.clock.now())
    return node


def directory_id(node: BareNode, path: str) -> str:
    (found,) = (each.id for each in node.node.directories if each.path == path)
    return encode_uuid(found.bytes)


# A directory is away


@pytest.mark.parametrize("place", ["gone", "empty"])
def test_the_partitions_of_a_directory_that_is_away_are_offline_and_back_with_it(
    two: BareNode, place: str
) -> None:
    away = in_directory(two, "/two")
    two.disk.rename("/two", "/unmounted")
    if place == "empty":
        two.disk.make_directory("/two")
    node = started("/one,/two", two)
    assert ends(node) == {index: None if index in away else 10 for index in range(PARTITIONS)}
    client = node.connect()
    for index in away:
        assert client.produce("t", batch(b"x"), index).error_code is ErrorCode.kafka_storage_error
        assert any(f"t-{index} is offline" in line and "--accept-loss=" in line for line in node.said)
    assert not two.disk.exists("/two") or two.disk.list("/two") == []
    node = node.stop()  # and at the next start nothing is forgotten
    assert ends(node) == {index: None if index in away else 10 for index in range(PARTITIONS)}
    node.node.stop(node.clock.now())
    if two.disk.exists("/two"):
        two.disk.remove_tree("/two")
    two.disk.rename("/unmounted", "/two")
    node = started("/one,/two", node)
    assert ends(node) == dict.fromkeys(range(PARTITIONS), 10)


def test_a_directory_taken_out_of_log_dirs_leaves_its_partitions_offline(two: BareNode) -> None:
    away = in_directory(two, "/two")
    node = started("/one", two)
    assert ends(node) == {index: None if index in away else 10 for index in range(PARTITIONS)}
    node.node.stop(node.clock.now())
    assert ends(started("/one,/two", node)) == dict.fromkeys(range(PARTITIONS), 10)


def test_an_empty_directory_in_the_place_of_one_without_partitions_is_not_written_to() -> None:
    node = BareNode(TWO)
    node.node.stop(node.clock.now())
    node.disk.rename("/two", "/unmounted")
    for _ in range(2):
        node = started("/one,/two", node)
        assert any("/two is offline" in line and "is it mounted" in line for line in node.said)
        assert not node.disk.exists("/two")
    node = started("/one", node)  # taken out on purpose
    assert any("in log.dirs no more; it held no partition" in line for line in node.said)
    assert not any("offline" in line for line in started("/one,/two", node).said)


def test_new_partitions_go_where_a_directory_is_online(two: BareNode) -> None:
    two.disk.rename("/two", "/unmounted")
    node = started("/one,/two", two)
    client = node.connect()
    client.create_topic("new", 4)
    for index in range(4):
        fill(client, index, 2, "new")
    assert {hosted.directory.path for hosted in node.node.partitions} == {"/one"}


def test_committed_offsets_in_a_directory_that_is_away_are_an_error_not_unknown() -> None:
    node = BareNode({**TWO, "offsets.topic.num.partitions": "2"})
    client = node.connect()
    client.create_topic("t")

    def commit(group: str) -> ErrorCode:
        partitions = [{"partition_index": 0, "committed_offset": 7, "committed_metadata": ""}]
        topics = [{"name": "t", "partitions": partitions}]
        answer = client.ask(
            8, 6, group_id=group, generation_id_or_member_epoch=-1, member_id="", topics=topics
        )
        code = answer.topics[0].partitions[0].error_code
        assert isinstance(code, ErrorCode)
        return code

    def committed(group: str) -> tuple[ErrorCode, int | None]:
        topics = [{"name": "t", "partition_indexes": [0]}]
        answer = client.ask(9, 8, groups=[{"group_id": group, "topics": topics}], require_stable=False)
        (found,) = answer.groups
        offset = found.topics[0].partitions[0].committed_offset if found.topics else None
        return found.error_code, offset

    groups = [f"group-{number}" for number in range(6)]
    assert {commit(group) for group in groups} == {ErrorCode.none}
    node.node.stop(node.clock.now())
    node.disk.rename("/two", "/unmounted")
    node = started("/one,/two", node)
    client = node.connect()
    seen = {committed(group) for group in groups}
    assert seen == {(ErrorCode.none, 7), (ErrorCode.coordinator_not_available, None)}
    coordinators = {client.ask(10, 3, key=group, key_type=0).error_code for group in groups}
    assert coordinators == {ErrorCode.none, ErrorCode.coordinator_not_available}


def test_a_topic_deleted_while_a_directory_is_away_does_not_come_back_with_it(two: BareNode) -> None:
    away = in_directory(two, "/two")
    two.disk.rename("/two", "/unmounted")
    node = started("/one,/two", two)
    client = node.connect()
    (answer,) = client.ask(20, 5, topic_names=["t"], timeout=5000).responses
    assert answer.error_code is ErrorCode.none
    client.create_topic("t", PARTITIONS)
    for index in range(PARTITIONS):
        fill(client, index, 3)
    node.node.stop(node.clock.now())
    two.disk.rename("/unmounted", "/two")
    for _ in range(2):
        node = started("/one,/two", node)
        assert ends(node) == dict.fromkeys(range(PARTITIONS), 3)
    # What it held is kept, under a name that Apache Kafka starts with as well.
    strays = [name for name in two.disk.list("/two") if name.endswith("-stray")]
    assert {name.partition(".")[0] for name in strays} == {f"t-{index}" for index in away}


# Directories in another order, added, copied


@pytest.mark.parametrize("log_dirs", ["/two,/one", "/new,/one,/two", "/one,/new,/two"])
def test_the_order_of_log_dirs_and_new_ones_among_them_change_nothing(two: BareNode, log_dirs: str) -> None:
    node = started(log_dirs, two)
    assert ends(node) == dict.fromkeys(range(PARTITIONS), 10)
    node.connect().create_topic("u", 6)
    assert {hosted.directory.path for hosted in node.node.partitions} == set(log_dirs.split(","))
    node = started(log_dirs, node)
    assert ends(node) == dict.fromkeys(range(PARTITIONS), 10)


def test_one_directory_that_gets_a_new_first_one_keeps_everything(node: BareNode) -> None:
    client = node.connect()
    client.create_topic("t", PARTITIONS)
    fill(client, 0)
    node.node.stop(node.clock.now())
    node = started("/fresh,/data", node)
    assert ends(node)[0] == 10
    assert not [name for name in node.disk.list("/data") if "stray" in name]


def test_a_copy_of_a_directory_beside_it_is_refused(two: BareNode) -> None:
    for name in ("meta.properties",):
        content = two.disk.open(f"/two/{name}", "read").pread(1 << 20, 0)
        two.disk.make_directory("/copy")
        two.disk.open(f"/copy/{name}", "create").pwritev([content], 0)
    with pytest.raises(DataDirectoryError, match="/two and /copy are copies of one log directory"):
        started("/one,/two,/copy", two)


# Metadata


@pytest.mark.parametrize("log_dirs", ["/two", "/one,/two", "/two,/new"])
def test_without_the_directory_of_the_metadata_log_nothing_starts(two: BareNode, log_dirs: str) -> None:
    two.disk.rename("/one", "/unmounted")
    before = two.disk.list("/two")
    with pytest.raises(DataDirectoryError, match=r"not mounted.*--accept-loss=__cluster_metadata-0"):
        started(log_dirs, two)
    assert sorted({*two.disk.list("/two"), ".kafka_cleanshutdown"}) == before
    assert not two.disk.exists("/new")
    if two.disk.exists("/one"):
        two.disk.remove_tree("/one")
    two.disk.rename("/unmounted", "/one")
    assert ends(started("/one,/two", two)) == dict.fromkeys(range(PARTITIONS), 10)


def test_metadata_given_up_by_name_begins_anew_and_keeps_partitions_aside(two: BareNode) -> None:
    kept = in_directory(two, "/two")
    cluster_id = two.node.identity.cluster_id
    two.disk.rename("/one", "/unmounted")
    node = started("/one,/two", two, accept_loss=["__cluster_metadata-0"])
    assert node.node.identity.cluster_id == cluster_id
    assert not node.node.metadata.image.topics
    strays = {name.partition(".")[0] for name in node.disk.list("/two") if name.endswith("-stray")}
    assert strays == {f"t-{index}" for index in kept}


def test_two_metadata_logs_are_refused_and_both_named(two: BareNode) -> None:
    two.disk.make_directory("/two/__cluster_metadata-0")
    two.disk.open(f"/two/__cluster_metadata-0/{0:020d}.log", "create").pwritev([b"another"], 0)
    with pytest.raises(DataDirectoryError, match="/one and /two both hold a metadata log"):
        started("/one,/two", two)


def test_an_empty_metadata_log_beside_partitions_is_refused(two: BareNode) -> None:
    for path in ("/one/recovery-point-offset-checkpoint", "/one/log-start-offset-checkpoint"):
        two.disk.remove(path)
    two.disk.remove_tree("/one/__cluster_metadata-0")
    two.disk.make_directory("/one/__cluster_metadata-0")
    with pytest.raises(DataDirectoryError, match="metadata log is empty, and /one, /two holds partitions"):
        started("/one,/two", two)
    assert two.disk.exists("/one/t-0") or two.disk.exists("/one/t-1")


@pytest.mark.parametrize("seed", range(2))
def test_a_first_start_that_the_power_interrupts_anywhere_can_be_repeated(seed: int) -> None:
    for step in range(200):
        disk = SimulatedDisk(seed)
        disk.prepare("/one")
        disk.prepare("/two")
        disk.lose_power_after(step)
        try:
            node = BareNode(TWO, disk=disk)
        except PowerLost:
            disk.crash()
        else:
            assert step > 20
            break
        node = BareNode(TWO, disk=disk)
        assert not any("offline" in line for line in node.said), (step, node.said)
        node.connect().create_topic("t", 4)
        assert {hosted.directory.path for hosted in node.node.partitions} == {"/one", "/two"}
    else:
        raise AssertionError("a start takes more than 200 changes of the disk")


# Identity


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff\xfe", None])
def test_a_second_directory_whose_identity_is_damaged_is_offline_and_left_as_it_is(
    two: BareNode, content: bytes | None
) -> None:
    away = in_directory(two, "/two")
    whole = two.disk.open("/two/meta.properties", "read").pread(1 << 20, 0)
    two.disk.remove("/two/meta.properties")
    if content is not None:
        two.disk.open("/two/meta.properties", "create").pwritev([content], 0)
    node = started("/one,/two", two)
    assert ends(node) == {index: None if index in away else 10 for index in range(PARTITIONS)}
    assert any("/two is offline" in line and "meta.properties" in line for line in node.said)
    assert two.disk.exists("/two/meta.properties") is (content is not None)
    two.disk.open("/two/meta.properties", "create").truncate(0)
    two.disk.open("/two/meta.properties", "create").pwritev([whole], 0)
    assert ends(started("/one,/two", node)) == dict.fromkeys(range(PARTITIONS), 10)


def test_a_directory_whose_identity_was_written_by_hand_is_taken_with_everything_in_it(two: BareNode) -> None:
    text = f"cluster.id={two.node.identity.cluster_id}\nnode.id=1\nversion=1\n"
    for path in ("/one/meta.properties", "/two/meta.properties"):
        two.disk.remove(path)
        two.disk.open(path, "create").pwritev([text.encode()], 0)
    node = started("/one,/two", two)
    assert ends(node) == dict.fromkeys(range(PARTITIONS), 10)
    assert ends(started("/one,/two", node)) == dict.fromkeys(range(PARTITIONS), 10)


def test_a_directory_that_gets_no_id_is_offline(two: BareNode) -> None:
    away = in_directory(two, "/two")
    text = f"cluster.id={two.node.identity.cluster_id}\nnode.id=1\nversion=1\n"
    two.disk.remove("/two/meta.properties")
    two.disk.open("/two/meta.properties", "create").pwritev([text.encode()], 0)
    two.disk.plan(Fault("rename", path_contains="/two/meta"))
    node = started("/one,/two", two)
    assert ends(node) == {index: None if index in away else 10 for index in range(PARTITIONS)}
    assert ends(started("/one,/two", node)) == dict.fromkeys(range(PARTITIONS), 10)


def test_a_pinned_cluster_refuses_an_empty_and_a_foreign_directory(two: BareNode) -> None:
    pinned = {**TWO, "holdfast.cluster.id": two.node.identity.cluster_id}
    assert ends(BareNode(pinned, disk=two.disk)) == dict.fromkeys(range(PARTITIONS), 10)
    with pytest.raises(DataDirectoryError, match=r"/empty: empty, and cluster .* was asked for"):
        BareNode({**pinned, "log.dirs": "/empty"}, disk=two.disk)
    assert not two.disk.exists("/empty")
    two.disk.kill()
    with pytest.raises(DataDirectoryError, match=r"/one belongs to cluster .*, and cluster other was asked"):
        BareNode({**TWO, "holdfast.cluster.id": "other"}, disk=two.disk)


# Giving up


def test_a_directory_given_up_by_its_id_has_its_partitions_made_anew_once(two: BareNode) -> None:
    lost, away = directory_id(two, "/two"), in_directory(two, "/two")
    two.disk.rename("/two", "/unmounted")
    node = started("/one,/two", two, accept_loss=[lost])
    expected: dict[int, int | None] = {index: 0 if index in away else 10 for index in range(PARTITIONS)}
    assert ends(node) == expected
    assert sum("is recreated, empty" in line for line in node.said) == len(away)
    assert two.disk.exists("/two/meta.properties"), "what is in its place is new"
    client = node.connect()
    for index in away:
        fill(client, index, 3)
    node = started("/one,/two", node)
    assert ends(node) == {index: 3 if index in away else 10 for index in range(PARTITIONS)}
    # The lost one comes back beside the others: it is told of, and not used.
    node = started("/one,/two,/unmounted", node)
    assert ends(node) == {index: 3 if index in away else 10 for index in range(PARTITIONS)}
    assert sum("another copy" in line for line in node.said) == len(away)


def test_one_partition_given_up_by_name_leaves_the_others_offline(two: BareNode) -> None:
    first, second = sorted(in_directory(two, "/two"))
    two.disk.rename("/two", "/unmounted")
    node = started("/one", two, accept_loss=[f"t-{first}"])
    assert (ends(node)[first], ends(node)[second]) == (0, None)
    assert (ends(started("/one", node))[first], ends(node)[second]) == (0, None)


def test_a_name_of_which_nothing_is_missing_gives_nothing_up(two: BareNode) -> None:
    names = [directory_id(two, "/two"), "t-0", "typo"]
    node = started("/one,/two", two, accept_loss=names)
    assert ends(node) == dict.fromkeys(range(PARTITIONS), 10)
    for name in names:
        assert any(f"--accept-loss={name}: nothing of that name is missing" in line for line in node.said)


@pytest.mark.parametrize("flushed", [10, 0])
def test_a_damaged_partition_given_up_by_name_is_kept_aside_and_begins_behind_what_was_flushed(
    two: BareNode, flushed: int
) -> None:
    two.disk.flip_bit(f"/one/t-0/{0:020d}.log", 75, 3)
    two.disk.remove("/one/.kafka_cleanshutdown")
    if not flushed:
        two.disk.remove("/one/recovery-point-offset-checkpoint")
    node = started("/one,/two", two)
    assert ends(node)[0] is None
    assert any("t-0 is offline" in line and "--accept-loss=t-0" in line for line in node.said)
    node = started("/one,/two", node, accept_loss=["t-0"])
    assert node.connect().produce("t", batch(b"new"), 0).base_offset == flushed
    node = started("/one,/two", node)
    assert node.hosted("t").log.end_offset == flushed + 1
    (stray,) = [name for name in two.disk.list("/one") if name.endswith("-stray")]
    assert two.disk.size(f"/one/{stray}/{0:020d}.log") > 600


# Partitions missing in a directory that is online, and found elsewhere


@pytest.mark.parametrize("checkpoints", ["known", "lost", "empty"])
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_partition_whose_directory_is_missing_is_offline_until_it_is_restored(
    two: BareNode, checkpoints: str, end: str
) -> None:
    (index, *_) = in_directory(two, "/two")
    move(two.disk, f"/two/t-{index}", "/saved")
    if checkpoints == "lost":
        two.disk.remove("/two/recovery-point-offset-checkpoint")
    elif checkpoints == "empty":
        two.disk.open("/two/recovery-point-offset-checkpoint", "write").truncate(0)
    node = started("/one,/two", two)
    for _ in range(2):
        assert ends(node) == {each: None if each == index else 10 for each in range(PARTITIONS)}
        assert any(
            f"t-{index} is offline" in line and f"--accept-loss=t-{index}" in line for line in node.said
        )
        node.advance(2000)
        node.settle()
        if end == "stop":
            node.node.stop(node.clock.now())
        node = started("/one,/two", node)
    move(two.disk, "/saved", f"/two/t-{index}")
    node = started("/one,/two", node)
    assert ends(node) == dict.fromkeys(range(PARTITIONS), 10)
    assert ends(started("/one,/two", node)) == dict.fromkeys(range(PARTITIONS), 10)


@pytest.mark.parametrize("end", ["stop", "kill", "lose_power"])
def test_a_missing_partition_given_up_by_name_goes_on_behind_what_it_had(two: BareNode, end: str) -> None:
    (index, *_) = in_directory(two, "/two")
    two.disk.remove_tree(f"/two/t-{index}")
    node = started("/one,/two", two, accept_loss=[f"t-{index}"])
    assert any(f"/two/t-{index}" in line and "given up" in line for line in node.said)
    assert node.connect().produce("t", batch(b"new"), index).base_offset == 10
    node = getattr(node, end)()
    log = node.hosted("t", index).log
    assert (log.start_offset, log.end_offset) == (10, 11)


def test_a_missing_partition_given_up_without_checkpoints_is_made_anew(two: BareNode) -> None:
    (index, *_) = in_directory(two, "/two")
    two.disk.remove_tree(f"/two/t-{index}")
    two.disk.remove("/two/recovery-point-offset-checkpoint")
    node = started("/one,/two", started("/one,/two", two), accept_loss=[f"t-{index}"])
    fill(node.connect(), index, 3)
    node = started("/one,/two", node)
    assert ends(node) == {each: 3 if each == index else 10 for each in range(PARTITIONS)}


def test_a_topic_with_a_missing_partition_can_be_deleted_and_made_again(two: BareNode) -> None:
    (index, *_) = in_directory(two, "/two")
    two.disk.remove_tree(f"/two/t-{index}")
    node = started("/one,/two", two)
    client = node.connect()
    client.begin(20, 5, topic_names=["t"], timeout=5000)
    client.create_topic("t", PARTITIONS)
    for each in range(PARTITIONS):
        fill(client, each, 3)
    for _ in range(2):
        node = started("/one,/two", node)
        assert ends(node) == dict.fromkeys(range(PARTITIONS), 3)
    assert not [name for name in node.disk.list("/two") if name.endswith("-delete")]


@pytest.mark.parametrize("from_away", [False, True])
@pytest.mark.parametrize("end", ["stop", "kill", "lose_power"])
def test_a_partition_that_was_moved_is_found_and_its_record_follows(
    two: BareNode, from_away: bool, end: str
) -> None:
    moved = in_directory(two, "/two")
    for index in moved:
        move(two.disk, f"/two/t-{index}", f"/one/t-{index}")
    log_dirs = "/one" if from_away else "/one,/two"
    node = started(log_dirs, two)
    assert ends(node) == dict.fromkeys(range(PARTITIONS), 10)
    fill(node.connect(), min(moved), 1)
    node = getattr(node, end)()
    assert ends(node)[min(moved)] == 11
    assert not any("not where it is recorded" in line for line in node.said)


def test_a_moved_partition_that_lost_its_end_on_the_way_is_offline(two: BareNode) -> None:
    (index, *_) = in_directory(two, "/two")
    move(two.disk, f"/two/t-{index}", f"/one/t-{index}")
    two.disk.open(f"/one/t-{index}/{0:020d}.log", "write").truncate(200)
    node = started("/one,/two", two)
    assert ends(node)[index] is None
    assert ends(started("/one,/two", node))[index] is None


def test_two_copies_where_neither_is_recorded_are_offline_and_both_named(two: BareNode) -> None:
    (index, *_) = in_directory(two, "/two")
    for place in ("/one", "/three"):
        two.disk.make_directory(f"{place}/t-{index}")
        for name in two.disk.list(f"/two/t-{index}"):
            content = two.disk.open(f"/two/t-{index}/{name}", "read").pread(1 << 20, 0)
            two.disk.open(f"{place}/t-{index}/{name}", "create").pwritev([content], 0)
    two.disk.remove_tree(f"/two/t-{index}")
    two.disk.rename("/three", "/aside")
    node = started("/one,/two,/three", two)
    assert ends(node)[index] == 10
    node = started("/one,/two,/three", node)
    two.disk.rename(f"/aside/t-{index}", f"/three/t-{index}")
    node = started("/one,/two,/three", node)
    assert any(f"/three/t-{index} is another copy" in line for line in node.said)
    two.disk.rename(f"/one/t-{index}", f"/two/t-{index}")
    node = started("/one,/two,/three", node)
    assert ends(node)[index] is None
    assert any(f"/two/t-{index} and /three/t-{index} both claim" in line for line in node.said)


# A directory that fails later in the start


@pytest.mark.parametrize(
    "fault",
    [
        Fault("create", path_contains="/two/holdfast.session", times=9),
        Fault("rename", path_contains="/two/holdfast.session", times=9),
        Fault("flush directory", path_contains="/two", times=9),
        Fault("write", path_contains="/two/recovery-point", times=9),
        Fault("read", path_contains="/two/recovery-point", times=9),
        Fault("read", path_contains="/two/meta", times=9),
    ],
    ids=lambda fault: f"{fault.operation} {fault.path_contains}",
)
def test_a_directory_that_fails_anywhere_in_the_start_is_offline_and_the_other_serves(
    two: BareNode, fault: Fault
) -> None:
    away = in_directory(two, "/two")
    two.disk.remove(f"/two/t-{min(away)}/partition.metadata")
    two.disk.remove("/two/holdfast.session")
    two.disk.make_directory("/two/gone-0")
    two.disk.open("/two/gone-0/1.log", "create").pwritev([b"x"], 0)
    two.disk.open("/two/recovery-point-offset-checkpoint", "write").pwritev([b"0\n4"], 0)
    two.disk.plan(fault)
    node = started("/one,/two", two)
    assert any("/two is offline" in line for line in node.said)
    assert ends(node) == {index: None if index in away else 10 for index in range(PARTITIONS)}
    two.disk.clear_faults()
    assert ends(started("/one,/two", node)) == dict.fromkeys(range(PARTITIONS), 10)


@pytest.mark.parametrize("operation", ["create", "rename", "flush directory", "read", "write", "flush"])
def test_a_failing_directory_of_the_metadata_log_ends_the_start_with_its_name(
    two: BareNode, operation: Operation
) -> None:
    two.disk.plan(Fault(operation, path_contains="/one", times=99))
    with pytest.raises(DataDirectoryError, match="/one"):
        started("/one,/two", two)
    two.disk.clear_faults()
    assert ends(started("/one,/two", two)) == dict.fromkeys(range(PARTITIONS), 10)

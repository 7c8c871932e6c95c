"""The directory of an Apache Kafka node: its metadata records are honoured or kept, and what cannot be is refused
before anything is written."""

from __future__ import annotations

from uuid import UUID

import pytest
from tests.broker.node.test_metadata_log import ENDPOINTS

from holdfast.broker.metadata import snapshot
from holdfast.broker.metadata.image import ClusterImage
from holdfast.broker.node import metadata_log
from holdfast.broker.node.node import Node
from holdfast.broker.node.services import NodeSeams
from holdfast.config.broker import BrokerConfig
from holdfast.errors import DataDirectoryError
from holdfast.seams import Now
from holdfast.testing.disk import SimulatedDisk
from holdfast.testing.fakes import InlineWorker, ManualClock, ManualFlusher, SeededRandomness
from holdfast.wire.batch import Record, build_batch
from holdfast.wire.control_records import (
    ControlRecord,
    KRaftVersion,
    LeaderChange,
    Voter,
    VoterDescription,
    Voters,
)
from holdfast.wire.metadata_records import (
    AbortTransaction,
    AccessControlEntry,
    BeginTransaction,
    BrokerRegistrationChange,
    ClearElr,
    ClientQuota,
    Config,
    DelegationToken,
    EndTransaction,
    FeatureLevel,
    MetadataRecord,
    NoOp,
    Partition,
    PartitionChange,
    QuotaEntity,
    RegisterBroker,
    RegisterController,
    Topic,
    UnknownRecord,
    UnregisterBroker,
    UserScramCredential,
)

NOW = Now(1_000_000, 0)
METADATA = "/data/__cluster_metadata-0"
TOPIC_ID = UUID(int=77)
ACL = AccessControlEntry(
    id=UUID(int=5),
    resource_type=2,
    resource_name="orders",
    pattern_type=3,
    principal="User:a",
    host="*",
    operation=3,
    permission_type=3,
)
SCRAM = UserScramCredential(
    name="a", mechanism=1, salt=b"s", stored_key=b"k", server_key=b"v", iterations=4096
)
QUOTA = ClientQuota(entity=(QuotaEntity("user", None),), key="producer_byte_rate", value=1.5, remove=False)
TOKEN = DelegationToken(
    owner="User:a",
    requester="User:b",
    renewers=("User:c",),
    issue_timestamp=1,
    max_timestamp=2,
    expiration_timestamp=3,
    token_id="t",
)
OTHER_BROKER = RegisterBroker(broker_id=2, incarnation_id=UUID(int=9), broker_epoch=9)


def start(disk: SimulatedDisk, unenforced: tuple[str, ...] = (), said: list[str] | None = None) -> Node:
    config, _ = BrokerConfig.load({}, {"log.dirs": "/data"})
    seams = NodeSeams(
        fs=disk,
        randomness=SeededRandomness(1),
        flusher=ManualFlusher(disk),
        worker=InlineWorker(disk),
        clock=ManualClock(1_000_000),
        call_soon=lambda action: None,
        boot_id="boot",
        say=(said if said is not None else []).append,
    )
    node = Node(config, seams, serve_unenforced=unenforced)
    node.start(ENDPOINTS, NOW)
    return node


class KafkaNode:
    """Writes to the metadata log of a stopped broker as Apache Kafka would, from its election on."""

    def __init__(self, disk: SimulatedDisk, voters: tuple[int, ...] = (1,)) -> None:
        self.disk = disk
        node = start(disk)
        self.directory = node.directories[0].id
        node.stop(NOW)
        self.log = node.metadata.hosted.log
        self.offset, self.epoch = self.log.end_offset, node.metadata.hosted.leader_epoch + 1
        state = disk.open(f"{METADATA}/quorum-state", "create")
        state.pwritev([b'{"leaderId":1,"leaderEpoch":%d,"data_version":0}' % self.epoch], 0)
        state.close()
        named = tuple(Voter(each) for each in voters)
        self.write_control(LeaderChange(leader_id=1, voters=named, granting_voters=named))
        incarnation = UUID(int=3)
        self.write(
            RegisterController(controller_id=1, incarnation_id=incarnation),
            RegisterBroker(
                broker_id=1,
                incarnation_id=incarnation,
                broker_epoch=self.offset + 1,
                log_dirs=(self.directory,),
                fenced=False,
            ),
        )

    def write(self, *records: MetadataRecord) -> None:
        self._append(
            [Record(at, 0, None, each.encode()) for at, each in enumerate(records)], is_control=False
        )

    def write_control(self, *records: ControlRecord) -> None:
        self._append(
            [Record(at, 0, each.encode_key(), each.encode_value()) for at, each in enumerate(records)],
            is_control=True,
        )

    def _append(self, records: list[Record], *, is_control: bool) -> None:
        batch = build_batch(
            records,
            base_offset=self.offset,
            leader_epoch=self.epoch,
            base_timestamp=NOW.wall_ms,
            is_control=is_control,
        )
        path = self.log.active.path()
        file = self.disk.open(path, "write")
        file.pwritev([batch], file.size())
        file.close()
        self.offset += len(records)


@pytest.fixture
def disk() -> SimulatedDisk:
    made = SimulatedDisk(1)
    made.make_directory("/")
    return made


def content(disk: SimulatedDisk) -> dict[str, bytes]:
    found = {}
    for directory in ("/data", METADATA):
        for name in disk.list(directory):
            path = f"{directory}/{name}"
            if not disk.is_directory(path) and name != ".lock":
                file = disk.open(path, "read")
                found[path] = file.pread(file.size(), 0)
                file.close()
    return found


def partition(index: int, **fields: object) -> Partition:
    values = {"replicas": (1,), "isr": (1,), "leader": 1, "leader_epoch": 4, "partition_epoch": 9}
    return Partition(partition_id=index, topic_id=TOPIC_ID, **{**values, **fields})  # type: ignore[arg-type]


def test_metadata_transactions_count_when_they_end(disk: SimulatedDisk) -> None:
    kafka = KafkaNode(disk)
    kafka.write(BeginTransaction(name="a"), Topic(name="there", topic_id=TOPIC_ID), partition(0))
    kafka.write(EndTransaction())
    kafka.write(BeginTransaction(name="b"), Topic(name="aborted", topic_id=UUID(int=78)))
    kafka.write(AbortTransaction(reason="no"))
    kafka.write(BeginTransaction(name="c"))
    kafka.write(Topic(name="open", topic_id=UUID(int=79)))
    node = start(disk)
    assert set(node.metadata.image.topics) == {"there"}
    node.stop(NOW)
    # What we wrote behind the open transaction is no part of it.
    again = start(disk)
    assert set(again.metadata.image.topics) == {"there"}
    assert not again.metadata.is_in_transaction


def test_partitions_left_by_a_controlled_shutdown_are_led_again(disk: SimulatedDisk) -> None:
    kafka = KafkaNode(disk)
    kafka.write(Topic(name="there", topic_id=TOPIC_ID), partition(0, directories=(kafka.directory,)))
    kafka.write(
        PartitionChange(
            partition_id=0,
            topic_id=TOPIC_ID,
            isr=(),
            leader=-1,
            eligible_leader_replicas=(1,),
            last_known_elr=(1,),
        )
    )
    node = start(disk)
    found = node.metadata.image.topics["there"].partitions[0]
    assert (found.leader, found.isr, found.eligible_leader_replicas, found.last_known_elr) == (
        1,
        (1,),
        (),
        (),
    )
    assert found.leader_epoch == 6
    assert node.partitions.get("there", 0) is not None


def test_eligible_leaders_are_forgotten_by_topic_or_for_all() -> None:
    for name, expected in (("a", [(), (1,)]), ("", [(), ()])):
        image = ClusterImage()
        for number, topic in enumerate(("a", "b")):
            topic_id = UUID(int=number + 1)
            image.apply_all(
                [
                    Topic(name=topic, topic_id=topic_id),
                    Partition(
                        partition_id=0, topic_id=topic_id, replicas=(1,), eligible_leader_replicas=(1,)
                    ),
                ]
            )
        image.apply(ClearElr(topic_name=name))
        assert [
            image.topics[topic].partitions[0].eligible_leader_replicas for topic in ("a", "b")
        ] == expected


def test_a_broker_that_is_gone_for_good_is_no_reason_to_refuse(disk: SimulatedDisk) -> None:
    kafka = KafkaNode(disk)
    kafka.write(OTHER_BROKER)
    with pytest.raises(DataDirectoryError, match=r"other brokers are registered \(2\)"):
        start(disk)
    kafka.write(UnregisterBroker(broker_id=2, broker_epoch=9))
    assert set(start(disk).metadata.image.brokers) == {1}


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([ACL], "1 access control entries.*--serve-unenforced=acls"),
        ([SCRAM], "1 SCRAM credentials.*--serve-unenforced=scram"),
        ([QUOTA], "1 client quotas.*--serve-unenforced=quotas"),
        ([TOKEN], "1 delegation tokens.*--serve-unenforced=tokens"),
        ([FeatureLevel(name="metadata.version", feature_level=31)], "metadata.version is at level 31"),
        ([FeatureLevel(name="new.version", feature_level=1)], "new.version is at level 1.*no such feature"),
        (
            [
                Topic(name="there", topic_id=TOPIC_ID),
                partition(0),
                Config(resource_type=2, resource_name="there", name="remote.storage.enable", value="true"),
            ],
            r"tiered storage \(there\)",
        ),
        (
            [Topic(name="there", topic_id=TOPIC_ID), partition(0, replicas=(1, 2), isr=(1, 2))],
            r"replicas on other nodes \(there-0\)",
        ),
        ([UnknownRecord(kind=99, version=0, body=b"\0")], "of a kind this version does not know"),
    ],
    ids=lambda value: value[0].__class__.__name__ if isinstance(value, list) else "",
)
def test_what_cannot_be_honoured_is_refused_before_anything_is_written(
    disk: SimulatedDisk, records: list[MetadataRecord], reason: str
) -> None:
    KafkaNode(disk).write(*records)
    before = content(disk)
    assert "/data/.kafka_cleanshutdown" in before
    with pytest.raises(DataDirectoryError, match=reason):
        start(disk)
    assert content(disk) == before


def test_other_voters_are_refused_and_their_removal_is_seen(disk: SimulatedDisk) -> None:
    kafka = KafkaNode(disk, voters=(1, 2, 3))
    with pytest.raises(DataDirectoryError, match=r"other voters \(2, 3\)"):
        start(disk)
    kafka.write_control(KRaftVersion(kraft_version=1), Voters(voters=(VoterDescription(1, kafka.directory),)))
    start(disk)


def test_records_that_nobody_enforces_are_kept_byte_for_byte(
    disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka = KafkaNode(disk)
    kept = [ACL, SCRAM, QUOTA, TOKEN]
    kafka.write(*kept, AccessControlEntry(**{**ACL.__dict__, "id": UUID(int=6)}))
    kafka.write(*(NoOp() for _ in range(40)))
    voters = Voters(voters=(VoterDescription(1, kafka.directory),))
    kafka.write_control(KRaftVersion(kraft_version=1), voters)
    unenforced = ("acls", "scram", "quotas", "tokens")
    with pytest.raises(DataDirectoryError, match="tokens"):
        start(disk, unenforced[:3])
    # A snapshot of ours keeps them too, and who votes.
    monkeypatch.setattr(metadata_log, "HISTORY_RECORDS_MIN", 10)
    monkeypatch.setattr(metadata_log, "HISTORY_FACTOR", 1)
    node = start(disk, unenforced)
    assert node.metadata.hosted.log.start_offset > 0
    node.stop(NOW)
    again = start(disk, unenforced)
    assert again.metadata.image.unenforced() == {"acls": 2, "scram": 1, "quotas": 1, "tokens": 1}
    encoded = {record.encode() for record in snapshot.records(again.metadata.image)}
    assert {record.encode() for record in kept} <= encoded
    assert again.metadata.quorum.kept[Voters] == voters
    assert again.metadata.quorum.voters == {1}


def test_a_clean_stop_leaves_what_makes_a_start_of_kafka_quick(disk: SimulatedDisk) -> None:
    node = start(disk)
    created = [
        Topic(name="there", topic_id=TOPIC_ID),
        partition(0, directories=(node.directories[0].id,)),
    ]
    node.metadata.append(created, NOW)
    node.stop(NOW)
    read = [
        record
        for batch in metadata_log.readable_batches(disk, METADATA)
        for record in metadata_log._records(bytes(batch.data), METADATA)
    ]
    assert read[-1] == BrokerRegistrationChange(
        broker_id=1, broker_epoch=node.identity.broker_epoch, fenced=1
    )
    assert "there 0 0" in content(disk)["/data/replication-offset-checkpoint"].decode()
    names = disk.list("/data/there-0")
    assert {"00000000000000000000.index", "00000000000000000000.timeindex"} <= set(names)
    assert start(disk).metadata.image.brokers[1].active


def test_a_stray_of_an_earlier_version_gets_kafkas_name(disk: SimulatedDisk) -> None:
    start(disk).stop(NOW)
    disk.make_directory("/data/gone-3-stray")
    node = start(disk)
    assert f"gone-3.{0:032x}-stray" in disk.list("/data")
    node.stop(NOW)
    start(disk)
    assert [name for name in disk.list("/data") if name.endswith("-stray")] == [f"gone-3.{0:032x}-stray"]

"""Any changes: the image is its log, a snapshot stands for the log before it, errors leave no trace."""

from __future__ import annotations

from copy import deepcopy
from typing import Any
from uuid import UUID

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kio.schema.errors import ErrorCode
from tests.support.registering import change_registration
from tests.support.tiers import examples

from holdfast.broker.metadata import changes, snapshot
from holdfast.broker.metadata.image import ClusterImage, Resource, ResourceType
from holdfast.broker.metadata.settings import alter_settings, replace_settings
from holdfast.config.broker import BrokerConfig
from holdfast.config.dynamic import Alteration
from holdfast.errors import ApiError
from holdfast.testing.fakes import SeededRandomness
from holdfast.wire.metadata_records import EndPoint, MetadataRecord, RegisterBroker, decode_metadata_record

NAMES = st.sampled_from(
    ["orders", "a.b", "a_b", "a-b", "x", "..", "", "sp ace", "y" * 249, "__cluster_metadata"]
)
SETTINGS = st.sampled_from(
    ["retention.ms", "cleanup.policy", "log.retention.ms", "log.cleanup.policy", "unknown.name"]
)
VALUES = st.sampled_from(["1", "2", "delete", "compact", "compact,delete", "bad"]) | st.none()


CONFIG = BrokerConfig.load({"node.id": "1", "num.partitions": "2"})[0]
RESOURCES = st.builds(Resource, st.just(ResourceType.TOPIC), NAMES) | st.builds(
    Resource, st.just(ResourceType.BROKER), st.sampled_from(["", "0", "1", "7", "one"])
)


class Changes(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.image = ClusterImage()
        self.log: list[bytes] = []
        self.snapshot: list[bytes] = []
        self.snapshot_end = 0

    def attempt(self, make: Any) -> None:
        before = deepcopy(self.image)
        records: list[MetadataRecord] = []
        refusal: ApiError | None = None
        try:
            records = make()
        except ApiError as caught:
            refusal = caught
        assert self.image == before, "making records changes nothing; applying them does"
        if refusal is not None:
            assert refusal.message
            assert refusal.code is not ErrorCode.none
            return
        self.log += [record.encode() for record in records]
        self.image.apply_all(records, last_offset=len(self.log) - 1, last_epoch=1)

    @initialize(seed=st.integers(0, 2**32), directories=st.integers(0, 3))
    def start(self, seed: int, directories: int) -> None:
        self.randomness = SeededRandomness(seed)
        for broker_id in (0, 1):
            broker = RegisterBroker(
                broker_id=broker_id,
                broker_epoch=1,
                incarnation_id=UUID(int=10 + broker_id),
                end_points=(EndPoint("PLAINTEXT", "localhost", 9092, 0),),
                fenced=False,
                log_dirs=tuple(UUID(int=100 * broker_id + n) for n in range(50, 50 + directories)),
            )
            self.attempt(lambda broker=broker: changes.register_broker(self.image, broker))

    @rule(
        name=NAMES,
        partitions=st.integers(-2, 4),
        factor=st.integers(-2, 3),
        assignments=st.lists(
            st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), max_size=2)), max_size=2
        ),
        configs=st.lists(st.tuples(SETTINGS, VALUES), max_size=2),
    )
    def create(self, name: str, partitions: int, factor: int, assignments: Any, configs: Any) -> None:
        topic = changes.NewTopic(name, partitions, factor, assignments, configs)
        self.attempt(lambda: changes.create_topic(self.image, topic, CONFIG, self.randomness))

    @rule(
        name=st.sampled_from(["orders", "a.b", "a_b", "x"]),
        partitions=st.integers(1, 3),
        factor=st.integers(1, 2),
        retention_ms=st.sampled_from(["1", "2"]),
    )
    def create_legal(self, name: str, partitions: int, factor: int, retention_ms: str) -> None:
        topic = changes.NewTopic(name, partitions, factor, configs=[("retention.ms", retention_ms)])
        self.attempt(lambda: changes.create_topic(self.image, topic, CONFIG, self.randomness))

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        topic = self.image.topic(name)
        topic_id = UUID(int=5) if topic is None else topic.topic_id
        self.attempt(lambda: changes.delete_topic(self.image, topic_id))

    @rule(
        name=NAMES,
        count=st.integers(-1, 6),
        assignments=st.none() | st.lists(st.lists(st.integers(0, 2), max_size=2), max_size=3),
    )
    def add_partitions(self, name: str, count: int, assignments: Any) -> None:
        self.attempt(lambda: changes.add_partitions(self.image, name, count, assignments, self.randomness))

    @rule(
        resource=RESOURCES,
        wanted=st.lists(st.builds(Alteration, SETTINGS, st.integers(0, 4), VALUES), max_size=3),
    )
    def alter(self, resource: Resource, wanted: list[Alteration]) -> None:
        self.attempt(lambda: alter_settings(self.image, resource, wanted, CONFIG))

    @rule(resource=RESOURCES, wanted=st.lists(st.tuples(SETTINGS, VALUES), max_size=3))
    def replace(self, resource: Resource, wanted: Any) -> None:
        self.attempt(lambda: replace_settings(self.image, resource, wanted, CONFIG))

    @rule()
    def take_producer_ids(self) -> None:
        self.attempt(lambda: changes.allocate_producer_ids(self.image, 1)[1])

    @rule(broker_id=st.integers(0, 2))
    def restart(self, broker_id: int) -> None:
        self.attempt(lambda: changes.raise_leader_epochs(self.image, broker_id))

    @rule(broker_id=st.integers(0, 2), fenced=st.booleans())
    def fence(self, broker_id: int, fenced: bool) -> None:
        self.attempt(lambda: change_registration(self.image, broker_id, fenced=fenced))

    @rule(name=st.sampled_from(["metadata.version", "group.version"]), level=st.integers(0, 3))
    def set_feature(self, name: str, level: int) -> None:
        self.attempt(lambda: changes.set_feature_levels(self.image, {name: level}))

    @rule()
    def take_snapshot(self) -> None:
        self.snapshot = [record.encode() for record in snapshot.records(self.image)]
        self.snapshot_end = len(self.log)

    @invariant()
    def the_log_gives_the_image(self) -> None:
        replayed = ClusterImage()
        for data in self.log:
            replayed.apply(decode_metadata_record(data))
        assert replayed == self.image

    @invariant()
    def a_snapshot_and_the_rest_of_the_log_give_the_image(self) -> None:
        rebuilt = ClusterImage()
        rebuilt.apply_all(decode_metadata_record(data) for data in self.snapshot)
        rebuilt.apply_all(decode_metadata_record(data) for data in self.log[self.snapshot_end :])
        assert rebuilt == self.image

    @invariant()
    def equal_images_have_equal_snapshots(self) -> None:
        records = list(snapshot.records(self.image))
        rebuilt = ClusterImage()
        rebuilt.apply_all(records)
        assert list(snapshot.records(rebuilt)) == records
        for name in self.image.topics:
            assert rebuilt.colliding_topics(name) == self.image.colliding_topics(name)

    @invariant()
    def names_and_ids_name_the_same_topics(self) -> None:
        assert {id(topic) for topic in self.image.topics.values()} == {
            id(topic) for topic in self.image.topics_by_id.values()
        }
        for name, topic in self.image.topics.items():
            assert topic.name == name
            assert [partition.index for partition in topic.partitions] == list(range(len(topic.partitions)))


Changes.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)
TestChanges = Changes.TestCase

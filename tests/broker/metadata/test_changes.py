"""Requests that change the cluster: the records of those that are fine, the codes of those that are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode
from tests.support.registering import change_registration

from holdfast.broker.metadata.changes import (
    RECORDS_PER_CHANGE_MAX,
    NewTopic,
    add_partitions,
    allocate_producer_ids,
    create_topic,
    delete_topic,
    duplicates,
    elect_leader,
    raise_leader_epochs,
    random_topic_id,
    register_broker,
    set_feature_levels,
)
from holdfast.broker.metadata.image import (
    UNASSIGNED_DIRECTORY,
    ClusterImage,
    Resource,
    ResourceType,
    TopicImage,
)
from holdfast.config.broker import BrokerConfig
from holdfast.errors import ApiError
from holdfast.seams import Randomness
from holdfast.wire.metadata_records import PartitionChange

Create = Callable[..., TopicImage]


@pytest.fixture
def create(image: ClusterImage, config: BrokerConfig, randomness: Randomness) -> Create:
    def create_in(name: str, into: ClusterImage = image, **wishes: Any) -> TopicImage:
        into.apply_all(create_topic(into, NewTopic(name, **wishes), config, randomness))
        return into.topics[name]

    return create_in


def refused(attempt: Callable[[], object]) -> ErrorCode:
    with pytest.raises(ApiError) as caught:
        attempt()
    assert caught.value.message, "a refusal says why"
    return caught.value.code


def test_a_topic_is_created_with_its_partitions_led_by_the_only_broker(create: Create) -> None:
    topic = create("orders", num_partitions=3, replication_factor=1)
    assert [partition.index for partition in topic.partitions] == [0, 1, 2]
    for partition in topic.partitions:
        assert partition.leader == 1
        assert partition.replicas == partition.isr == (1,)
        assert partition.leader_epoch == partition.partition_epoch == 0


def test_minus_one_takes_the_defaults(create: Create) -> None:
    topic = create("orders", num_partitions=-1, replication_factor=-1)
    assert len(topic.partitions) == 2


def test_a_topic_is_found_by_name_and_by_id(create: Create, image: ClusterImage) -> None:
    topic = create("orders")
    assert image.topic("orders") is topic
    assert image.topic_by_id(topic.topic_id) is topic


@pytest.mark.parametrize("name", ["", ".", "..", "a" * 250, "a b", "a/b", "naïve", "a\n", "a,b"])
def test_illegal_names_are_refused(create: Create, name: str) -> None:
    assert refused(lambda: create(name)) is ErrorCode.invalid_topic_exception


@pytest.mark.parametrize("name", ["a" * 249, "...", "a.b", "a_b", "A-9", "-"])
def test_legal_names_are_accepted(create: Create, name: str) -> None:
    assert create(name).name == name


@pytest.mark.parametrize(("first", "second"), [("a.b", "a_b"), ("a_b", "a.b"), ("x._y", "x_.y")])
def test_names_that_differ_in_dots_and_underscores_only_collide(
    create: Create, first: str, second: str
) -> None:
    create(first)
    assert refused(lambda: create(second)) is ErrorCode.invalid_topic_exception


def test_a_deleted_topic_no_longer_collides(create: Create, image: ClusterImage) -> None:
    image.apply_all(delete_topic(image, create("a.b").topic_id))
    assert create("a_b").name == "a_b"


@pytest.mark.parametrize(("first", "second"), [("orders", "Orders"), ("A.b", "a.B")])
def test_names_that_differ_in_case_only_collide_where_the_disk_takes_them_for_one(
    create: Create, image: ClusterImage, first: str, second: str
) -> None:
    image.folds_case = True
    create(first)
    assert refused(lambda: create(second)) is ErrorCode.invalid_topic_exception
    image.folds_case = False
    assert create(second).name == second


def test_an_existing_topic_is_not_created_again(create: Create) -> None:
    create("orders.eu")
    assert refused(lambda: create("orders.eu")) is ErrorCode.topic_already_exists


def test_the_metadata_log_is_no_topic(create: Create) -> None:
    assert refused(lambda: create("__cluster_metadata")) is ErrorCode.invalid_request


@pytest.mark.parametrize("count", [0, -2, -100])
def test_a_number_of_partitions_must_be_positive(create: Create, count: int) -> None:
    assert refused(lambda: create("orders", num_partitions=count)) is ErrorCode.invalid_partitions


@pytest.mark.parametrize("factor", [0, -2, 2, 3])
def test_a_replication_factor_must_be_positive_and_within_the_brokers(create: Create, factor: int) -> None:
    assert (
        refused(lambda: create("orders", replication_factor=factor)) is ErrorCode.invalid_replication_factor
    )


def test_the_refusal_of_a_replication_factor_names_the_number_of_brokers(create: Create) -> None:
    with pytest.raises(ApiError, match=r"registered brokers, 1\b"):
        create("orders", replication_factor=3)


def test_too_many_partitions_at_once_are_refused(create: Create) -> None:
    too_many = RECORDS_PER_CHANGE_MAX + 1
    assert refused(lambda: create("orders", num_partitions=too_many)) is ErrorCode.policy_violation


def test_manual_assignments_are_followed(create: Create) -> None:
    topic = create("orders", assignments=[(1, [1]), (0, [1])])
    assert [partition.replicas for partition in topic.partitions] == [(1,), (1,)]


@pytest.mark.parametrize(
    "assignments",
    [
        [(0, [])],
        [(0, [9])],
        [(0, [1, 1])],
        [(0, [1]), (0, [1])],
        [(1, [1])],
        [(0, [1]), (2, [1])],
        [(-1, [1])],
    ],
)
def test_impossible_assignments_are_refused(
    create: Create, assignments: Sequence[tuple[int, Sequence[int]]]
) -> None:
    attempt = refused(lambda: create("orders", assignments=assignments))
    assert attempt is ErrorCode.invalid_replica_assignment


@pytest.mark.parametrize("counts", [{"num_partitions": 1}, {"replication_factor": 1}])
def test_assignments_exclude_counts(create: Create, counts: dict[str, int]) -> None:
    assert refused(lambda: create("orders", assignments=[(0, [1])], **counts)) is ErrorCode.invalid_request


def test_assignments_must_agree_on_the_number_of_replicas(
    create: Create, make_cluster: Any, make_broker: Any
) -> None:
    two = make_cluster(make_broker(1), make_broker(2))
    attempt = refused(lambda: create("orders", two, assignments=[(0, [1, 2]), (1, [1])]))
    assert attempt is ErrorCode.invalid_replica_assignment


def test_an_assignment_to_fenced_brokers_alone_is_refused(
    create: Create, make_cluster: Any, make_broker: Any
) -> None:
    one_fenced = make_cluster(make_broker(1), make_broker(2, fenced=True))
    attempt = refused(lambda: create("orders", one_fenced, assignments=[(0, [2])]))
    assert attempt is ErrorCode.invalid_replica_assignment


def test_no_topic_is_created_while_every_broker_is_fenced(
    create: Create, make_cluster: Any, make_broker: Any
) -> None:
    all_fenced = make_cluster(make_broker(1, fenced=True))
    assert refused(lambda: create("orders", all_fenced)) is ErrorCode.invalid_replication_factor


def test_partitions_spread_evenly_over_brokers(create: Create, make_cluster: Any, make_broker: Any) -> None:
    three = make_cluster(make_broker(1), make_broker(2), make_broker(3))
    topic = create("orders", three, num_partitions=6, replication_factor=2)
    leaders = Counter(partition.leader for partition in topic.partitions)
    assert leaders == {1: 2, 2: 2, 3: 2}
    assert all(len(set(partition.replicas)) == 2 for partition in topic.partitions)


def test_a_fenced_replica_is_not_in_sync(create: Create, make_cluster: Any, make_broker: Any) -> None:
    one_fenced = make_cluster(make_broker(1), make_broker(2, fenced=True))
    topic = create("orders", one_fenced, num_partitions=2, replication_factor=2)
    assert all(partition.isr == (1,) and partition.leader == 1 for partition in topic.partitions)


def test_new_partitions_go_to_the_directory_with_fewest(
    create: Create, make_cluster: Any, make_broker: Any
) -> None:  # B5
    three_directories = make_cluster(make_broker(1, directories=3))
    first = create("first", three_directories, num_partitions=2)
    second = create("second", three_directories, num_partitions=4)
    used = Counter(partition.directory_of(1) for topic in (first, second) for partition in topic.partitions)
    assert sorted(used.values()) == [2, 2, 2]


def test_a_broker_without_named_directories_chooses_for_itself(
    create: Create, make_cluster: Any, make_broker: Any
) -> None:
    unnamed = make_cluster(make_broker(1, directories=0))
    assert create("orders", unnamed).partitions[0].directories == (UNASSIGNED_DIRECTORY,)


def test_settings_of_a_new_topic_are_kept(create: Create, image: ClusterImage) -> None:
    create("orders", configs=[("retention.ms", "5"), ("cleanup.policy", "compact"), ("retention.ms", "6")])
    settings = image.settings(Resource(ResourceType.TOPIC, "orders"))
    assert settings == {"retention.ms": "6", "cleanup.policy": "compact"}


@pytest.mark.parametrize("setting", [("nope", "1"), ("retention.ms", "soon"), ("retention.ms", None)])
def test_impossible_settings_refuse_the_topic(
    create: Create, image: ClusterImage, setting: tuple[str, str | None]
) -> None:
    assert refused(lambda: create("orders", configs=[setting])) is ErrorCode.invalid_config
    assert image.topic("orders") is None


def test_deleting_a_topic_removes_its_settings(create: Create, image: ClusterImage) -> None:
    topic = create("orders", configs=[("retention.ms", "5")])
    image.apply_all(delete_topic(image, topic.topic_id))
    assert image.topic("orders") is None
    assert image.topic_by_id(topic.topic_id) is None
    assert not image.configs


def test_a_recreated_topic_has_another_id(create: Create, image: ClusterImage) -> None:  # HF408
    old = create("orders")
    image.apply_all(delete_topic(image, old.topic_id))
    assert create("orders").topic_id != old.topic_id


def test_deleting_an_unknown_id_is_refused(image: ClusterImage) -> None:
    assert refused(lambda: delete_topic(image, UUID(int=77))) is ErrorCode.unknown_topic_id


def test_partitions_are_added_after_the_last(
    create: Create, image: ClusterImage, randomness: Randomness
) -> None:
    before = create("orders", num_partitions=2)
    image.apply_all(add_partitions(image, "orders", 5, None, randomness))
    after = image.topics["orders"]
    assert [partition.index for partition in after.partitions] == [0, 1, 2, 3, 4]
    assert after.partitions[:2] == before.partitions
    assert len(before.partitions) == 2, "what was handed out does not change"


@pytest.mark.parametrize("count", [3, 2, 1, 0, -1])
def test_a_topic_never_keeps_or_loses_partitions_on_request(
    create: Create, image: ClusterImage, randomness: Randomness, count: int
) -> None:
    create("orders", num_partitions=3)
    attempt = refused(lambda: add_partitions(image, "orders", count, None, randomness))
    assert attempt is ErrorCode.invalid_partitions


@pytest.mark.parametrize("assignments", [[], [[1]], [[1], [1], [1]], [[1], [9]], [[1], []], [[1], [1, 1]]])
def test_assignments_of_added_partitions_must_fit(
    create: Create, image: ClusterImage, randomness: Randomness, assignments: list[list[int]]
) -> None:
    create("orders", num_partitions=1)
    attempt = refused(lambda: add_partitions(image, "orders", 3, assignments, randomness))
    assert attempt is ErrorCode.invalid_replica_assignment


def test_partitions_of_an_unknown_topic_cannot_be_added(image: ClusterImage, randomness: Randomness) -> None:
    attempt = refused(lambda: add_partitions(image, "orders", 3, None, randomness))
    assert attempt is ErrorCode.unknown_topic_or_partition


def test_producer_ids_are_never_given_twice(image: ClusterImage) -> None:
    given: set[int] = set()
    for _ in range(3):
        block, records = allocate_producer_ids(image, 1)
        ids = set(range(block.first, block.end))
        assert len(ids) == 1000
        assert not ids & given
        given |= ids
        image.apply_all(records)


def test_producer_ids_run_out_with_an_error(image: ClusterImage) -> None:
    image.next_producer_id = 2**63 - 500
    assert refused(lambda: allocate_producer_ids(image, 1)) is ErrorCode.unknown_server_error


def test_leader_epochs_rise_at_a_start(create: Create, image: ClusterImage) -> None:
    create("orders", num_partitions=2)
    create("payments")
    image.apply_all(raise_leader_epochs(image, 1))
    image.apply_all(raise_leader_epochs(image, 1))
    for topic in image.topics.values():
        for partition in topic.partitions:
            assert (partition.leader, partition.leader_epoch, partition.partition_epoch) == (1, 2, 2)


def test_a_start_takes_no_partition_from_another_leader(
    create: Create, make_cluster: Any, make_broker: Any
) -> None:
    two = make_cluster(make_broker(1), make_broker(2))
    create("orders", two, assignments=[(0, [1, 2]), (1, [2, 1])])
    two.apply_all(raise_leader_epochs(two, 2))
    first, second = two.topics["orders"].partitions
    assert (first.leader, first.leader_epoch) == (1, 0)
    assert (second.leader, second.leader_epoch) == (2, 1)


def test_a_broker_registers_anew_with_a_higher_epoch_only(image: ClusterImage, make_broker: Any) -> None:
    image.apply_all(register_broker(image, make_broker(1, epoch=5)))
    assert image.brokers[1].broker_epoch == 5
    for epoch in (5, 4):
        stale = make_broker(1, epoch=epoch)
        assert refused(lambda stale=stale: register_broker(image, stale)) is ErrorCode.stale_broker_epoch  # type: ignore[misc]


def test_a_fenced_broker_is_not_active_until_unfenced(image: ClusterImage) -> None:
    image.apply_all(change_registration(image, 1, fenced=True))
    assert image.active_brokers() == []
    image.apply_all(change_registration(image, 1, fenced=False))
    assert image.active_brokers() == [1]


def test_directories_in_working_order_can_change(image: ClusterImage) -> None:
    image.apply_all(change_registration(image, 1, log_dirs=[UUID(int=900)]))
    assert image.brokers[1].log_dirs == (UUID(int=900),)
    assert image.brokers[1].active


def test_feature_levels_are_recorded_when_they_change(image: ClusterImage) -> None:
    image.apply_all(set_feature_levels(image, {"group.version": 1, "metadata.version": 30}))
    assert list(image.features) == ["metadata.version", "group.version"], "the metadata version comes first"
    assert image.features == {"metadata.version": 30, "group.version": 1}
    assert set_feature_levels(image, {"metadata.version": 30}) == []
    image.apply_all(set_feature_levels(image, {"group.version": 0}))
    assert image.features == {"metadata.version": 30}


def test_topic_ids_never_look_like_an_option(image: ClusterImage) -> None:
    class Dashes:
        def __init__(self) -> None:
            self.left = [bytes([0xF8]) + bytes(15), bytes([0xFB]) * 16, bytes([1]) * 16]

        def uuid_bytes(self) -> bytes:
            return self.left.pop(0)

        def below(self, bound: int) -> int:
            return 0

    assert random_topic_id(image, Dashes()).bytes == bytes([1]) * 16


def test_names_given_twice_are_found() -> None:
    assert duplicates(["a", "b", "a", "c", "b"]) == {"a", "b"}
    assert duplicates(["a", "b"]) == frozenset()


def test_a_preferred_leader_is_elected_when_alive_and_in_sync(
    create: Create, make_cluster: Any, make_broker: Any
) -> None:  # R6
    two = make_cluster(make_broker(1), make_broker(2, fenced=True))
    create("orders", two, assignments=[(0, [2, 1])])
    unavailable = refused(lambda: elect_leader(two, "orders", 0, unclean=False))
    assert unavailable is ErrorCode.preferred_leader_not_available
    two.apply_all(change_registration(two, 2, fenced=False))
    topic_id = two.topics["orders"].topic_id
    two.apply(PartitionChange(partition_id=0, topic_id=topic_id, isr=(1, 2)))
    two.apply_all(elect_leader(two, "orders", 0, unclean=False))
    partition = two.topics["orders"].partitions[0]
    assert (partition.leader, partition.leader_epoch, partition.isr) == (2, 1, (1, 2))


def test_an_unclean_election_needs_a_partition_without_leader_and_a_living_replica(
    create: Create, image: ClusterImage
) -> None:  # R5
    topic_id = create("orders").topic_id
    assert refused(lambda: elect_leader(image, "orders", 0, unclean=True)) is ErrorCode.election_not_needed
    image.apply(PartitionChange(partition_id=0, topic_id=topic_id, leader=-1, isr=()))
    image.apply_all(elect_leader(image, "orders", 0, unclean=True))
    partition = image.topics["orders"].partitions[0]
    assert (partition.leader, partition.isr, partition.leader_recovery_state) == (1, (1,), 1)
    image.apply(PartitionChange(partition_id=0, topic_id=topic_id, leader=-1))
    image.apply_all(change_registration(image, 1, fenced=True))
    unavailable = refused(lambda: elect_leader(image, "orders", 0, unclean=True))
    assert unavailable is ErrorCode.eligible_leaders_not_available


def test_a_leader_that_is_the_preferred_one_is_not_elected_again(create: Create, image: ClusterImage) -> None:
    create("orders")
    assert refused(lambda: elect_leader(image, "orders", 0, unclean=False)) is ErrorCode.election_not_needed
    for topic, index in (("orders", 2), ("orders", -1), ("unknown", 0)):
        attempt = refused(lambda topic=topic, index=index: elect_leader(image, topic, index, unclean=False))  # type: ignore[misc]
        assert attempt is ErrorCode.unknown_topic_or_partition

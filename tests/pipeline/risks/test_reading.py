"""HF401, HF402, HF408, HF409: what a source passes over without a word, or hands out though it was taken back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import NewPartitions

from holdfast.pipeline.guards import GuardTripped
from holdfast.pipeline.source import HoldfastSource

if TYPE_CHECKING:
    from .conftest import Scene


def take_away(scene: Scene, before: int) -> None:
    """What retention does to a query that is down for too long."""
    gone = scene.admin.delete_records([TopicPartition(scene.topic, 0, before)])
    for each in gone.values():
        each.result(30)


# ------------------------------------------------------------------- HF401 failOnDataLoss=false


def test_hf401_a_lost_range_with_plain_spark_is_passed_over(plain: Scene) -> None:
    plain.send_orders(range(5))
    plain.query(plain.orders(failOnDataLoss="false"))
    plain.send_orders(range(5, 20))
    take_away(plain, 12)
    plain.query(plain.orders(failOnDataLoss="false"))
    assert plain.ids() == [*range(5), *range(12, 20)]


def test_hf401_a_lost_range_with_ours_stops_the_pipeline_and_is_named(ours: Scene) -> None:
    ours.send_orders(range(5))
    ours.run()
    ours.send_orders(range(5, 20))
    take_away(ours, 12)
    with pytest.raises(GuardTripped, match=r"(?s)5.*12") as stopped:
        ours.run()
    assert ours.topic in str(stopped.value)
    assert ours.ids() == list(range(5))
    ours.spark.dataSource.register(HoldfastSource)
    with pytest.raises(Exception, match="HF401"):
        ours.stream("holdfast", failOnDataLoss="false").schema  # noqa: B018


# ------------------------------------------------------------------- HF402 the first start, a new partition


def test_hf402_the_first_start_with_plain_spark_begins_at_latest(plain: Scene) -> None:
    plain.send_orders(range(5))
    found: list[int] = []
    plain.query(plain.stream(), lambda rows, _: found.append(rows.count()))
    assert sum(found) == 0


def test_hf402_the_first_start_and_a_new_partition_with_ours_begin_at_earliest(ours: Scene) -> None:
    ours.send_orders(range(5))
    ours.run()
    ours.admin.create_partitions([NewPartitions(ours.topic, 2)])[ours.topic].result(30)
    ours.send_orders(range(5, 10), partition=1)
    ours.run()
    assert ours.ids() == list(range(10))


# ------------------------------------------------------------------- HF408 a topic created again


def test_hf408_a_topic_created_again_with_plain_spark_loses_its_beginning(plain: Scene) -> None:
    plain.send_orders(range(5))
    plain.query(plain.orders(failOnDataLoss="true"))
    plain.create_again()
    plain.send_orders(range(100, 109))
    plain.query(plain.orders(failOnDataLoss="true"))
    assert plain.ids() == [*range(5), *range(105, 109)]


def test_hf408_a_topic_created_again_with_ours_stops_the_pipeline(ours: Scene) -> None:
    ours.send_orders(range(5))
    ours.run()
    ours.create_again()
    ours.send_orders(range(100, 109))
    with pytest.raises(GuardTripped, match="created again"):
        ours.run()
    assert ours.ids() == list(range(5))


# ------------------------------------------------------------------- HF409 read_uncommitted


def test_hf409_messages_taken_back_with_plain_spark_are_handed_out(plain: Scene) -> None:
    plain.send_in_transaction(range(5), commit=False)
    plain.send_in_transaction(range(5, 10), commit=True)
    plain.query(plain.orders())
    assert plain.ids() == list(range(10))


def test_hf409_messages_taken_back_with_ours_are_not(ours: Scene) -> None:
    ours.send_in_transaction(range(5), commit=False)
    ours.send_in_transaction(range(5, 10), commit=True)
    summary = ours.run()
    assert ours.ids() == list(range(5, 10))
    assert summary.intake.aborted == 5

"""HF403, HF404, HF405: a batch that is written twice, or never."""

from __future__ import annotations

import shutil
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

from holdfast.errors import HoldfastError
from holdfast.pipeline.definition.model import KafkaSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from .conftest import Scene

SMALL, LARGE = 5, 100_000
"""Records of an order, then one of this many bytes, more than the topic takes at first."""


# ------------------------------------------------------------------- HF403 the checkpoint is lost


def to_files(scene: Scene) -> None:
    """Spark's own sink for files, which calls itself exactly-once."""
    query = (
        scene.orders()
        .writeStream.format("parquet")
        .option("path", str(scene.out))
        .option("checkpointLocation", str(scene.checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)


def test_hf403_a_lost_checkpoint_with_plain_spark_loses_a_batch(plain: Scene) -> None:
    plain.send_orders(range(5))
    to_files(plain)
    shutil.rmtree(plain.checkpoint)
    plain.send_orders(range(5, 10))
    to_files(plain)
    # The new batch 0 is taken for the old one, which the files know, and left out.
    assert plain.ids() == list(range(5))


def test_hf403_a_lost_checkpoint_with_plain_spark_writes_twice(plain: Scene) -> None:
    plain.send_orders(range(5))
    plain.query(plain.orders())
    shutil.rmtree(plain.checkpoint)
    plain.query(plain.orders())
    assert Counter(plain.ids()) == dict.fromkeys(range(5), 2)


def test_hf403_a_lost_home_with_ours_costs_nothing(ours: Scene) -> None:
    ours.send_orders(range(5))
    ours.run()
    shutil.rmtree(ours.directory / "home")
    ours.send_orders(range(5, 10))
    ours.run()
    assert ours.ids() == list(range(10))


# ------------------------------------------------------------------- HF404 a replayed batch


def test_hf404_a_replayed_batch_with_plain_spark_is_written_twice(plain: Scene) -> None:
    def append_and_die(rows: DataFrame, number: int) -> None:
        plain.append(rows, number)
        raise RuntimeError("killed between the write and Spark's commit")

    plain.send_orders(range(5))
    with pytest.raises(Exception, match="killed between"):
        plain.query(plain.orders(), append_and_die)
    plain.query(plain.orders())
    assert Counter(plain.ids()) == dict.fromkeys(range(5), 2)


def test_hf404_a_replayed_batch_with_ours_is_written_once(ours: Scene) -> None:
    ours.send_orders(range(5))
    ours.crash("committed:parquet")
    ours.send_orders(range(5, 10))
    ours.run()
    assert ours.ids() == list(range(10))


# ------------------------------------------------------------------- HF405 Spark's Kafka sink


def make_target(scene: Scene) -> str:
    """A topic that does not take the last of the orders that are sent here."""
    target = f"{scene.topic}-out"
    scene.create(target, max_message_bytes=str(LARGE // 2))
    scene.send_orders(range(SMALL))
    scene.send(b'{"id": 5, "amount": 1, "note": "%s"}' % (b"x" * LARGE))
    return target


def make_room(scene: Scene, target: str) -> None:
    """Now it takes all of them."""
    entry = ConfigEntry("max.message.bytes", str(LARGE * 2), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, target, incremental_configs=[entry])
    scene.admin.incremental_alter_configs([resource])[resource].result(30)


def to_topic(scene: Scene, target: str) -> None:
    query = (
        scene.stream(startingOffsets="earliest")
        .select("value")
        .writeStream.format("kafka")
        .option("kafka.bootstrap.servers", scene.bootstrap)
        .option("topic", target)
        .option("checkpointLocation", str(scene.checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)


def times_written(scene: Scene, target: str) -> list[int]:
    """How often each order is in the topic."""
    found = Counter(int(value.split(b'"id":')[1].split(b",")[0]) for value in scene.values(target))
    return [found[number] for number in range(SMALL + 1)]


def test_hf405_a_failed_write_with_plain_spark_is_written_again(plain: Scene) -> None:
    target = make_target(plain)
    with pytest.raises(Exception, match="RecordTooLarge"):
        to_topic(plain, target)
    make_room(plain, target)
    to_topic(plain, target)
    assert times_written(plain, target) == [2] * SMALL + [1]


def test_hf405_a_failed_write_with_ours_leaves_nothing_behind(ours: Scene) -> None:
    target = make_target(ours)
    sinks = (
        KafkaSink(
            topic=target, value="concat('{\"id\":', id, ',\"note\":\"', repeat('x', 100 + 20000 * id), '\"}')"
        ),
    )
    with pytest.raises(HoldfastError, match=target):
        ours.run(sinks=sinks)
    assert times_written(ours, target) == [0] * (SMALL + 1)
    make_room(ours, target)
    ours.run(sinks=sinks)
    assert times_written(ours, target) == [1] * (SMALL + 1)

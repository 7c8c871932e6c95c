"""What stops a pipeline before it reads: each way in which an offset stops meaning what it meant."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping

import pytest

from holdfast.pipeline.guards import GuardTripped, check_positions, without
from holdfast.pipeline.positions import Place, Position, Positions
from holdfast.reader import OffsetAnswer, OffsetSpec, PartitionInfo, TopicInfo, TopicPartition

ID, OTHER_ID = uuid.UUID(int=1), uuid.UUID(int=2)
ORDERS = TopicPartition("orders", 0)


class Log:
    """A cluster with one partition, as far as the guards ask."""

    def __init__(self, start: int, end: int, epoch: tuple[int, int] = (7, 1_000)) -> None:
        self.start, self.end, self.epoch = start, end, epoch

    def offsets(
        self, partitions: Iterable[TopicPartition], spec: OffsetSpec
    ) -> dict[TopicPartition, OffsetAnswer]:
        offset = self.start if spec == "earliest" else self.end
        return {key: OffsetAnswer(offset, 7, -1) for key in partitions}

    def epoch_ends(self, epochs: Mapping[TopicPartition, int]) -> dict[TopicPartition, tuple[int, int]]:
        return dict.fromkeys(epochs, self.epoch)


def topics(topic_id: uuid.UUID = ID, partitions: int = 1) -> dict[str, TopicInfo]:
    parts = {number: PartitionInfo(0, 7) for number in range(partitions)}
    return {"orders": TopicInfo("orders", topic_id, parts)}


def standing(offset: int, epoch: int = 7) -> Positions:
    return Positions({Place("orders", ID, 0): Position(offset, epoch)})


def test_a_position_inside_its_log_is_fine() -> None:
    check_positions(Log(10, 200), standing(100), topics())


@pytest.mark.parametrize("offset", [10, 200])
def test_both_ends_of_the_log_are_inside(offset: int) -> None:
    check_positions(Log(10, 200), standing(offset), topics())


def test_a_topic_created_again_is_seen_by_its_id() -> None:
    with pytest.raises(GuardTripped, match=r"deleted and created again.*HF408"):
        check_positions(Log(0, 200), standing(100), topics(OTHER_ID))


def test_a_topic_that_is_gone_is_named() -> None:
    with pytest.raises(GuardTripped, match="'orders' is gone"):
        check_positions(Log(0, 200), standing(100), {})


def test_a_topic_that_is_gone_can_be_left_out_of_a_pattern() -> None:
    with pytest.raises(GuardTripped, match="leave it out of the source's pattern") as tripped:
        check_positions(Log(0, 200), standing(100), {}, "orders|orders-.*")
    narrowed = without("orders", "orders|orders-.*")
    assert repr(narrowed) in str(tripped.value)
    names = ("orders", "orders-eu", "payments")
    assert [name for name in names if re.fullmatch(narrowed, name)] == ["orders-eu"]


def test_a_partition_that_is_gone_is_named() -> None:
    with pytest.raises(GuardTripped, match="orders-0 is gone"):
        check_positions(Log(0, 200), standing(100), topics(partitions=0))


def test_retention_past_the_position_is_counted() -> None:
    with pytest.raises(GuardTripped, match=r"^50 offsets of orders-0 are gone.*HF401"):
        check_positions(Log(150, 200), standing(100), topics())


def test_an_end_below_the_position_is_counted() -> None:
    with pytest.raises(GuardTripped, match=r"ends at 60.*40 offsets"):
        check_positions(Log(0, 60), standing(100), topics())


def test_an_epoch_that_ended_below_the_position_means_other_records() -> None:
    with pytest.raises(GuardTripped, match="cut below offset 100"):
        check_positions(Log(0, 200, epoch=(7, 90)), standing(100), topics())


def test_an_epoch_that_was_replaced_below_the_position_means_other_records() -> None:
    with pytest.raises(GuardTripped, match="cut below offset 100"):
        check_positions(Log(0, 200, epoch=(5, 90)), standing(100), topics())


def test_a_log_that_knows_no_epoch_so_old_means_other_records() -> None:
    with pytest.raises(GuardTripped, match="not known there"):
        check_positions(Log(0, 200, epoch=(-1, -1)), standing(100), topics())


def test_an_epoch_without_records_of_its_own_is_fine() -> None:
    check_positions(Log(0, 200, epoch=(5, 120)), standing(100), topics())


def test_an_unknown_epoch_is_not_asked_for() -> None:
    check_positions(Log(0, 200, epoch=(5, 90)), standing(100, epoch=-1), topics())

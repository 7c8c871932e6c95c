"""Where leader epochs end, as clients are told (KIP-320): a start without writes must not look like a cut."""

from __future__ import annotations

from typing import cast
from uuid import UUID

import pytest

from holdfast.broker.log.leader_epochs import EpochEnd, LeaderEpochs
from holdfast.broker.log.log import Log
from holdfast.broker.log.producer_state import ProducerStateMap
from holdfast.broker.node.directories import LogDirectory
from holdfast.broker.node.hosted import HostedPartition
from holdfast.wire.positions import LogPosition


class EpochsOnly:
    """The part of a log that the rule looks at."""

    def __init__(self, entries: list[tuple[int, int]]) -> None:
        self.epochs = LeaderEpochs()
        for epoch, start in entries:
            self.epochs.assign(epoch, start)
        self.producers = ProducerStateMap()
        self.end_position = LogPosition(0, 0, 0)


@pytest.mark.parametrize(
    ("written", "leader_epoch", "asked", "answer"),
    [
        ([], 0, 0, (0, 0)),
        ([], 2, 1, (1, 0)),
        ([], 2, 3, (-1, -1)),
        ([(0, 0)], 0, 0, (0, 10)),
        ([(0, 0)], 2, 2, (2, 10)),
        ([(0, 0)], 2, 1, (0, 10)),
        ([(0, 0)], 2, 0, (0, 10)),
        ([(0, 0), (2, 7)], 2, 1, (0, 7)),
        ([(0, 0), (2, 7)], 2, 2, (2, 10)),
        ([(0, 0), (2, 7)], 2, 3, (-1, -1)),
        ([(0, 0)], 2, -1, (-1, -1)),
    ],
)
def test_the_present_epoch_counts_before_it_has_written(
    written: list[tuple[int, int]], leader_epoch: int, asked: int, answer: tuple[int, int]
) -> None:
    log = cast(Log, EpochsOnly(written))
    hosted = HostedPartition(
        "t", UUID(int=1), 0, leader_epoch, log, cast(LogDirectory, None), lambda *_: None
    )
    end_offset = 10 if written else 0
    assert hosted.end_of_epoch(asked, end_offset) == EpochEnd(*answer)

"""Leader epochs on disk: whatever happens, a log knows where each epoch of its batches began."""

from __future__ import annotations

import random

import pytest
from tests.support.partition_logs import DIRECTORY, Batch, append, flush, open_at, read_batches

from holdfast.broker.log.leader_epochs import ASIDE_SUFFIX, LEADER_EPOCH_FILE, EpochStart, LeaderEpochs
from holdfast.broker.log.log import Log
from holdfast.errors import CorruptLog
from holdfast.testing.disk import SimulatedDisk
from holdfast.wire.batch import read_header


def told_by_batches(log: Log) -> list[EpochStart]:
    epochs = LeaderEpochs()
    for batch in read_batches(log):
        header = read_header(batch)
        if header.leader_epoch > epochs.latest_epoch:
            epochs.assign(header.leader_epoch, header.base_offset)
    return epochs.entries


@pytest.mark.parametrize("seed", range(40))
def test_epochs_are_those_of_the_batches_after_any_end(seed: int) -> None:
    rng = random.Random(seed)
    disk = SimulatedDisk(seed)
    disk.prepare("/data")
    log = open_at(disk)
    durable = 0
    for epoch in range(8):
        for number in range(rng.randrange(6)):
            append(log, Batch((b"%d" % number * rng.randrange(1, 300),), epoch=epoch))
            if rng.random() < 0.4:
                durable = flush(disk, log)
        end = rng.choice(["clean", "kill", "power"])
        if end == "clean":
            log.flush_and_close()
            durable = log.end_offset
            disk.crash()
        elif end == "kill":
            disk.kill()
        else:
            disk.crash()
        if not durable and not disk.exists(DIRECTORY):
            disk.make_directory(DIRECTORY)
        log = open_at(disk, clean=end == "clean", torn=end == "power", recovery_point=durable)
        durable = log.end_offset
        assert log.epochs.entries == told_by_batches(log)


def test_a_clean_stop_leaves_the_epochs_where_kafka_looks_for_them(disk: SimulatedDisk) -> None:
    log = open_at(disk)
    for epoch in range(3):
        append(log, Batch((b"x" * 400,), epoch=epoch))
    log.flush_and_close()
    path = f"{DIRECTORY}/{LEADER_EPOCH_FILE}"
    assert LeaderEpochs.read(disk, path).entries == [(0, 0), (1, 1), (2, 2)]
    assert not disk.exists(path + ASIDE_SUFFIX)


def test_a_torn_file_aside_is_no_damage(disk: SimulatedDisk) -> None:
    log = open_at(disk)
    append(log, Batch((b"x",), epoch=4))
    log.flush_and_close()
    path = f"{DIRECTORY}/{LEADER_EPOCH_FILE}"
    disk.open(path + ASIDE_SUFFIX, "create").pwritev([b"0\n2\n4 0\n5"], 0)
    with pytest.raises(CorruptLog):
        LeaderEpochs.read(disk, path + ASIDE_SUFFIX)
    said: list[str] = []
    assert open_at(disk, clean=True, recovery_point=1, said=said).epochs.entries == [(4, 0)]
    assert said == []

"""What a node says, when, and that nothing it does depends on its being said."""

from __future__ import annotations

import errno
from typing import Final

import pytest
from kio.schema.errors import ErrorCode
from tests.support.quiet_broker import QuietBroker

from holdfast.broker.node.failures import QUIET_MS
from holdfast.broker.node.loggers import REQUESTS
from holdfast.broker.node.node import CHECKPOINT_INTERVAL_MS
from holdfast.broker.node.troubles import REMIND_MS, REMINDED_MAX, Kind, Troubles
from holdfast.saying import Level, Line, warn
from holdfast.testing.bare_node import BareNode
from holdfast.testing.disk import Fault
from holdfast.wire.batch import Record, build_batch

FOR_EVER: Final = 1_000_000
SEGMENT: Final = "t-0/00000000000000000000.log"


def batch(node: BareNode, value: bytes = b"x") -> bytes:
    return build_batch([Record(0, 0, None, value)], base_timestamp=node.clock.now().wall_ms)


def broken_pipe(line: str) -> None:
    raise BrokenPipeError(line)


def pass_seconds(node: BareNode, seconds: int) -> None:
    for _ in range(seconds):
        node.advance(CHECKPOINT_INTERVAL_MS)
        node.settle()


# A log that fails


def test_a_dead_log_does_not_leave_a_failing_directory_halfway() -> None:
    node = BareNode(say=broken_pipe)
    client, other = node.connect(), node.connect()
    client.create_topic("t", 2)
    ended: list[bool] = []
    node.node.failures.on_fatal = lambda: ended.append(True)
    asked = client.begin_produce("t", batch(node))
    also = other.begin_produce("t", batch(node), index=1)
    node.turn()
    node.disk.plan(Fault("flush", path_contains="t-0"))
    node.flusher.run_one()
    for asking, number in ((client, asked), (other, also)):
        (partition,) = asking.answer(number).responses[0].partition_responses
        assert partition.error_code is ErrorCode.kafka_storage_error
    assert node.node.directories[0].offline
    assert node.node.failures.fatal is not None
    assert ended == [True]


# A disk that refuses


def not_of_requests(said: list[str]) -> list[Line]:
    """Each request that is refused has its line as well."""
    return [line for line in map(Line.of, said) if line.logger != REQUESTS]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_once_and_so_is_its_end(node: BareNode, code: int) -> None:
    client = node.connect()
    client.create_topic("t")
    node.disk.plan(Fault("write", code, times=FOR_EVER))
    said = len(node.said)
    for _ in range(5):
        for _ in range(20):
            assert client.produce("t", batch(node)).error_code is ErrorCode.kafka_storage_error
        pass_seconds(node, QUIET_MS // 1000)
    (began,) = not_of_requests(node.said[said:])
    assert began.level is Level.ERROR
    assert "log directory /data refuses writes" in began
    assert "bytes are free" in began
    assert node.node.troubles.counts[Kind.NO_ROOM] >= 100
    node.disk.clear_faults()
    pass_seconds(node, 3 * QUIET_MS // 1000)
    _, ended = not_of_requests(node.said[said:])
    assert "/data takes writes again" in ended
    assert "after 0:01:" in ended
    assert client.produce("t", batch(node)).error_code is ErrorCode.none
    pass_seconds(node, 3 * QUIET_MS // 1000)
    assert len(not_of_requests(node.said[said:])) == 2


def test_a_disk_that_takes_small_writes_only_is_not_said_to_take_them_again(node: BareNode) -> None:
    """As long as somebody is refused, whatever the broker's own small files say."""
    client = node.connect()
    client.create_topic("t")
    node.disk.plan(Fault("write", errno.ENOSPC, times=FOR_EVER, path_contains=SEGMENT))
    for _ in range(2 * QUIET_MS // 1000):
        client.produce("t", batch(node))
        pass_seconds(node, 1)
    assert len([line for line in node.said if "refuses writes" in line]) == 1
    assert not any("takes writes again" in line for line in node.said)


def test_no_descriptors_are_said_once_and_so_is_their_return(node: BareNode) -> None:
    client = node.connect()
    client.create_topic("t", internal_segment_bytes="100")
    client.produce("t", batch(node))
    node.disk.plan(Fault("create", errno.EMFILE, times=FOR_EVER))
    for _ in range(30):
        assert client.produce("t", batch(node)).error_code is ErrorCode.kafka_storage_error
        pass_seconds(node, 1)
    (began,) = [line for line in node.said if "refuses writes" in line]
    assert "ulimit -n" in began
    node.disk.clear_faults()
    pass_seconds(node, 3 * QUIET_MS // 1000)
    assert len([line for line in node.said if "takes writes again" in line]) == 1


def test_a_directory_that_goes_offline_while_it_is_full_has_only_that_trouble(node: BareNode) -> None:
    client = node.connect()
    client.create_topic("t")
    troubles = node.node.troubles
    for code in (errno.ENOSPC, errno.EIO):
        assert not troubles.lasting(Kind.DIRECTORY_OFFLINE)
        node.disk.plan(Fault("write", code, path_contains=SEGMENT))
        client.begin_produce("t", batch(node))
    assert not troubles.lasting(Kind.NO_ROOM)
    (trouble,) = troubles.lasting(Kind.DIRECTORY_OFFLINE)
    assert trouble.subject == "/data"
    assert "offline until restart, with 2 partitions" in trouble.line


# Troubles


class Clocked(Troubles):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.now = 0
        super().__init__(self.said.append, lambda: self.now)


def test_a_trouble_that_lasts_is_said_again_every_hour_with_what_is_known_now() -> None:
    troubles = Clocked()
    troubles.begin(Kind.NOT_COMPACTED, "t-0", warn("t-0: one reason"))
    troubles.now = REMIND_MS - 1
    troubles.begin(Kind.NOT_COMPACTED, "t-0", warn("t-0: another reason"))
    troubles.remind()
    assert troubles.said == ["t-0: one reason"]
    troubles.now = REMIND_MS
    troubles.remind()
    troubles.remind()
    assert troubles.said[1:] == ["still so, after 1:00:00 and 2 times: t-0: another reason"]
    troubles.now = 2 * REMIND_MS
    troubles.remind()
    assert len(troubles.said) == 3
    assert [Line.of(line).level for line in troubles.said] == [Level.WARN] * 3
    troubles.end(Kind.NOT_COMPACTED, "t-0", "t-0 is compacted again")
    troubles.end(Kind.NOT_COMPACTED, "t-0", "t-0 is compacted again")
    assert troubles.said[3:] == ["t-0 is compacted again, after 2:00:00 and 2 times"]
    troubles.now = 9 * REMIND_MS
    troubles.remind()
    assert len(troubles.said) == 4


def test_of_many_troubles_some_are_said_again_and_the_others_counted() -> None:
    troubles = Clocked()
    for number in range(1000):
        troubles.begin(Kind.PARTITION_OFFLINE, f"t-{number}", f"t-{number} is offline")
    assert len(troubles.said) == 1000, "each when it begins"
    troubles.now = REMIND_MS
    troubles.remind()
    again = troubles.said[1000:]
    assert len(again) == REMINDED_MAX + 1
    assert again[-1] == f"so are {1000 - REMINDED_MAX} others"


def test_a_deleted_topic_has_no_trouble(node: BareNode) -> None:
    client = node.connect()
    client.create_topic("t")
    troubles = node.node.troubles
    troubles.begin(Kind.NOT_COMPACTED, "t-0", "t-0 is not compacted")
    troubles.begin(Kind.NOT_COMPACTED, "other-0", "other-0 is not compacted")
    client.ask(20, 6, topics=[{"name": "t"}], timeout=1000)
    assert [trouble.subject for trouble in troubles.lasting(Kind.NOT_COMPACTED)] == ["other-0"]


def test_compaction_that_fails_is_said_once_and_every_hour() -> None:
    broker = QuietBroker()
    hosted = broker.create("t", cleanup_policy="compact", internal_segment_bytes="250")
    for number in range(12):
        broker.append(hosted, b"k%d" % (number % 3), b"%d" % number)
    segment = hosted.log.segments[0]
    segment.file.pwritev([b"?"], segment.size - 2)
    broker.pass_time(2 * REMIND_MS + REMIND_MS // 2)
    told = [line for line in broker.said if "not compacted" in line]
    assert [line.startswith("still so") for line in told] == [False, True, True]
    assert "times" in told[-1]


def test_a_partition_that_is_offline_is_said_at_the_start_and_every_hour_until_it_is_deleted() -> None:
    broker = QuietBroker()
    hosted = broker.create("t")
    for number in range(3):
        broker.append(hosted, b"k", b"%d" % number)
    broker.node.checkpoints.write_recovery_points()
    broker.settle()
    broker.disk.kill()
    broker.disk.open(hosted.log.active.path(), "write").truncate(10)
    broker = QuietBroker(disk=broker.disk)
    told = [line for line in broker.said if "partition t-0 is offline" in line]
    assert [Line.of(line).level for line in told] == [Level.ERROR]
    broker.pass_time(REMIND_MS + 60_000)
    again = [line for line in broker.said if line.startswith("still so")]
    assert len(again) == 1
    assert again[0].endswith(told[0])
    broker.delete("t")
    broker.settle()
    broker.pass_time(2 * REMIND_MS)
    assert len([line for line in broker.said if line.startswith("still so")]) == 1


def test_damage_that_retention_has_taken_is_said_no_more() -> None:
    broker = QuietBroker()
    hosted = broker.create("t", internal_segment_bytes="100")
    for number in range(4):
        broker.append(hosted, b"k", b"%d" % number)
    broker.disk.flip_bit(hosted.log.segments[0].path(), hosted.log.segments[0].size - 4)
    broker.pass_time(900_000)
    assert len(broker.node.troubles.lasting(Kind.DAMAGED)) == 1
    broker.node.log_starts.move([(hosted, 2)])
    broker.pass_time(60_000)
    assert not broker.node.troubles.lasting(Kind.DAMAGED)
    assert broker.node.troubles.counts[Kind.DAMAGED] == 1

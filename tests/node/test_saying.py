"""What a node says, when, and that nothing it does depends on its being said."""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from holdfast.testing.bare_node import BareNode
from holdfast.testing.disk import Fault
from holdfast.wire.batch import Record, build_batch


def batch(node: BareNode, value: bytes = b"x") -> bytes:
    return build_batch([Record(0, 0, None, value)], base_timestamp=node.clock.now().wall_ms)


def broken_pipe(line: str) -> None:
    raise BrokenPipeError(line)


# A log that fails


def test_a_dead_log_does_not_leave_a_failing_directory_halfway() -> None:
    node = BareNode(say=broken_pipe)
    client, other = node.connect(), node.connect()
    client.create_topic("t", 2)
    ended: list[bool] = []
    node.node.on_fatal = lambda: ended.append(True)
    asked = client.begin_produce("t", batch(node))
    also = other.begin_produce("t", batch(node), index=1)
    node.turn()
    node.disk.plan(Fault("flush", path_contains="t-0"))
    node.flusher.run_one()
    for asking, number in ((client, asked), (other, also)):
        (partition,) = asking.answer(number).responses[0].partition_responses
        assert partition.error_code is ErrorCode.kafka_storage_error
    assert node.node.directories[0].offline
    assert node.node.fatal is not None
    assert ended == [True]

"""Handing messages over: what no spool can hold is refused to whoever sends it, and nobody else suffers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_producer import FakeCluster

from holdfast.client.errors import NotStored
from holdfast.client.spool.format import UNDECIDED, SpooledMessage
from holdfast.client.spool.groups import make_item
from holdfast.client.spool.sender import SpooledSender
from holdfast.client.spool.store import SpoolFailed
from holdfast.errors import UsageError
from holdfast.real import RealFileSystem, RealRandomness
from holdfast.testing.engines import wait_until


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster({"orders": 1})


@pytest.fixture
def sender(tmp_path: Path, cluster: FakeCluster) -> Iterator[SpooledSender]:
    sender = SpooledSender(
        RealFileSystem(),
        str(tmp_path),
        RealRandomness(),
        {"bootstrap.servers": "fake"},
        1 << 30,
        make=cluster.make,
    )
    yield sender
    sender.close()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"value": "text"}, "value is of type str"),
        ({"value": bytearray(b"x")}, "value is of type bytearray"),
        ({"key": "text"}, "key is of type str"),
        ({"headers": (("trace", "text"),)}, "header trace is of type str"),
        ({"timestamp_ms": 2**63}, "timestamp_ms 9223372036854775808"),
        ({"timestamp_ms": "now"}, "str"),
        ({"timestamp_ms": 1.5}, "float"),
        ({"partition": 0.5}, "float"),
    ],
)
def test_what_no_spool_can_hold_is_refused_when_it_is_sent_and_others_go_on(
    sender: SpooledSender, cluster: FakeCluster, message: dict[str, Any], reason: str
) -> None:
    general = sender.send
    for _ in range(2):  # for a topic that is new, and for one that is known
        with pytest.raises(UsageError, match=reason):
            general(
                "orders",
                message.get("partition"),
                message.get("key"),
                message.get("value", b"x"),
                message.get("headers", ()),
                message.get("timestamp_ms", -1),
                30.0,
            )
        general("orders", None, None, b"good", (), -1, 30.0).wait(30)
    assert cluster.values("orders") == [b"good", b"good"]


class SlowQueue(deque[Any]):
    """Whoever looks at all of it is overtaken by one more message, once."""

    late: Any = None

    def _be_overtaken(self) -> None:
        if self.late is not None:
            late, self.late = self.late, None
            self.append(late)

    def __iter__(self) -> Any:
        found = list(super().__iter__())
        self._be_overtaken()
        return iter(found)

    def popleft(self) -> Any:
        first = super().popleft()
        self._be_overtaken()
        return first


def test_a_message_handed_over_while_the_thread_that_writes_fails_is_refused_like_the_others(
    sender: SpooledSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = sender._own.writer
    stored = sender.send("orders", None, None, b"stored", (), -1, 30.0)
    stored.wait(30)
    is_going_on = threading.Event()

    def fail(*arguments: Any) -> Any:
        is_going_on.wait(30)
        raise RuntimeError("it fails")

    monkeypatch.setattr(writer._store, "write", fail)
    taken = sender.send("orders", None, None, b"taken", (), -1, 30.0)
    wait_until(lambda: writer._writing is not None, "it is being written")
    queue = SlowQueue()
    queue.late = late = make_item(
        SpooledMessage("orders", UNDECIDED, None, b"late", (), -1, -1), sender._waiting
    )
    writer._handed = queue
    waiting = sender.send("orders", None, None, b"waiting", (), -1, 30.0)
    is_going_on.set()
    for delivery in (taken, waiting, late):
        with pytest.raises(NotStored, match="it fails"):
            delivery.wait_stored(30)
    with pytest.raises(SpoolFailed, match="nothing more is stored"):
        sender.send("orders", None, None, b"too late", (), -1, 30.0)

"""The producer for asyncio: both moments can be awaited, and the loop is never held up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.client import direct, producer
from holdfast.client.aio import AsyncProducer
from holdfast.client.errors import (
    DeliveryFailed,
    DeliveryStopped,
    ProducerClosed,
    SendTimeout,
    UndeliveredMessages,
)
from holdfast.client.spool import sender as sender_module
from holdfast.errors import UsageError
from holdfast.testing.fake_producer import FakeCluster, Verdict


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """Every producer made in the test is one of this cluster."""
    cluster = FakeCluster({"orders": 1})
    real_direct, real_spooled = direct.DirectSender, sender_module.SpooledSender
    monkeypatch.setattr(direct, "DirectSender", lambda settings: real_direct(settings, make=cluster.make))
    monkeypatch.setattr(
        sender_module, "SpooledSender", lambda *args, **named: real_spooled(*args, make=cluster.make, **named)
    )
    return cluster


@pytest.fixture
async def spooled(cluster: FakeCluster, tmp_path: Path) -> AsyncIterator[AsyncProducer]:
    async with AsyncProducer("fake", spool=tmp_path) as made:
        yield made
        cluster.back()


async def test_stored_and_delivered_can_be_awaited(spooled: AsyncProducer, cluster: FakeCluster) -> None:
    await spooled.send("orders", b"first")
    cluster.away()
    delivery = spooled.send("orders", b"second", key="k")
    await delivery.stored()
    assert delivery.is_stored
    assert not delivery.is_settled
    cluster.back()
    assert (await delivery.delivered()).offset == 1
    assert (await delivery).offset == 1


async def test_many_are_awaited_at_once(cluster: FakeCluster) -> None:
    async with AsyncProducer("fake") as made:
        deliveries = made.send_many("orders", [b"%d" % number for number in range(500)])
        places = await asyncio.gather(*deliveries)
    assert [place.offset for place in places] == list(range(500))


async def test_a_refusal_is_raised_by_whoever_awaits(cluster: FakeCluster) -> None:
    cluster.refuse(lambda topic, partition, message: Verdict(29))
    async with AsyncProducer("fake") as made:
        with pytest.raises(DeliveryFailed):
            await made.send("orders", b"x")


async def test_leaving_with_a_refused_message_raises_and_names_it(cluster: FakeCluster) -> None:
    cluster.refuse(lambda topic, partition, message: Verdict(29))
    with pytest.raises(UndeliveredMessages, match="orders"):
        async with AsyncProducer("fake") as made:
            made.send("orders", b"x")
    with pytest.raises(ProducerClosed):
        made.send("orders", b"late")


async def test_without_room_messages_stand_in_line_and_keep_their_order(cluster: FakeCluster) -> None:
    cluster.queue_max = 5
    cluster.away()
    async with AsyncProducer("fake") as made:
        deliveries = [made.send("orders", b"%d" % number) for number in range(20)]
        assert "waits for room" in repr(deliveries[-1])
        cluster.back()
        await asyncio.gather(*deliveries)
    assert cluster.values("orders") == [b"%d" % number for number in range(20)]


async def test_a_message_that_gets_no_room_in_time_is_refused_and_named(cluster: FakeCluster) -> None:
    cluster.queue_max = 1
    cluster.away()
    made = AsyncProducer("fake", send_timeout=0.01)
    await made.start()
    made.send("orders", b"taken")
    told = made.send("orders", b"told")
    made.send("orders", b"never awaited")
    with pytest.raises(SendTimeout):
        await told
    with pytest.raises(UndeliveredMessages) as left:
        await made.close(timeout=0)
    assert left.value.count == 2


async def test_awaiting_ends_when_the_producer_is_closed(cluster: FakeCluster, tmp_path: Path) -> None:
    made = await AsyncProducer("fake", spool=tmp_path).start()
    await made.send("orders", b"first")
    cluster.away()
    delivery = made.send("orders", b"second")
    await delivery.stored()
    awaiting = asyncio.create_task(delivery.delivered())
    await asyncio.sleep(0)
    await made.close(timeout=0)
    with pytest.raises(DeliveryStopped, match="the spool keeps it"):
        await awaiting


async def test_a_cancelled_wait_takes_nothing_back(spooled: AsyncProducer, cluster: FakeCluster) -> None:
    await spooled.send("orders", b"first")
    cluster.away()
    delivery = spooled.send("orders", b"second")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(delivery.delivered(), 0.01)
    cluster.back()
    assert (await delivery).offset == 1
    assert (await spooled.flush(30)).is_complete


async def test_a_failure_that_came_after_the_wait_was_given_up_is_named(cluster: FakeCluster) -> None:
    cluster.refuse(lambda topic, partition, message: Verdict(29))
    cluster.away()
    with pytest.raises(UndeliveredMessages):
        async with AsyncProducer("fake") as made:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(made.send("orders", b"x").delivered(), 0.01)
            cluster.back()


async def test_an_error_of_the_block_goes_on_with_a_note_of_what_was_left(cluster: FakeCluster) -> None:
    cluster.refuse(lambda topic, partition, message: Verdict(29))
    with pytest.raises(RuntimeError) as failed:
        async with AsyncProducer("fake") as made:
            made.send("orders", b"x")
            raise RuntimeError("the block failed")
    assert any("not delivered" in note for note in failed.value.__notes__)


async def test_sending_before_it_is_started_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="async with"):
        AsyncProducer("fake").send("orders", b"x")


def test_it_takes_what_the_producer_takes() -> None:
    import inspect

    def names(kind: Any) -> dict[str, object]:
        return {
            name: each.default
            for name, each in inspect.signature(kind.__init__).parameters.items()
            if name != "self"
        }

    assert names(AsyncProducer) == names(producer.Producer)

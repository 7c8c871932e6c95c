"""The producer for asyncio: both moments can be awaited, and the loop is never held up."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.fake_producer import FakeCluster, Verdict

from holdfast.client import direct, exit_guard, producer
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


async def test_an_error_of_the_block_goes_on_with_a_note_of_what_was_left(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_guard, "_owed", [])
    cluster.refuse(lambda topic, partition, message: Verdict(29))
    with pytest.raises(RuntimeError) as failed:
        async with AsyncProducer("fake") as made:
            made.send("orders", b"x")
            raise RuntimeError("the block failed")
    assert any("not delivered" in note for note in failed.value.__notes__)
    assert exit_guard._owed == [1]


async def test_starting_twice_at_once_makes_one_producer(cluster: FakeCluster) -> None:
    made = AsyncProducer("fake")
    await asyncio.gather(made.start(), made.start())
    assert len(cluster.settings) == 1
    await made.close()


async def test_a_start_that_is_given_up_leaves_a_producer_that_can_be_closed(cluster: FakeCluster) -> None:
    made = AsyncProducer("fake")
    starting = asyncio.create_task(made.start())
    await asyncio.sleep(0)
    starting.cancel()
    await made.close()
    assert made._producer is not None
    assert made._producer.is_closed


async def test_times_bound_flush_and_close_with_messages_in_line(cluster: FakeCluster) -> None:
    cluster.queue_max = 1
    cluster.away()
    made = await AsyncProducer("fake", send_timeout=3600.0).start()
    made.send("orders", b"taken")
    made.send("orders", b"in line")
    report = await made.flush(0.01)
    assert (report.is_complete, report.under_way) == (False, 2)
    with pytest.raises(UndeliveredMessages, match="2 messages were not delivered"):
        await asyncio.wait_for(made.close(0.01), 30)


async def test_sending_before_it_is_started_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="async with"):
        AsyncProducer("fake").send("orders", b"x")


def test_it_takes_what_the_producer_takes() -> None:
    import inspect

    taken = inspect.signature(producer.Producer).parameters
    assert {"bootstrap", *producer.ProducerOptions.__annotations__} == set(taken)
    with pytest.raises(TypeError, match="spol"):
        AsyncProducer("fake", spol="/var/spool")  # type: ignore[call-arg]


async def test_closing_that_is_given_up_on_loses_nothing_and_can_be_asked_again(cluster: FakeCluster) -> None:
    cluster.queue_max = 1
    cluster.away()
    made = await AsyncProducer("fake").start()
    deliveries = [made.send("orders", b"%d" % number) for number in range(5)]
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(made.close(), 0.01)
    cluster.back()
    await asyncio.gather(*deliveries)
    await made.close()
    assert cluster.values("orders") == [b"%d" % number for number in range(5)]


async def test_what_closing_left_behind_is_told_to_who_asks_again_and_once(cluster: FakeCluster) -> None:
    cluster.away()
    made = await AsyncProducer("fake").start()
    made.send("orders", b"x")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(made.close(0.2), 0.01)
    with pytest.raises(UndeliveredMessages) as left:
        await made.close()
    assert left.value.count == 1
    await made.close()


async def test_a_line_that_is_cancelled_refuses_what_stands_in_it(cluster: FakeCluster) -> None:
    cluster.queue_max = 1
    cluster.away()
    made = await AsyncProducer("fake", send_timeout=0.5).start()
    made.send("orders", b"taken")
    told, other = made.send("orders", b"told"), made.send("orders", b"other")
    awaiting = asyncio.create_task(told.delivered())
    await asyncio.sleep(0)
    assert made._line_task is not None
    made._line_task.cancel()
    with pytest.raises(SendTimeout, match="event loop ended"):
        await asyncio.wait_for(awaiting, 30)
    assert other.is_settled
    assert len(made._refused) == 1
    with pytest.raises(UndeliveredMessages) as left:
        await made.close(timeout=0)
    assert left.value.count == 2


async def test_a_report_tells_of_what_stands_in_line(cluster: FakeCluster) -> None:
    cluster.queue_max = 1
    cluster.away()
    async with AsyncProducer("fake") as made:
        for number in range(3):
            made.send("orders", b"%d" % number)
        assert (await made.flush(0.01)).under_way == 3
        cluster.back()
        assert (await made.flush(30)).is_complete


ENDINGS = """
import asyncio
from holdfast.client import exit_guard
from holdfast.client.aio import AsyncProducer
exit_guard.LAST_CHANCE_SECONDS = 0.1
config = {"log_level": 0, "queue.buffering.max.messages": 1}
async def main():
    producer = await AsyncProducer("127.0.0.1:1", config=config, send_timeout=0.2).start()
    for number in range(4):
        producer.send("orders", b"x")
    %s
%s
"""
ENDS = ("asyncio.run(main())", "loop = asyncio.new_event_loop(); loop.run_until_complete(main())")


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    "wait", ["pass", "await asyncio.wait((asyncio.ensure_future(producer.close()),), timeout=0.01)"]
)
def test_a_program_that_ends_with_messages_in_line_says_how_many_and_exits_with_a_code(
    wait: str, end: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDINGS % (wait, end)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == exit_guard.EXIT_UNDELIVERED, done.stderr
    assert "4 messages had not been delivered when the program ended" in done.stderr

"""Spools that producers of earlier versions left behind: what was stored is delivered, in order and once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.golden.make_spools import create
from tests.golden.opening import (
    GENERATIONS,
    PACKED,
    broker_at,
    expected_of,
    fetch,
    offset_at,
    text_of,
    unpack,
)

from holdfast.client.producer import Guarantee, Producer
from holdfast.client.spool import sender
from holdfast.client.spool.home import SpoolHome
from holdfast.client.spool.marks import parse_mark
from holdfast.client.spool.peek import SpoolPeek
from holdfast.real import RealClock, RealFileSystem, RealRandomness
from holdfast.testing.committed_reader import read_answer, whole_batches
from holdfast.testing.engines import wait_until
from holdfast.testing.wire_client import WireClient
from holdfast.wire.batch import iterate_records

ARCHIVES = [generation / f"spools{PACKED}" for generation in GENERATIONS]
GUARANTEES: tuple[Guarantee, ...] = ("at-least-once", "exactly-once")
QUIET = {"log_level": 0}
EARLIEST = -2


class Scene(NamedTuple):
    bootstrap_servers: str
    client: WireClient
    directory: Path
    expected: Any

    def sent(self, guarantee: str, fate: str | None = None) -> list[Any]:
        return [each for each in self.expected["sent"][guarantee] if fate in (None, each["fate"])]

    def spools(self, guarantee: str) -> dict[str, SpoolPeek]:
        fs = RealFileSystem()
        home = SpoolHome(fs, str(self.directory / guarantee), RealRandomness())
        return {spool_id: SpoolPeek(fs, home.directory(spool_id)) for spool_id in home.ids()}


@pytest.fixture(params=ARCHIVES, ids=lambda archive: archive.parent.name)
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    """The spools, and the broker they were sent to."""
    unpack(request.param, tmp_path)
    expected = expected_of(request.param)
    with (
        broker_at(
            RealClock(),
            str(tmp_path / "data"),
            boot_id=expected["boot_id"],
            seed=4711,
            settings=expected["settings"],
        ) as broker,
        WireClient(broker.bootstrap_servers) as client,
    ):
        for topic, (partitions, configs) in expected["topics_to_come"].items():
            create(client, topic, partitions, configs)
        yield Scene(broker.bootstrap_servers, client, tmp_path, expected)


def arrived(scene: Scene, spools: set[str], topics: dict[str, int]) -> dict[str, list[Any]]:
    """What the spools have in each partition, in the order of offsets, as an application sees it."""
    found: dict[str, list[Any]] = {}
    for topic, partitions in topics.items():
        for number in range(partitions):
            records = found[f"{topic} {number}"] = []
            offset = offset_at(scene.client, topic, number, EARLIEST)
            while (piece := fetch(scene.client, topic, number, offset, committed=True))[0]:
                shown = {each.offset for each in read_answer(piece[0], offset, piece[1]).records}
                for header, batch in whole_batches(piece[0]):
                    offset = header.next_offset
                    for record in iterate_records(batch):
                        if header.base_offset + record.offset_delta not in shown:
                            continue
                        names = dict(record.headers)
                        mark = parse_mark(names.pop("hf-id"))
                        if mark is not None and mark.spool in spools:
                            assert mark.partition == number
                            records.append(
                                {
                                    "spool": mark.spool,
                                    "sequence": mark.sequence,
                                    "timestamp": header.base_timestamp + record.timestamp_delta,
                                    "key": text_of(record.key),
                                    "value": text_of(record.value),
                                    "headers": [[name, text_of(value)] for name, value in names.items()],
                                }
                            )
    return found


def wanted(messages: list[Any]) -> dict[str, list[Any]]:
    """The same of messages that were sent; a topic that was unknown has one partition."""
    found: dict[str, list[Any]] = {}
    for each in messages:
        record = {name: each[name] for name in ("spool", "sequence", "timestamp", "key", "value", "headers")}
        found.setdefault(f"{each['topic']} {each['partition'] or 0}", []).append(record)
    return found


def by_spool(records: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Between spools there is no order, so each partition is looked at spool by spool."""
    return {
        place: sorted(each, key=lambda record: str(record["spool"]))
        for place, each in records.items()
        if each
    }


def left_in(scene: Scene, guarantee: str, spool_id: str) -> int:
    """Messages that wait; a spool that is gone has none."""
    found = scene.spools(guarantee).get(spool_id)
    return 0 if found is None else found.state(spool_id, is_in_use=True).left


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_looking_tells_what_is_left_and_what_was_refused(scene: Scene, guarantee: Guarantee) -> None:
    spools = scene.spools(guarantee)
    assert spools.keys() == {each["spool"] for each in scene.sent(guarantee)}
    for spool_id, peek in spools.items():
        state = peek.state(spool_id, is_in_use=False)
        left = [each for each in scene.sent(guarantee, "left") if each["spool"] == spool_id]
        assert (state.delivery, state.left, state.damages) == (guarantee, len(left), [])
        assert state.undecided.get("receipts", 0) == sum(each["partition"] is None for each in left)
        assert [text_of(kept.message.value) for kept in peek.messages(is_left_only=True)] == [
            each["value"] for each in left
        ]
        refused = [each for each in scene.sent(guarantee, "refused") if each["spool"] == spool_id]
        assert [(each.message.topic, text_of(each.message.value), each.code) for each in peek.refused()] == [
            (each["topic"], each["value"], "INVALID_RECORD") for each in refused
        ]


@pytest.mark.parametrize(
    ("guarantee", "has_note"),
    [("at-least-once", True), ("exactly-once", True), ("exactly-once", False)],
    ids=["at-least-once", "exactly-once", "exactly-once-by-the-topic-alone"],
)
@pytest.mark.check
def test_what_was_stored_is_delivered_in_order_and_once(
    scene: Scene, guarantee: Guarantee, has_note: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "ADOPT_SECONDS", 0.1)
    if not has_note:
        for note in (scene.directory / guarantee).glob("*/progress"):
            note.unlink()
    spools = {each["spool"] for each in scene.sent(guarantee)}
    topics = {"letters": 2, "receipts": 1, "addresses": 1}
    before = arrived(scene, spools, topics)
    assert by_spool(before) == by_spool(wanted(scene.sent(guarantee, "delivered")))

    home = scene.directory / guarantee
    # A spool that knows its address is not the next producer's own at another one: that adopts it at the same cluster.
    is_adopted = any(home.glob("*/identity.json"))
    with Producer(scene.bootstrap_servers, spool=home, delivery=guarantee, config=QUIET) as producer:
        report = producer.flush(60)
        assert (report.under_way, report.refused_count) == (0, 0)
        receipt = producer.send("letters", b"and on it goes", partition=1).wait(60)
        assert receipt.partition == 1
        if is_adopted:
            wait_until(lambda: not any(left_in(scene, guarantee, each) for each in spools), "all are empty")
    after = arrived(scene, spools, topics)
    if not is_adopted:
        last = after["letters 1"].pop()
        assert (last["value"], last["spool"] in spools) == ("and on it goes", True)
        earlier = [
            each for each in scene.sent(guarantee) if (each["spool"], each["partition"]) == (last["spool"], 1)
        ]
        assert last["sequence"] == sum(each["topic"] == "letters" for each in earlier)
    arriving = [each for each in scene.sent(guarantee) if each["fate"] != "refused"]
    assert by_spool(after) == by_spool(wanted(arriving))

"""Tables that keep one row for each key: which record must stand."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from holdfast.audit.model import Fate
from holdfast.pipeline.definition.model import PostgresSink, Sql

if TYPE_CHECKING:
    from .conftest import Reader, Sent, World

TABLE = PostgresSink("url", "t", name="table", mode="upsert", key=("customer",))


def made(world: type[World], sent: type[Sent], sink: PostgresSink = TABLE) -> World:
    records = [sent(number % 2, "abcde"[number % 5], number, number) for number in range(20)]
    return world((), records, [7, 13], sinks=(sink,))


def standing(play: World) -> dict[str, tuple[int, int]]:
    """Batch by batch, and in each by partition and offset: the last one stays."""
    found: dict[str, tuple[int, int]] = {}
    for spans in play.spans():
        for at in sorted(spans):
            for offset in range(*spans[at]):
                customer = play.logs[at.partition][offset].customer
                assert customer is not None
                found[customer] = (at.partition, offset)
    return found


@pytest.fixture
def table(world: type[World], sent: type[Sent], reader: type[Reader]) -> tuple[World, Reader]:
    play = made(world, sent)
    keyed = [(customer, *where) for customer, where in standing(play).items()]
    return play, reader("table", [], play.play().entries, kind="postgres", takes="", keyed=keyed)


def test_the_last_record_of_each_key_stands_and_the_others_are_superseded(
    table: tuple[World, Reader],
) -> None:
    play, reader = table
    result = play.audit(play.play(), [reader])
    assert result.examined.findings == ()
    superseded = {
        (at.partition, offset)
        for at, offsets in result.superseded["table"].items()
        for offset in offsets.tolist()
    }
    everything = {(number, at) for number, log in enumerate(play.logs) for at in range(len(log))}
    assert superseded == everything - set(standing(play).values())


def test_a_key_that_is_gone_is_lost(table: tuple[World, Reader]) -> None:
    play, reader = table
    customer, partition, offset = reader.keyed.pop(2)
    (finding,) = play.audit(play.play(), [reader]).examined.findings
    assert (finding.fate, finding.keys) == (Fate.LOST, (f"customer={customer}",))
    assert finding.place is not None
    assert (finding.place.partition, finding.ranges) == (partition, ((offset, offset),))


def test_without_a_record_of_what_left_a_key_that_is_gone_may_have_left(
    table: tuple[World, Reader],
) -> None:
    play, reader = table
    reader.keyed.pop(2)
    played = play.play()
    played.unknown = "the home was lost"
    examined = play.audit(played, [reader]).examined
    assert examined.findings == ()
    assert [(each.why, each.is_gap) for each in examined.unproven] == [("the home was lost", True)]


def test_an_older_record_in_the_place_of_a_newer_is_found(table: tuple[World, Reader]) -> None:
    play, reader = table
    reader.keyed[0] = ("a", 0, 0)
    (finding,) = play.audit(play.play(), [reader]).examined.findings
    assert finding.fate is Fate.LOST
    assert "older" in finding.detail


def test_a_key_that_stands_twice_and_one_that_is_anothers_are_found(table: tuple[World, Reader]) -> None:
    play, reader = table
    reader.keyed.append(reader.keyed[0])
    assert [each.fate for each in play.audit(play.play(), [reader]).examined.findings] == [Fate.DUPLICATED]
    reader.keyed[-1] = ("nobody", *reader.keyed[0][1:])
    assert [each.fate for each in play.audit(play.play(), [reader]).examined.findings] == [Fate.ALTERED]


def test_a_record_past_the_audits_end_leaves_its_key_alone(table: tuple[World, Reader]) -> None:
    play, reader = table
    reader.keyed[0] = (reader.keyed[0][0], 0, 5000)
    assert play.audit(play.play(), [reader]).examined.findings == ()


def test_the_greatest_of_an_order_stands_whatever_the_batches(
    world: type[World], sent: type[Sent], reader: type[Reader]
) -> None:
    records = [
        sent(number % 2, "abcde"[number % 5], number, number, amount=7 * number % 9) for number in range(20)
    ]
    play = world((), records, [7, 13], sinks=(replace(TABLE, order_by="amount"),))
    best: dict[str, tuple[int, int, int]] = {}
    for partition, log in enumerate(play.logs):
        for offset, record in enumerate(log):
            place = (record.amount, partition, offset)
            best[str(record.customer)] = max(best.get(str(record.customer), place), place)
    keyed = [(customer, *place[1:]) for customer, place in best.items()]
    assert {row[0]: row[1:] for row in keyed} != standing(play)
    found = reader("table", [], play.play().entries, kind="postgres", takes="", keyed=keyed)
    assert play.audit(play.play(), [found]).examined.findings == ()


def test_with_deletes_that_only_spark_can_evaluate_no_row_counts_as_recomputed(
    world: type[World], sent: type[Sent], reader: type[Reader]
) -> None:
    play = made(world, sent, replace(TABLE, delete_when="length(customer) = 3"))
    keyed = [(customer, *where) for customer, where in standing(play).items()]
    full = reader("table", [], play.play().entries, takes="", keyed=keyed)
    short = replace(full, keyed=keyed[1:])
    for table in (full, short):
        found = play.audit(play.play(), [table]).examined
        assert found.findings == ()
        assert [(each.name, each.recomputed) for each in found.coverage] == [("table._hf", 0)]


def test_a_plain_delete_is_made_again(world: type[World], sent: type[Sent], reader: type[Reader]) -> None:
    play = made(world, sent, replace(TABLE, delete_when="customer = 'b'"))
    keyed = [(customer, *where) for customer, where in standing(play).items()]
    without = [each for each in keyed if each[0] != "b"]
    ledger = play.play().entries
    assert play.audit(play.play(), [reader("table", [], ledger, keyed=without)]).examined.findings == ()
    (finding,) = play.audit(play.play(), [reader("table", [], ledger, keyed=keyed)]).examined.findings
    assert finding.fate is Fate.EXTRA


def test_which_row_of_a_computed_key_is_the_newest_is_not_recomputed(
    world: type[World], sent: type[Sent], reader: type[Reader]
) -> None:
    play = made(world, sent)
    play.steps = (Sql("named", "SELECT * EXCEPT (customer), upper(customer) AS customer FROM input"),)
    keyed = [(customer.upper(), *where) for customer, where in standing(play).items()]
    found = play.audit(play.play(), [reader("table", [], play.play().entries, keyed=keyed)]).examined
    assert found.findings == ()
    [claim] = found.coverage
    assert (claim.name, claim.recomputed) == ("table._hf", 0)
    assert "computed by a step" in claim.why

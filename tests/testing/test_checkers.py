"""Each rule of the checkers: a history that keeps it passes, one that breaks it does not."""

from __future__ import annotations

import pytest
from tests.support import history as h
from tests.support.checkers import Violation, check

P: h.Partition = ("topic", 0)
SENT = [h.BatchSent(P, "p", number, (b"v%d" % number, b"w%d" % number)) for number in range(5)]


def acknowledged(number: int, base: int, durable: bool = True) -> h.BatchAcknowledged:
    return h.BatchAcknowledged(P, "p", number, base, durable)


def stored(number: int, base: int, epoch: int = 0) -> h.StoredBatch:
    return h.StoredBatch(base, SENT[number].values, epoch)


def read(
    *batches: h.StoredBatch, position: int = 0, end: int, start: int = 0, reader: str = "r"
) -> list[h.Event]:
    return [h.ReadBegun(reader, P), h.BatchesRead(reader, P, position, batches, end, start)]


def broken_rule(events: list[h.Event]) -> str:
    with pytest.raises(Violation) as violation:
        check(events)
    return violation.value.rule


def test_a_good_history_passes() -> None:
    check(
        [
            h.BrokerStarted(),
            *SENT[:3],
            acknowledged(0, 0),
            *read(stored(0, 0), end=2),
            h.BrokerStarted(),
            acknowledged(2, 4),
            *read(stored(0, 0), stored(1, 2), stored(2, 4), end=6, reader="s"),
            *read(stored(2, 4), position=5, end=6),
            *read(position=6, end=6),
        ]
    )


def test_acknowledged_records_must_be_read() -> None:
    assert broken_rule([*SENT[:1], acknowledged(0, 0), *read(end=0)]) == "acknowledged-lost"
    assert broken_rule([*SENT[:1], acknowledged(0, 0), *read(end=2)]) == "acknowledged-lost"
    listing: list[h.Event] = [h.ReadBegun("r", P), h.OffsetsListed("r", P, end=1)]
    assert broken_rule([*SENT[:1], acknowledged(0, 0), *listing]) == "acknowledged-lost"
    out_of_range: list[h.Event] = [h.ReadBegun("r", P), h.ReadOutOfRange("r", P, 1)]
    assert broken_rule([*SENT[:1], acknowledged(0, 0), *out_of_range]) == "acknowledged-lost"


def test_a_read_under_way_while_the_batch_is_acknowledged_need_not_show_it() -> None:
    check([*SENT[:1], h.ReadBegun("r", P), acknowledged(0, 0), h.BatchesRead("r", P, 0, (), 0, 0)])


def test_an_acknowledgement_without_durability_promises_nothing() -> None:
    check([*SENT[:2], acknowledged(0, 0, durable=False), acknowledged(1, 0), *read(stored(1, 0), end=2)])


def test_an_offset_is_never_used_twice() -> None:
    assert broken_rule([*SENT[:2], acknowledged(0, 0), acknowledged(1, 1)]) == "offset-reused"
    again = read(stored(1, 0), end=2, reader="s")
    assert broken_rule([*SENT[:2], *read(stored(0, 0), end=2), *again]) == "offset-reused"


def test_a_batch_is_stored_once() -> None:
    assert broken_rule([*SENT[:1], *read(stored(0, 0), stored(0, 2), end=4)]) == "stored-twice"
    assert broken_rule([*SENT[:1], acknowledged(0, 0), acknowledged(0, 2)]) == "stored-twice"


def test_batches_are_read_whole_and_unchanged() -> None:
    half = h.StoredBatch(0, SENT[0].values[:1])
    other = h.StoredBatch(0, (b"never sent",))
    assert broken_rule([*SENT[:1], *read(half, end=1)]) == "changed"
    assert broken_rule([*SENT[:1], *read(other, end=1)]) == "changed"
    epochs = [*read(stored(0, 0, epoch=1), end=2), *read(stored(0, 0, epoch=2), end=2)]
    assert broken_rule([*SENT[:1], *epochs]) == "changed"


def test_a_batch_is_read_where_it_was_sent() -> None:
    elsewhere: h.Partition = ("topic", 1)
    events: list[h.Event] = [
        h.ReadBegun("r", elsewhere),
        h.BatchesRead("r", elsewhere, 0, (stored(0, 0),), 2),
    ]
    assert broken_rule([*SENT[:1], *events]) == "changed"


def test_one_stored_batch_may_hold_several_sent_ones() -> None:
    both = h.StoredBatch(0, SENT[0].values + SENT[1].values)
    check([*SENT[:2], acknowledged(1, 2), *read(both, end=4)])


def test_batches_of_one_producer_stay_in_order() -> None:
    assert broken_rule([*SENT[:2], *read(stored(1, 0), stored(0, 2), end=4)]) == "out-of-order"


def test_what_was_refused_is_never_read() -> None:
    refused = h.BatchRefused(P, "p", 0)
    assert broken_rule([*SENT[:1], refused, *read(stored(0, 0), end=2)]) == "refused-but-stored"
    assert broken_rule([*SENT[:1], acknowledged(0, 0), refused]) == "refused-but-stored"


def test_the_end_never_moves_back_and_nothing_is_shown_beyond_it() -> None:
    assert broken_rule([*read(end=5, position=5), *read(end=4, position=4)]) == "watermark-moved-back"
    assert broken_rule([*SENT[:1], *read(stored(0, 0), end=1)]) == "watermark-moved-back"


def test_readers_see_every_offset() -> None:
    assert broken_rule([*SENT[:2], *read(stored(0, 0), stored(1, 3), end=5)]) == "gap"
    assert broken_rule([*SENT[:2], *read(stored(1, 2), end=4)]) == "gap"


def test_records_go_when_asked_and_stay_gone() -> None:
    wanted: list[h.Event] = [h.DeletionRequested(P, 2), h.DeletionAcknowledged(P, 2)]
    both: list[h.Event] = [*SENT[:2], acknowledged(0, 0), acknowledged(1, 2)]
    gone: list[h.Event] = [h.ReadBegun("r", P), h.ReadOutOfRange("r", P, 0)]
    check([*both, *wanted, *gone, *read(stored(1, 2), position=2, end=4, start=2)])
    back = read(stored(0, 0), stored(1, 2), end=4, start=0)
    assert broken_rule([*both, *wanted, *back]) == "start-moved-back"
    assert broken_rule([*both, *read(stored(1, 2), position=2, end=4, start=2)]) == "start-moved-back"
    assert broken_rule([*both, h.DeletionRequested(P, 1), h.DeletionAcknowledged(P, 2)]) == "start-moved-back"
    check([*both, h.ExpiryAllowed(P), *gone, *read(stored(1, 2), position=2, end=4, start=2)])


def test_a_refused_sequence_after_an_acknowledged_one_is_a_loss() -> None:
    assert broken_rule([*SENT[:1], h.SequenceRefused(P, "p", 0, "out of order")]) == "sequence-lost"


def test_producer_ids_are_given_once() -> None:
    check([h.ProducerIdGiven(1, 0), h.ProducerIdGiven(1, 1), h.ProducerIdGiven(2, 0)])
    assert broken_rule([h.ProducerIdGiven(1, 0), h.ProducerIdGiven(1, 0)]) == "producer-id-reused"


def metadata(**topics: h.TopicSeen) -> list[h.Event]:
    return [h.MetadataBegun("r"), h.MetadataRead("r", topics)]


CREATED: list[h.Event] = [h.TopicCreationRequested("t", 1), h.TopicCreated("t", "id1", 1)]


def test_topics_stay_until_deleted() -> None:
    seen = h.TopicSeen("id1", (0,))
    check([*CREATED, *metadata(t=seen), h.TopicDeletionRequested("t"), h.TopicDeleted("t"), *metadata()])
    assert broken_rule([*CREATED, *metadata()]) == "topic-lost"
    assert broken_rule([*CREATED, h.PartitionMissing("r", ("id1", 0))]) == "topic-lost"
    deleted: list[h.Event] = [h.TopicDeletionRequested("t"), h.TopicDeleted("t")]
    assert broken_rule([*CREATED, *deleted, *metadata(t=seen)]) == "topic-back"
    assert broken_rule(metadata(t=seen)) == "topic-back"


def test_a_topic_whose_creation_was_not_answered_may_or_may_not_be() -> None:
    requested: list[h.Event] = [h.TopicCreationRequested("t", 1)]
    check([*requested, *metadata()])
    check([*requested, *metadata(t=h.TopicSeen("id1", (0,)))])
    shown = [*requested, *metadata(t=h.TopicSeen("id1", (0,)))]
    assert broken_rule([*shown, *metadata()]) == "topic-lost"


def test_topic_ids_are_not_used_again() -> None:
    renamed = metadata(t=h.TopicSeen("id1", (0,)), u=h.TopicSeen("id1", (0,)))
    assert broken_rule([*CREATED, h.TopicCreationRequested("u", 1), *renamed]) == "topic-id-reused"
    assert broken_rule([*CREATED, *metadata(t=h.TopicSeen("id2", (0,)))]) == "topic-lost"
    anew: list[h.Event] = [
        h.TopicDeletionRequested("t"),
        h.TopicDeleted("t"),
        h.TopicCreationRequested("t", 1),
    ]
    check([*CREATED, *anew, h.TopicCreated("t", "id2", 1), *metadata(t=h.TopicSeen("id2", (0,)))])


def test_partitions_stay() -> None:
    grown: list[h.Event] = [h.PartitionsRequested("t", 2), h.PartitionsCreated("t", 2)]
    check([*CREATED, *grown, *metadata(t=h.TopicSeen("id1", (0, 0)))])
    assert broken_rule([*CREATED, *grown, *metadata(t=h.TopicSeen("id1", (0,)))]) == "partitions-lost"
    assert broken_rule([*CREATED, *metadata(t=h.TopicSeen("id1", (0, 0)))]) == "partitions-lost"


def test_leader_epochs_rise_at_every_start() -> None:
    def at(epoch: int) -> list[h.Event]:
        return metadata(t=h.TopicSeen("id1", (epoch,)))

    check([*CREATED, *at(3), *at(3), h.BrokerStarted(), *at(4)])
    assert broken_rule([*CREATED, *at(3), h.BrokerStarted(), *at(3)]) == "leader-epoch"
    assert broken_rule([*CREATED, *at(3), *at(2)]) == "leader-epoch"


def test_acknowledged_settings_stay() -> None:
    altered: list[h.Event] = [h.ConfigRequested("t", "k", "1"), h.ConfigAltered("t", "k", "1")]
    check(
        [*altered, h.ConfigRead("t", "k", "1"), h.ConfigRequested("t", "k", "2"), h.ConfigRead("t", "k", "1")]
    )
    assert broken_rule([*altered, h.ConfigRead("t", "k", "0")]) == "config-lost"
    flicker: list[h.Event] = [h.ConfigRequested("t", "k", "2"), h.ConfigRead("t", "k", "2")]
    assert broken_rule([*altered, *flicker, h.ConfigRead("t", "k", "1")]) == "config-lost"

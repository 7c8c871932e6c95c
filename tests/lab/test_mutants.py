"""Our own code broken in named ways: the safe half then loses, and the checker says what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from holdfast.broker.groups import offsets
from holdfast.broker.log import compaction, retention
from holdfast.broker.log.log import Log
from holdfast.broker.log.producer_state import ACCEPT, ProducerStateMap
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.transactions.coordinator import TransactionCoordinator
from holdfast.client import settings
from holdfast.client.consuming.tracker import PartitionTracker
from holdfast.client.side_topics import SideTopics
from holdfast.lab.checking import ABORTED_READ, DUPLICATED, LOST, MOVED_BACK
from holdfast.lab.engines import Engines
from holdfast.lab.experiment import Claim, Experiment, Lab, run_half
from holdfast.lab.experiments import EXPERIMENTS
from holdfast.lab.experiments.hf2xx_simulated import HOUR_MS, TOPIC, WEEK_MS, Simulated
from holdfast.seams import Now
from holdfast.wire.batch import Record, build_batch

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with Engines(tmp_path_factory.mktemp("lab")) as made:
        yield made


def resent(lab: Lab) -> None:
    """An idempotent batch whose answer got lost, and is sent again."""
    broker = Simulated(lab)
    broker.create()
    lab.plan(successes=1)
    lab.sends("program", TOPIC, ["order"])
    batch = build_batch([Record(0, 0, None, b"order")], producer_id=7, producer_epoch=0, base_sequence=0)
    broker.client.produce(TOPIC, batch)
    answer = broker.client.produce(TOPIC, batch)
    lab.note("ack", "program", id="order", topic=TOPIC, partition=0, offset=answer.base_offset)
    broker.scan()


RESENT = Experiment(
    "HF106",
    "sent again",
    resent,
    resent,
    "",
    "",
    claim=Claim({DUPLICATED: 1}),
    in_process=True,
)


def acknowledge_before_flush(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostedPartition, "flushes_in_groups", property(lambda self: False))


def skip_the_sequence_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ProducerStateMap, "check", lambda self, header, is_client: ACCEPT)


def take_a_week_for_an_hour(patch: pytest.MonkeyPatch) -> None:
    whole = retention._over_age

    def too_soon(log: Log, before_ms: int) -> int:
        return whole(log, before_ms + WEEK_MS - HOUR_MS)

    patch.setattr(retention, "_over_age", too_soon)


def compact_what_is_young(patch: pytest.MonkeyPatch) -> None:
    whole = compaction.examine

    def too_soon(log: Any, clean_to: Any, stable: Any, high: Any, now: Now) -> Any:
        return whole(log, clean_to, stable, high, now._replace(wall_ms=now.wall_ms + 2 * WEEK_MS))

    patch.setattr("holdfast.broker.node.cleaning.examine", too_soon)


def expire_positions_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(offsets, "MINUTE_MS", 1)


def never_end_a_transaction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransactionCoordinator, "_abort_timed_out", lambda self, now: None)


def commit_before_handling(patch: pytest.MonkeyPatch) -> None:
    for name in ("begin_all", "finish_all"):
        whole = getattr(PartitionTracker, name)

        def ahead(tracker: PartitionTracker, given: Sequence[int], whole: Any = whole) -> Any:
            done = whole(tracker, given)
            tracker.commit_offset = tracker.next_offset
            return done

        patch.setattr(PartitionTracker, name, ahead)


def throw_dead_letters_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SideTopics, "send", lambda self, topic, message, headers, source: None)


def send_without_idempotence(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(settings.RECOVERY, "enable.idempotence", False)


def read_what_is_undecided(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(settings.RECOVERY, "isolation.level", "read_uncommitted")


MUTANTS: dict[Plant, tuple[Experiment, str]] = {
    acknowledge_before_flush: (EXPERIMENTS["HF205"], LOST),
    skip_the_sequence_check: (RESENT, DUPLICATED),
    take_a_week_for_an_hour: (EXPERIMENTS["HF206"], LOST),
    compact_what_is_young: (EXPERIMENTS["HF210"], LOST),
    expire_positions_early: (EXPERIMENTS["HF211"], MOVED_BACK),
    never_end_a_transaction: (EXPERIMENTS["HF411"], LOST),
    commit_before_handling: (EXPERIMENTS["HF303"], LOST),
    throw_dead_letters_away: (EXPERIMENTS["HF306"], LOST),
    send_without_idempotence: (EXPERIMENTS["HF106"], DUPLICATED),
    read_what_is_undecided: (EXPERIMENTS["HF310"], ABORTED_READ),
}


@pytest.mark.check
@pytest.mark.parametrize("plant", MUTANTS, ids=lambda plant: plant.__name__)
def test_a_mutant_is_caught(plant: Plant, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, kind = MUTANTS[plant]
    plant(monkeypatch)
    found = run_half(experiment, "safe", engines, "holdfast").judgement
    assert found.void == ()
    assert found.ids(kind), found.violations


def test_what_is_sent_again_is_stored_once_by_the_code_as_it_is(engines: Engines) -> None:
    assert run_half(RESENT, "safe", engines, "holdfast").judgement.verdict == "clean"

"""Pipelines whose cluster is restored: every kind of sink that is ahead is named, and the advice lets them go on."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from tests.backup.test_backup import flushed
from tests.pipeline.absent.without_spark import PlainRouter, without_spark
from tests.pipeline.absent.world import BATCH, DEFINITION, Worlds
from tests.support.whole_cluster import WholeCluster

from holdfast.backup.copying import Copier
from holdfast.backup.outside import Beyond, beyond_restored
from holdfast.backup.repository import Backup, Repository
from holdfast.backup.restoring import Restorer
from holdfast.pipeline.core.failures import SinkLost
from holdfast.pipeline.definition.loading import load_pipeline
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.guards import GuardTripped

pytestmark = pytest.mark.check

OUTSIDE = ("files", "table", "database")
INSIDE = ("topic", "dead-letter")


class Estate(Worlds):
    """The pipeline of the matrix of absences, backed up after its first batch and lost after its second one."""

    @property
    def definition(self) -> Path:
        return self.files / "orders.yaml"

    def begin(self, text: str = DEFINITION) -> None:
        self._server.start()
        self._admin("CREATE ROLE pipeline LOGIN")
        self.broker.start()
        self.new_database("live")
        self.files.mkdir(parents=True)
        text = text.replace("${BOOTSTRAP}", self.broker.bootstrap_servers)
        self.definition.write_text(text.replace("${DATABASE}", self.database("live", "pipeline")))
        (self.files / "people.csv").write_text("login,city\nann,Aachen\nbob,Bonn\n")
        self.create_topic("orders")

    def back_up(self) -> Backup:
        """Of everything that was acknowledged."""
        data = self._directory / "broker"
        flushed(WholeCluster(self.broker.bootstrap_servers), data)
        return Copier(self.repository, lambda line: None).back_up([str(data)]).backup

    @property
    def repository(self) -> Repository:
        return Repository(str(self._directory / "backups"))

    def lose_and_restore(self, backup: Backup, skip_offsets: int) -> dict[tuple[str, int], int]:
        """On the port that clients know."""
        self.broker.stop()
        shutil.rmtree(self._directory / "broker")
        target = [str(self._directory / "broker")]
        restorer = Restorer(self.repository, backup, target, skip_offsets, lambda line: None)
        restorer.restore()
        self.broker.start()
        return restorer.goes_on_at()

    def beyond(self, backup: Backup, goes_on_at: dict[tuple[str, int], int] | None = None) -> list[Beyond]:
        found, not_examined = beyond_restored(self.repository, backup, [str(self.definition)], [], goes_on_at)
        assert not_examined == []
        return found

    def run_on(self, *accepted: str, router: Any = None) -> None:
        definition = load_pipeline(str(self.definition)).definition
        with without_spark(*([router] if router else [])) as session:
            run_pipeline(definition, spark=session, signals=False, accept_loss=accepted)


@pytest.fixture
def estate(tmp_path: Path) -> Iterator[Estate]:
    made = Estate(tmp_path)
    try:
        yield made
    finally:
        made.broker.stop()
        made._server.close()


@pytest.mark.long
def test_sinks_of_every_kind_that_are_ahead_are_named(
    estate: Estate,
) -> None:
    estate.begin()
    estate.produce(0, 1)
    estate.run_on()
    backup = estate.back_up()
    assert estate.beyond(backup) == []
    estate.produce(1, 1)
    estate.run_on()
    found = {each.what.split()[1]: each for each in estate.beyond(backup)}
    assert found.keys() == {*OUTSIDE, *INSIDE}
    for name in OUTSIDE:
        assert found[name][1:4] == ("orders-0", 2 * BATCH, BATCH)
        assert f"--skip-offsets={BATCH} or more" in found[name].advice
    for name in INSIDE:
        assert found[name][1:4] == (f"hf-ledger-orders--{name}", 3, 2)
        assert f"--accept-loss={name}" in found[name].advice
    # Without offsets left out a run refuses, as was said.
    estate.lose_and_restore(backup, 0)
    with pytest.raises(SinkLost, match="older copy"):
        estate.run_on()
    with pytest.raises(GuardTripped):
        estate.run_on(*INSIDE)


def test_a_pipeline_goes_on_behind_offsets_left_out(estate: Estate) -> None:
    estate.begin()
    estate.produce(0, 1)
    estate.run_on()
    backup = estate.back_up()
    at_backup = estate.contents()
    estate.produce(1, 1)
    estate.run_on()
    before = estate.contents()
    goes_on_at = estate.lose_and_restore(backup, 100)
    found = estate.beyond(backup, goes_on_at)
    assert [each.what.split()[1] for each in found if "goes on by itself" in each.advice] == [*OUTSIDE]
    estate.produce(2, 1)
    estate.run_on(*INSIDE)
    after = estate.contents()
    new = {name: after[name] - before[name] for name in ("files", "table", "database")}
    assert all(sum(rows.values()) == 5 for rows in new.values())
    assert all(after[name] - new[name] == before[name] for name in new)
    assert sum((after["topic"] - at_backup["topic"]).values()) == 5


ALONE = """\
pipeline: orders
home: home
source:
  topics: [orders]
  bootstrap: ${BOOTSTRAP}
  value:
    format: json
    fields: {id: long, user: string, city: string}
sinks:
  - kafka: {topic: known, name: topic}
"""


@pytest.mark.long
def test_a_pipeline_within_the_cluster_goes_on_where_it_was_restored(estate: Estate) -> None:
    def send(*numbers: int) -> None:
        producer = Producer({"bootstrap.servers": estate.broker.bootstrap_servers})
        for number in numbers:
            producer.produce("orders", json.dumps({"id": number, "user": "u", "city": "c"}), partition=0)
        assert producer.flush(30) == 0

    estate.begin(ALONE)
    send(1, 2)
    estate.run_on(router=PlainRouter)
    backup = estate.back_up()
    send(3)
    estate.run_on(router=PlainRouter)
    goes_on_at = estate.lose_and_restore(backup, 0)
    found = estate.beyond(backup, goes_on_at)
    assert [each.what.split()[1] for each in found] == ["dead-letter", "topic"]
    note = estate.files / "home" / "sinks.json"
    assert all(f"Move {note} away" in each.advice for each in found)
    send(4, 5)
    with pytest.raises(SinkLost):
        estate.run_on(router=PlainRouter)
    note.rename(estate.files / "sinks.json")
    estate.run_on(router=PlainRouter)
    assert estate._topic() == Counter(repr(f"{number} u c".encode()) for number in (1, 2, 4, 5))

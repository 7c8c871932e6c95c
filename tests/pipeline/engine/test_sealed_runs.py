"""Runs seal what they write: the key, the chain of every ledger, and its head in two more places."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.admin.brokers import committed_metadata
from holdfast.audit import ledgers
from holdfast.audit.model import Fate
from holdfast.audit.sinks.opening import open_dead_letters, open_sink
from holdfast.audit.unaltered import Unaltered, check, keeper_of, witnesses_of
from holdfast.pipeline.core.failures import SinkLost
from holdfast.pipeline.definition.model import ParquetSink
from holdfast.pipeline.definition.naming import home_of
from holdfast.pipeline.engine.resetting import perform_reset, plan_reset
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.sealing import DigestKeyLost, heads_in, heads_of
from holdfast.reader.cluster import Cluster

if TYPE_CHECKING:
    from .conftest import Bench


class Files:
    """A pipeline into Parquet, without Spark."""

    def __init__(self, bench: Bench, path: Path) -> None:
        bench.change(sinks=(ParquetSink(path="rows", name="rows"),))
        self.bench, self.path = bench, path
        self.home = Path(bench.definition.home)
        self.rows = path / "rows"

    def run(self, orders: int = 3, **more: Any) -> None:
        self.bench.produce_orders(orders)
        self.bench.produce([b"no order"])
        run_pipeline(self.bench.definition, spark=self.bench.spark, signals=False, **more)

    def check(self) -> dict[str, Unaltered]:
        definition = self.bench.definition
        settings = {"bootstrap.servers": self.bench.broker.bootstrap_servers}
        keeper = keeper_of(definition)
        with Cluster(settings) as cluster:
            noted = ledgers.reached(home_of(definition))
            witnesses = witnesses_of(definition, definition, cluster, noted)
        readers = [
            open_dead_letters(definition, settings),
            open_sink(definition, definition.sinks[0], settings),
        ]
        return {reader.name: check(reader, keeper, witnesses.get(reader.name, ())) for reader in readers}

    def findings(self) -> list[str]:
        return [finding.detail for found in self.check().values() for finding in found.findings]


@pytest.fixture
def files(arrow_bench: Bench, tmp_path: Path) -> Files:
    return Files(arrow_bench, tmp_path)


def test_rows_and_letters_are_unaltered_and_the_heads_stand_in_two_more_places(files: Files) -> None:
    files.run()
    files.run()
    found = files.check()
    assert {name: (each.rows, each.unaltered, each.findings) for name, each in found.items()} == {
        "dead-letter": (2, 2, ()),
        "rows": (6, 6, ()),
    }
    noted = json.loads((files.home / "sinks.json").read_text())["sinks"]
    with Cluster({"bootstrap.servers": files.bench.broker.bootstrap_servers}) as cluster:
        heads = heads_in(committed_metadata(cluster, "hf-orders").values())
    assert {name: head.chain for name, head in heads.items()} == {
        name: each["chain"] for name, each in noted.items()
    }
    key = files.home / "digest.key"
    assert stat.S_IMODE(os.stat(key).st_mode) == 0o600


def removed(path: Path) -> None:
    path.unlink()


def emptied(path: Path) -> None:
    path.write_text("")


def of_another(path: Path) -> None:
    path.write_text("ab" * 32)


@pytest.mark.parametrize("change", [removed, emptied, of_another])
def test_a_key_that_is_not_the_one_stops_the_run_until_it_is_back(
    files: Files, change: Callable[[Path], None]
) -> None:
    files.run()
    key = files.home / "digest.key"
    kept = key.read_text()
    change(key)
    before = sorted(files.rows.glob("batch=*"))
    with pytest.raises(DigestKeyLost, match="key"):
        files.run()
    assert sorted(files.rows.glob("batch=*")) == before
    if change is not of_another:
        assert files.findings()
        assert all("digest.key" in detail for detail in files.findings())
    key.write_text(kept)
    files.run()
    assert files.findings() == []


def test_that_a_key_is_lost_can_be_meant(files: Files) -> None:
    files.run()
    (files.home / "digest.key").unlink()
    files.run(accept_loss=["digest-key"])
    found = files.check()["rows"]
    assert (found.rows, found.unaltered, found.trusted, found.findings) == (6, 3, 3, ())
    files.run()
    assert files.check()["rows"].unaltered == 6


def test_a_key_from_elsewhere_is_not_in_the_home(files: Files, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a secret of sixteen bytes and more\n")
    files.bench.change(digest_key=f"file:{tmp_path / 'key'}")
    files.run()
    assert not (files.home / "digest.key").exists()
    (tmp_path / "key").write_text("short\n")
    with pytest.raises(DigestKeyLost, match="has 5 bytes"):
        files.run()


class Died(Exception):
    """The process ends here."""


def died(at: str) -> Callable[[str], None]:
    def dies(place: str) -> None:
        if place == at:
            raise Died

    return dies


@pytest.mark.parametrize("is_second_run_killed", [False, True])
def test_sink_and_home_put_back_together_are_known_by_the_committed_offsets(
    files: Files, is_second_run_killed: bool
) -> None:
    files.run()
    copies = {path: path.with_name(path.name + ".copy") for path in (files.rows, files.home)}
    for path, copy in copies.items():
        shutil.copytree(path, copy)
    if is_second_run_killed:
        with pytest.raises(Exception, match="Died"):
            files.run(faults=died("committed:rows"))
        # Nothing is left to do of the batch, but what the sinks have is made known.
        run_pipeline(files.bench.definition, spark=files.bench.spark, signals=False)
    else:
        files.run()
    for path, copy in copies.items():
        shutil.rmtree(path)
        shutil.move(copy, path)
    details = files.findings()
    assert any(
        "it went back, as the metadata of the committed offsets of 'hf-orders' says" in each
        for each in details
    )
    # The ledger of the dead letters stands further too.
    with pytest.raises(SinkLost, match="sink 'rows'"):
        files.run()


def test_every_ledger_put_back_is_known_by_the_committed_offsets_alone(
    arrow_bench: Bench,
) -> None:
    bench = arrow_bench
    bench.produce_orders(2)
    bench.run()
    ledgers = {name: (list(sink.ledger), list(sink.content)) for name, sink in bench.sinks.items()}
    shutil.copytree(bench.definition.home, bench.definition.home + ".copy")
    bench.produce_orders(2)
    bench.run()
    shutil.rmtree(bench.definition.home)
    shutil.move(bench.definition.home + ".copy", bench.definition.home)
    for name, (ledger, content) in ledgers.items():
        bench.sinks[name].ledger, bench.sinks[name].content = list(ledger), list(content)
    with pytest.raises(
        SinkLost, match="as the metadata of its group's committed offsets says: it is an older copy"
    ):
        bench.run()


def test_a_sink_that_vanished_is_lost_and_not_new(files: Files) -> None:
    files.run()
    shutil.rmtree(files.rows)
    [finding] = files.check()["rows"].findings
    assert finding.fate is Fate.LOST
    assert "nothing of the pipeline is there" in finding.detail


def test_a_home_that_vanished_is_found(files: Files) -> None:
    files.run()
    shutil.rmtree(files.home)
    assert any("digest.key is gone" in detail for detail in files.findings())


def test_an_entry_made_to_look_old_is_found(files: Files) -> None:
    files.run()
    for path in files.rows.glob("batch=*/_ledger.json"):
        document = json.loads(path.read_text())
        del document["chain"], document["content"]
        path.write_text(json.dumps(document))
    details = files.findings()
    assert any("is not the one that was written" in detail for detail in details)


def test_after_a_reset_nothing_of_before_is_missed(files: Files) -> None:
    files.run()
    shutil.rmtree(files.rows)
    perform_reset(plan_reset(files.bench.definition, sinks=["rows"]))
    assert files.check()["rows"].findings == ()
    files.run()
    assert files.findings() == []


def test_heads_of_many_sinks_are_spread_over_texts_that_brokers_take(files: Files) -> None:
    files.run()
    [entry] = [each for each in [last_entry(files)] if each is not None]
    many = {f"sink-{number:03}-{'x' * 60}": entry for number in range(100)}
    texts = heads_of(many, {})
    assert len(texts) > 2
    assert max(map(len, texts)) < 4096
    assert heads_in(texts).keys() == many.keys()
    assert heads_in(["{}", "not ours", "[]", *texts[:1]]).keys() < many.keys()
    assert heads_of({"none": None, "old": replace(entry, chain="")}, {}) == []


def last_entry(files: Files) -> Any:
    reader = open_sink(files.bench.definition, files.bench.definition.sinks[0], {})
    return reader.entries()[-1]

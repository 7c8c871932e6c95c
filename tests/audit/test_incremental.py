"""Audits on top of a proof, over real sinks that grow: what is new is found, and so is what happened to what is old."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.audit_topics import Growing, append_transaction, begin, dead_letter, sink_record
from tests.support.fake_cluster import FETCH, FakeCluster

from holdfast.audit.continuous import Incremental
from holdfast.audit.model import Fate, Report, Verdict
from holdfast.audit.pipeline_audit import AuditOptions, audit_pipeline
from holdfast.audit.proven import changes, take_all
from holdfast.cli.audit_every import PipelineAuditor
from holdfast.pipeline.definition.naming import client_settings


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[Growing]:
    with FakeCluster() as cluster:
        yield begin(cluster, str(tmp_path))


def audits_of(growing: Growing, state: str | None = None) -> Incremental:
    return Incremental(PipelineAuditor(growing.loaded, None, AuditOptions(), audit_pipeline), state, 0)


def looked_at(report: Report) -> tuple[int, int]:
    (account,) = report.partitions
    return account.start, account.end


def test_each_audit_looks_at_what_came_since(growing: Growing, tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    growing.grow()
    first = audits_of(growing, state).run()
    growing.grow()
    second = audits_of(growing, state).run()
    third = audits_of(growing, state).run()
    assert [first.verdict, second.verdict, third.verdict] == [Verdict.PROVEN] * 3, second.reasons
    assert [looked_at(first), looked_at(second), looked_at(third)] == [(0, 20), (20, 40), (40, 40)]
    whole = audits_of(growing, state).run(full=True)
    assert whole.verdict is Verdict.PROVEN
    assert looked_at(whole) == (0, 40)


def test_what_spark_audits_and_what_begins_elsewhere_is_looked_at_whole(growing: Growing) -> None:
    plain = PipelineAuditor(growing.loaded, None, AuditOptions(), audit_pipeline)
    assert plain.remembers() == ""
    assert "Spark" in replace(plain, by_spark=True).remembers()
    assert "--from" in replace(plain, options=AuditOptions(start="earliest")).remembers()


def test_only_what_is_new_is_read(growing: Growing, monkeypatch: pytest.MonkeyPatch) -> None:
    growing.grow()
    growing.grow()
    audits = audits_of(growing)
    audits.run()
    ends = {name: topic.partitions[0].log_end for name, topic in growing.cluster.topics.items()}
    ids = {topic.topic_id: name for name, topic in growing.cluster.topics.items()}
    growing.grow()
    growing.cluster.asked.clear()
    opened: list[str] = []
    original = pq.ParquetFile.iter_batches

    def iter_batches(file: Any, *arguments: Any, **options: Any) -> Any:
        opened.append(file.metadata.num_rows)
        return original(file, *arguments, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    assert audits.run().verdict is Verdict.PROVEN
    new_files = 2 * 2
    assert len(opened) <= 2 * new_files  # each for its lineage and for its content
    fetched = [
        (ids[topic.topic_id], partition.fetch_offset)
        for _, api, request in growing.cluster.asked
        if api == FETCH
        for topic in request.topics
        for partition in topic.partitions
    ]
    assert {name for name, _ in fetched} >= {"orders", "copy"}
    assert [(name, at) for name, at in fetched if name in ("orders", "copy") and at < ends[name]] == []


def test_what_is_lost_among_the_new_is_found(growing: Growing) -> None:
    growing.grow()
    audits = audits_of(growing)
    audits.run()
    growing.grow(without=27)
    report = audits.run()
    assert looked_at(report) == (20, 40)
    assert report.verdict is Verdict.FAILED
    lost = [each for each in report.findings if each.fate is Fate.LOST]
    assert [(each.sink, each.ranges, each.keys) for each in lost] == [("parquet", ((27, 27),), ("k27",))]


def delete_a_row(growing: Growing) -> None:
    delete_a_row_of(growing.files[0])


def delete_a_row_of(path: str) -> None:
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)


def replace_a_file_and_its_times(growing: Growing) -> None:
    path = growing.files[0]
    stood = os.stat(path)
    content = bytearray(Path(path).read_bytes())
    content[len(content) // 2] ^= 0xFF
    Path(path).write_bytes(bytes(content))
    os.utime(path, ns=(stood.st_atime_ns, stood.st_mtime_ns))


def remove_a_file(growing: Growing) -> None:
    os.unlink(growing.files[0])


def add_a_file(growing: Growing) -> None:
    shutil.copy(growing.files[0], growing.files[0].replace("part-", "part-0"))


def remove_a_batch(growing: Growing) -> None:
    shutil.rmtree(os.path.dirname(growing.files[0]))


def delete_by_deltas_own_means(growing: Growing) -> None:
    import deltalake

    table = deltalake.DeltaTable(os.path.join(growing.directory, "table"))
    table.delete("id = 3")


def remove_a_file_of_delta(growing: Growing) -> None:
    root = os.path.join(growing.directory, "table")
    os.unlink(os.path.join(root, sorted(name for name in os.listdir(root) if name.endswith(".parquet"))[0]))


def drop_the_head_of_the_topic(growing: Growing) -> None:
    growing.cluster.topics["copy"].partitions[0].log_start = 5


@pytest.mark.parametrize(
    "damage",
    [
        delete_a_row,
        replace_a_file_and_its_times,
        remove_a_file,
        add_a_file,
        remove_a_batch,
        delete_by_deltas_own_means,
        remove_a_file_of_delta,
        drop_the_head_of_the_topic,
    ],
)
@pytest.mark.check
def test_a_change_to_what_was_proven_is_noticed_and_all_is_looked_at(
    growing: Growing, damage: Callable[[Growing], None]
) -> None:
    growing.grow()
    growing.grow()
    audits = audits_of(growing)
    assert audits.run().verdict is Verdict.PROVEN
    damage(growing)
    growing.grow()
    report = audits.run()
    assert looked_at(report)[0] == 0
    assert any("has changed since" in note for note in report.notes)
    assert report.verdict is not Verdict.PROVEN


def again_in_the_topic(growing: Growing) -> None:
    record = sink_record(("orders", 0, 3, 0), b"k3", b'{"id": 3}')
    append_transaction(growing.cluster.topics["copy"].partitions[0], [record], producer_id=99)


def again_in_a_new_batch_of_files(growing: Growing) -> None:
    path = growing.files[-1]
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table, pq.read_table(growing.files[0]).slice(0, 1)]), path)


def as_a_dead_letter(growing: Growing) -> None:
    letter = dead_letter("growing", ("orders", 0, 3), b"k3", b'{"id": 3}')
    append_transaction(growing.cluster.topics["growing-dlt"].partitions[0], [letter], producer_id=99)


@pytest.mark.parametrize("damage", [again_in_the_topic, again_in_a_new_batch_of_files, as_a_dead_letter])
def test_what_was_proven_must_not_come_again(growing: Growing, damage: Callable[[Growing], None]) -> None:
    growing.grow()
    audits = audits_of(growing)
    audits.run()
    growing.grow()
    damage(growing)
    report = audits.run()
    assert report.verdict is Verdict.FAILED


def test_a_sink_that_is_ahead_is_not_accused(growing: Growing) -> None:
    """Records that its topic had when others lagged come into the scope later, and are read then."""
    growing.grow()
    audits = audits_of(growing)
    reports = [audits.run()]
    growing.grow(delta_waits=True)
    reports.append(audits.run())
    growing.catch_up()
    growing.grow(delta_waits=True)
    reports.append(audits.run())
    growing.catch_up()
    reports.append(audits.run())
    assert [looked_at(each) for each in reports] == [(0, 20), (20, 20), (20, 40), (40, 60)]
    assert [each.verdict for each in reports] == [Verdict.PROVEN] * 4


def test_merging_is_no_damage_and_costs_one_full_audit_where_all_was_merged(growing: Growing) -> None:
    growing.grow()
    growing.grow()
    audits = audits_of(growing)
    audits.run()
    growing.parquet.merge(0, 2)
    growing.delta.compact()
    report = audits.run()
    assert looked_at(report) == (0, 40)
    assert report.verdict is Verdict.PROVEN
    growing.grow()
    assert looked_at(audits.run()) == (40, 60)


def test_an_audit_goes_back_to_before_the_batches_that_were_merged(growing: Growing, tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    for _ in range(4):
        growing.grow()
        audits_of(growing, state).run()
    growing.grow()
    growing.parquet.merge(3, 5)
    report = audits_of(growing, state).run()
    assert report.verdict is Verdict.PROVEN, report.reasons
    assert looked_at(report) == (20, 100)  # of the checkpoints at 20, 40 and 60 the oldest is kept
    assert any("more than what is new" in note and "'parquet'" in note for note in report.notes)
    assert looked_at(audits_of(growing, state).run()) == (100, 100)
    growing.parquet.merge(0, 2)
    assert looked_at(audits_of(growing, state).run()) == (0, 100)


def test_a_batch_that_was_changed_and_then_merged_is_found(growing: Growing) -> None:
    audits = audits_of(growing)
    for _ in range(3):
        growing.grow()
        audits.run()
    delete_a_row_of(growing.files[-1])
    growing.parquet.merge(2, 3)
    report = audits.run()
    assert looked_at(report) == (20, 60)
    assert report.verdict is Verdict.FAILED


def test_a_topic_that_is_gone_is_a_change(growing: Growing) -> None:
    growing.grow()
    definition = growing.loaded.definition
    settings = client_settings(definition)
    before = take_all(definition, settings, {})
    assert set(before) == {"parquet", "delta", "kafka", "dead-letter"}
    assert all(seen.marks and not seen.unseen for seen in before.values())
    del growing.cluster.topics["copy"]
    after = take_all(definition, settings, {})
    assert changes(before["kafka"].marks, after["kafka"].marks)
    assert not changes(before["dead-letter"].marks, after["dead-letter"].marks)


def test_a_directory_that_is_gone_is_unseen_not_unchanged(growing: Growing) -> None:
    growing.grow()
    definition = growing.loaded.definition
    shutil.rmtree(os.path.join(definition.directory, "files"))
    assert take_all(definition, client_settings(definition), {})["parquet"].unseen


def test_marks_need_no_permission_to_write(growing: Growing) -> None:
    growing.grow()
    definition = growing.loaded.definition
    root = os.path.join(definition.directory, "files")
    before = {path: os.stat(path) for path in growing.files}
    take_all(definition, client_settings(definition), {})
    assert {path: os.stat(path).st_ctime_ns for path in before} == {
        path: stat.st_ctime_ns for path, stat in before.items()
    }
    assert sorted(os.listdir(root))[0].startswith(("_", "batch="))

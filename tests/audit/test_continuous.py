"""Audits one after the other: what each looks at, when all is looked at again, what is kept, and when it ends."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import UUID

import pytest

from holdfast import exposition
from holdfast.audit.certificate import Certificate, certify
from holdfast.audit.continuous import Incremental, Watch, summary
from holdfast.audit.left import remembering
from holdfast.audit.metrics import FAMILIES, AuditMetrics
from holdfast.audit.model import PartitionAccount, Report, SinkAccount, Verdict
from holdfast.audit.proven import (
    Proven,
    Seen,
    Topics,
    TopicStart,
    advanced,
    changes,
    kept,
    read_state,
    write_state,
)
from holdfast.audit.stateful.carried import Memory
from holdfast.errors import HoldfastError, UsageError
from holdfast.pipeline.definition.model import Dedupe, Filter, PipelineDefinition, PostgresSink, Source
from holdfast.pipeline.positions import Place

MakeReport = Callable[..., Report]
PLACE = Place("orders", UUID(int=7), 0)
OTHER = Place("orders", UUID(int=7), 1)


def report_of(start: int, end: int, **changed: object) -> Report:
    account = PartitionAccount(
        PLACE, start, end, {"record": end - start}, {"output": end - start}, 0, end + 5
    )
    made = Report("orders", partitions=(account,), started_ms=1_000_000 + end, took_ms=5, fingerprint="f1")
    return replace(made, **changed)  # type: ignore[arg-type]


@dataclass
class FakeAuditor:
    """A log that grows by ten with each audit."""

    subject: str = "orders"
    fingerprint: str = "f1"
    end: int = 0
    asked: list[Mapping[Place, int] | None] = field(default_factory=list)
    topics: list[Topics] = field(default_factory=list)
    seen: dict[str, Seen] = field(default_factory=lambda: {"parquet": Seen({"batch=1": "a"})})
    memory: str = ""
    next_reports: list[Report | HoldfastError] = field(default_factory=list)

    def audit(self, since: Mapping[Place, int] | None, topics: Topics, memory: Memory | None) -> Report:
        self.asked.append(since)
        self.topics.append(topics)
        self.end += 10
        if self.next_reports:
            found = self.next_reports.pop(0)
            if isinstance(found, HoldfastError):
                raise found
            return found
        return report_of(0 if since is None else since[PLACE], self.end)

    def marks(self, proven: Mapping[Place, int]) -> Mapping[str, Seen]:
        return dict(self.seen)

    def remembers(self) -> str:
        return self.memory


def test_the_second_audit_looks_at_what_is_new() -> None:
    auditor = FakeAuditor()
    audits = Incremental(auditor)
    audits.run()
    second = audits.run()
    assert auditor.asked == [None, {PLACE: 10}]
    assert second.partitions[0].start == 10
    assert audits.proven is not None
    assert audits.proven.positions == {PLACE: 20}
    assert audits.proven.records == 20
    assert audits.proven.fates == {"output": 20}


def test_a_proof_goes_on_in_another_process(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "state.json")
    auditor = FakeAuditor()
    Incremental(auditor, path).run()
    Incremental(auditor, path).run()
    assert auditor.asked == [None, {PLACE: 10}]
    assert read_state(path) == Incremental(auditor, path).proven


def test_what_is_not_proven_moves_nothing(make_report: MakeReport) -> None:
    auditor = FakeAuditor()
    audits = Incremental(auditor)
    audits.run()
    auditor.next_reports = [make_report(unproven=("expired",))]
    assert audits.run().verdict is Verdict.INCONCLUSIVE
    audits.run()
    assert auditor.asked == [None, {PLACE: 10}, {PLACE: 10}]


def test_a_partition_that_an_audit_did_not_look_at_stays_where_it_was() -> None:
    before = Proven("orders", "f1", {PLACE: 5, OTHER: 7})
    assert advanced(before, report_of(5, 9), {}).positions == {PLACE: 9, OTHER: 7}


@pytest.mark.parametrize("make", ["lost", "expired"])
def test_only_a_proof_can_be_built_on(make_report: MakeReport, make: str) -> None:
    report = make_report("lost") if make == "lost" else make_report(unproven=("expired",))
    with pytest.raises(UsageError):
        advanced(None, report, {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda auditor: setattr(auditor, "fingerprint", "f2"), "the definition is another"),
        (lambda auditor: setattr(auditor, "memory", "step 'once' remembers rows"), "remembers rows"),
        (lambda auditor: auditor.seen.update(parquet=Seen({"batch=1": "b"})), "has changed since (batch=1)"),
        (lambda auditor: auditor.seen.update(parquet=Seen({"batch=2": "a"})), "has changed since (batch=1)"),
        (lambda auditor: auditor.seen.update(delta=Seen()), "the sinks are others"),
    ],
)
def test_everything_is_looked_at_again_when(change: Callable[[FakeAuditor], None], reason: str) -> None:
    auditor = FakeAuditor()
    audits = Incremental(auditor)
    audits.run()
    change(auditor)
    report = audits.run()
    assert auditor.asked == [None, None]
    assert audits.was_full
    assert any(reason in note for note in report.notes)


def test_a_batch_that_is_new_is_no_change() -> None:
    auditor = FakeAuditor()
    audits = Incremental(auditor)
    audits.run()
    auditor.seen = {"parquet": Seen({"batch=1": "a", "batch=2": "c"})}
    audits.run()
    auditor.seen = {"parquet": Seen({"batch=1": "a", "batch=2": "d"})}
    audits.run()
    assert auditor.asked == [None, {PLACE: 10}, None]


def test_a_change_while_an_audit_reads_shows_in_the_next() -> None:
    before, after = {"batch=1": "a"}, {"batch=1": "changed", "batch=2": "b"}
    remembered = kept(before, after)
    assert changes(remembered, after) == ["batch=1"]


def test_what_marks_cannot_see_is_said_with_each_incremental_report() -> None:
    auditor = FakeAuditor(seen={"delta": Seen(unseen="its files are elsewhere")})
    audits = Incremental(auditor)
    assert audits.run().unproven == ()
    (told,) = audits.run().unproven
    assert "its files are elsewhere" in told.why
    assert not told.is_gap
    assert auditor.asked == [None, {PLACE: 10}]


def test_a_topic_is_read_from_where_it_ended_unless_it_was_ahead(tmp_path: Path) -> None:
    auditor = FakeAuditor(seen={"kafka": Seen({"topic": "x", "end of 0": ">=7", "end of 1": ">=9"})})
    audits = Incremental(auditor, str(tmp_path / "state"))
    behind = SinkAccount("kafka", "kafka", positions={"orders-0": 10})
    ahead = SinkAccount("kafka", "kafka", positions={"orders-0": 25})
    auditor.next_reports = [report_of(0, 10, sinks=(behind,)), report_of(10, 20, sinks=(ahead,))]
    audits.run()
    auditor.seen = {"kafka": Seen({"topic": "x", "end of 0": ">=40", "end of 1": ">=9"})}
    audits.run()
    Incremental(auditor, str(tmp_path / "state")).run()
    audits.run(full=True)
    start = {"kafka": TopicStart({0: 7, 1: 9}, {PLACE: 10})}
    assert auditor.topics == [{}, start, start, {}]


def test_each_nth_audit_looks_at_everything() -> None:
    auditor = FakeAuditor()
    audits = Incremental(auditor, full_every=3)
    for _ in range(7):
        audits.run()
    assert [since is None for since in auditor.asked] == [True, False, False, True, False, False, True]
    auditor = FakeAuditor()
    audits = Incremental(auditor, full_every=0)
    for _ in range(30):
        audits.run()
    assert sum(since is None for since in auditor.asked) == 1


def test_full_can_be_asked_for() -> None:
    auditor = FakeAuditor()
    audits = Incremental(auditor)
    audits.run()
    audits.run(full=True)
    assert auditor.asked == [None, None]
    assert audits.proven is not None
    assert audits.proven.records == 20


def test_the_proof_names_the_certificate_and_is_written_behind_it(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    made: list[Certificate] = []

    def keep(report: Report) -> Certificate:
        assert os.path.exists(path) == bool(made)
        made.append(certify(report, made[-1] if made else None))
        return made[-1]

    audits = Incremental(FakeAuditor(), path, keep=keep)
    audits.run()
    audits.run()
    found = read_state(path)
    assert found is not None
    assert found.certificate == made[-1].sha256


def test_a_certificate_that_cannot_be_written_leaves_the_proof_where_it_was(tmp_path: Path) -> None:
    def keep(report: Report) -> Certificate:
        raise OSError(28, "no space")

    path = str(tmp_path / "state")
    with pytest.raises(OSError, match="no space"):
        Incremental(FakeAuditor(), path, keep=keep).run()
    assert not os.path.exists(path)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"kind": "holdfast-audit-state", "version": 9}', "x" * 10]
)
def test_a_file_that_is_no_state_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "state"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match="does not hold the state of an audit"):
        Incremental(FakeAuditor(), str(path))
    assert path.read_text(encoding="utf-8") == content


def test_the_state_of_another_pipeline_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    write_state(path, Proven("payments"))
    with pytest.raises(UsageError, match="the audit of 'payments'"):
        Incremental(FakeAuditor(), path)


def test_pipelines_that_remember_rows_are_looked_at_whole() -> None:
    plain = PipelineDefinition("p", Source(("t",)), (Filter("f", "true"),))
    assert remembering(plain) == ""
    assert "'once'" in remembering(replace(plain, steps=(Dedupe("once", ("id",)),)))
    upsert = PostgresSink("postgresql://db", "t", "table", "upsert", ("id",))
    assert "'table'" in remembering(replace(plain, sinks=(upsert,)))


# Again and again


@dataclass
class Turns:
    """Time that passes only by waiting; ends after so many waits."""

    stops_after: int
    now_s: float = 1_000.0
    waited: list[float] = field(default_factory=list)

    def wait(self, seconds: float) -> bool:
        self.waited.append(seconds)
        self.now_s += seconds
        return len(self.waited) >= self.stops_after


def watched(auditor: FakeAuditor, turns: Turns) -> tuple[Watch, list[Report], list[str]]:
    told: list[Report] = []
    complaints: list[str] = []
    watch = Watch(
        Incremental(auditor),
        300.0,
        AuditMetrics(auditor.subject),
        turns.wait,
        told.append,
        complaints.append,
        lambda: turns.now_s,
    )
    return watch, told, complaints


def test_audits_go_on_until_somebody_stops_them() -> None:
    turns = Turns(3)
    watch, told, complaints = watched(FakeAuditor(), turns)
    assert watch.run() is Verdict.PROVEN
    assert len(told) == 3
    assert turns.waited == [300.0] * 3
    assert complaints == []


def test_a_failed_audit_ends_it(make_report: MakeReport) -> None:
    auditor = FakeAuditor(next_reports=[report_of(0, 10), make_report("lost")])
    turns = Turns(9)
    watch, told, _ = watched(auditor, turns)
    assert watch.run() is Verdict.FAILED
    assert len(told) == 2
    assert value(watch.metrics, 'holdfast_audit_verdict{subject="orders",verdict="failed"}') == 1
    assert value(watch.metrics, 'holdfast_audit_records{subject="orders",fate="lost"}') == 4


def test_an_inconclusive_audit_goes_on_and_is_counted(make_report: MakeReport) -> None:
    auditor = FakeAuditor(next_reports=[make_report(unproven=("expired",))])
    watch, told, _ = watched(auditor, Turns(2))
    assert watch.run() is Verdict.PROVEN
    assert [each.verdict for each in told] == [Verdict.INCONCLUSIVE, Verdict.PROVEN]
    assert value(watch.metrics, 'holdfast_audit_runs_total{subject="orders",verdict="inconclusive"}') == 1
    assert value(watch.metrics, 'holdfast_audit_unproven{subject="orders",gap="true"}') == 0


def test_an_audit_that_could_not_be_made_is_told_and_tried_again() -> None:
    auditor = FakeAuditor(next_reports=[report_of(0, 10), HoldfastError("no broker answered")])
    watch, told, complaints = watched(auditor, Turns(3))
    assert watch.run() is Verdict.PROVEN
    assert len(told) == 2
    assert complaints == ["audit 2 could not be made, the next one tries again: no broker answered"]
    assert value(watch.metrics, 'holdfast_audit_errors_total{subject="orders"}') == 1
    assert auditor.asked[1:] == [{PLACE: 10}, {PLACE: 10}]


def test_an_audit_that_takes_longer_than_its_time_is_followed_at_once() -> None:
    turns = Turns(2)
    auditor = FakeAuditor()
    watch, _, _ = watched(auditor, turns)
    slow = auditor.audit

    def audit(since: Mapping[Place, int] | None, topics: Topics, memory: Memory | None) -> Report:
        turns.now_s += 400
        return slow(since, topics, memory)

    auditor.audit = audit  # type: ignore[method-assign]
    watch.run()
    assert turns.waited == [0.0, 0.0]


def test_one_line_says_what_an_audit_of_many_found() -> None:
    line = summary(report_of(10, 30), was_full=False)
    assert "what is new: 20 records in 20 offsets of 1 partition" in line
    assert line.endswith("lost 0, duplicated 0: proven")


# Metrics


def value(of: AuditMetrics, series: str) -> float:
    found = [line for line in of.text().splitlines() if line.startswith(series + " ")]
    assert len(found) == 1, series
    return float(found[0].rpartition(" ")[2])


def test_every_metric_is_named_typed_and_there_after_an_audit(make_report: MakeReport) -> None:
    numbers = AuditMetrics("orders")
    report = make_report()
    numbers.observe(report, advanced(None, report, {}), was_full=True)
    lines = numbers.text().splitlines()
    for name, kind, meaning, _ in FAMILIES.values():
        assert f"# TYPE {name} {kind}" in lines
        assert f"# HELP {name} {meaning}" in lines
        assert any(line.startswith(f"{name}{{") for line in lines)
    assert (
        value(numbers, 'holdfast_audit_proven_offset{subject="orders",topic="orders",partition="1"}') == 1000
    )
    assert value(numbers, 'holdfast_audit_sink_lag_offsets{subject="orders",sink="parquet"}') == 150
    assert value(numbers, 'holdfast_audit_full_runs_total{subject="orders"}') == 1


def test_documented_metrics_are_those_there_are() -> None:
    text = (Path(__file__).parents[2] / "docs" / "CLI.md").read_text(encoding="utf-8")
    section = text.partition("## holdfast audit pipeline\n")[2].partition("\n## ")[0]
    assert {name for name in FAMILIES if f"`{name}`" in section} == set(FAMILIES)


def test_labels_are_escaped() -> None:
    numbers = AuditMetrics('or"de\\rs\n')
    assert 'subject="or\\"de\\\\rs\\n"' in numbers.text()


def test_metrics_are_served_to_this_machine() -> None:
    numbers = AuditMetrics("orders")
    with exposition.served(numbers.text, *exposition.parse_address("0")) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert answer.read().decode() == numbers.text()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=10)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


@pytest.mark.parametrize(
    ("text", "address"),
    [("9400", ("127.0.0.1", 9400)), ("0.0.0.0:9400", ("0.0.0.0", 9400)), ("[::1]:9", ("::1", 9))],
)
def test_a_port_alone_is_this_machines(text: str, address: tuple[str, int]) -> None:
    assert exposition.parse_address(text) == address


@pytest.mark.parametrize("text", ["", "host", "host:", "70000", "-1"])
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        exposition.parse_address(text)


def test_a_state_is_json(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    write_state(path, advanced(None, report_of(0, 10), {"parquet": {"batch=1": "a"}}))
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    assert document["positions"] == [
        {"topic": "orders", "topic_id": str(UUID(int=7)), "partition": 0, "offset": 10}
    ]
    assert Proven.from_json(document) == read_state(path)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")

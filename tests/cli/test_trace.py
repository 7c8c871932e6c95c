"""`holdfast trace` and `holdfast audit verify`, and what an audit writes, as their users run them."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.support.audit_topics import Growing, begin
from tests.support.fake_cluster import FakeCluster

from holdfast import exposition
from holdfast.audit.model import Fate, Finding, Report, Unproven
from holdfast.cli.app import run_command
from holdfast.cli.audit_every import redacted
from holdfast.cli.exits import run
from holdfast.wire.batch import Record, build_batch

Ran = tuple[int, str, str]
Run = Callable[..., Ran]


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Growing]:
    """Two batches that were taken, and records that were not."""
    with FakeCluster() as cluster:
        made = begin(cluster, str(tmp_path_factory.mktemp("growing")))
        made.grow()
        made.grow()
        made.send()
        yield made


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command in this process."""
    monkeypatch.delenv("HOLDFAST_BOOTSTRAP_SERVER", raising=False)

    def ran(*arguments: str) -> Ran:
        code = run(lambda: run_command(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return ran


def test_a_record_is_followed_into_every_sink(here: Run, growing: Growing) -> None:
    code, out, err = here("trace", "orders:0@7", growing.path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "record orders:0@7"
    assert lines[-1] == "output: it is in parquet and delta and kafka"
    assert any("key k7" in line and "2023-11-14 22:13:20.007 UTC" in line for line in lines)
    assert any("taken with offsets 0 to 19" in line for line in lines)
    assert any("files/batch=00000000000000000001/part-" in line and "row" in line for line in lines)
    assert any("copy-0@" in line for line in lines)


def test_a_record_can_be_looked_up_without_a_pipeline(here: Run, growing: Growing) -> None:
    code, out, _ = here("trace", "orders:0@7", "--bootstrap-server", growing.cluster.bootstrap_servers)
    assert code == 0
    assert out.splitlines()[-1] == "record: it is in the log, and can be read"


def test_a_record_beyond_the_ledgers_is_pending(here: Run, growing: Growing) -> None:
    code, out, _ = here("trace", "orders:0@41", growing.path, "--output", "json")
    document = json.loads(out)
    assert code == 0
    assert document["fate"] == "pending"
    assert {sink["standing"] for sink in document["sinks"]} == {"pending"}
    assert document["record"]["key"] == "k41"


def test_a_lost_record_is_exit_code_1(here: Run, growing: Growing) -> None:
    path = growing.files[0]
    table = pq.read_table(path)
    lost = table.column("_hf").to_pylist()[0]["offset"]
    before = Path(path).read_bytes()
    pq.write_table(table.slice(1), path)
    try:
        code, out, _ = here("trace", f"orders:0@{lost}", growing.path)
    finally:
        Path(path).write_bytes(before)
    assert code == 1
    assert out.splitlines()[-1].startswith("lost: it is in delta and kafka, and not in parquet")


def test_records_are_found_by_key(here: Run, growing: Growing) -> None:
    code, out, _ = here("trace", "--key", "k7", growing.path, "--output", "json")
    assert code == 0
    assert json.loads(out)["record"]["offset"] == 7
    code, out, err = here("trace", "--key", "nobody", "--topic", "orders", growing.path)
    assert (code, out) == (1, "")
    assert "no committed record with this key is in orders" in err


def test_the_newest_of_many_records_with_a_key_are_shown(here: Run, growing: Growing) -> None:
    topic = growing.cluster.add_topic("many", partitions=1)
    records = [Record(at, at, b"\xff\x00", b"v") for at in range(5)]
    topic.partitions[0].append(build_batch(records, base_timestamp=1_700_000_000_000))
    bootstrap = ("--bootstrap-server", growing.cluster.bootstrap_servers)
    code, out, err = here("trace", "--key", "0xff00", "--topic", "many", "--max-records", "2", *bootstrap)
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("record many")] == [
        "record many:0@3",
        "record many:0@4",
    ]
    assert "5 records have this key; shown are the newest 2" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "which record?"),
        (("orders",), "'orders' is no record"),
        (("orders:0",), "is no record"),
        (("orders:0@1", "a.yaml", "b.yaml"), "only one pipeline"),
        (("orders:0@1", "--topic", "orders"), "--topic goes with --key"),
        (("orders:0@1", "--key", "k"), "not by both"),
    ],
)
def test_what_is_no_question_is_a_usage_error(here: Run, arguments: tuple[str, ...], words: str) -> None:
    code, _, err = here("trace", *arguments)
    assert code == 2
    assert words in err


def test_no_secret_is_shown_of_a_sink_that_cannot_be_reached(
    here: Run, growing: Growing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PG_PORT", "54329")
    path = tmp_path / "p.yaml"
    path.write_text(
        f"pipeline: growing\nsource: {{topics: [orders], bootstrap: {growing.cluster.bootstrap_servers}}}\n"
        "sinks:\n  - postgres: {url: 'postgresql://127.0.0.1:${PG_PORT}/db', table: t}\n"
    )
    code, out, err = here("trace", "orders:0@7", str(path))
    assert code == 4
    assert "sink postgres" in out
    assert "cannot be read" in out
    assert "54329" not in out + err
    assert "port ${PG_PORT}" in out
    code, out, err = here("audit", "pipeline", str(path))
    assert code == 3
    assert "54329" not in out + err


def test_what_readers_said_is_kept_without_secrets() -> None:
    report = Report(
        "orders",
        findings=(Finding(Fate.LOST, "table", keys=("hunter2",), detail="no hunter2"),),
        unproven=(Unproven("hunter2", "of hunter2"),),
        notes=("hunter2",),
    )
    made = redacted(report, lambda text: text.replace("hunter2", "${PASSWORD}"))
    assert made.findings == (Finding(Fate.LOST, "table", keys=("hunter2",), detail="no ${PASSWORD}"),)
    assert (made.unproven[0].what, made.unproven[0].why, made.notes[0]) == (
        "${PASSWORD}",
        "of ${PASSWORD}",
        "${PASSWORD}",
    )


# What an audit writes


def test_an_audit_writes_all_that_was_asked_for(here: Run, growing: Growing, tmp_path: Path) -> None:
    proofs = tmp_path / "proofs"
    files = ("--html", str(tmp_path / "page" / "a.html"), "--junit", str(tmp_path / "a.xml"))
    for number in (1, 2):
        code, out, _ = here("audit", "pipeline", growing.path, "--certificate", str(proofs), *files)
        assert (code, out.splitlines()[-1]) == (0, "lost 0, duplicated 0: proven")
        assert (proofs / f"growing-{number:06d}.json").exists()
    newest = json.loads((proofs / "growing-000002.json").read_text())
    assert newest["sha256"] in (tmp_path / "page" / "a.html").read_text()
    assert "<testsuites" in (tmp_path / "a.xml").read_text()
    assert here("audit", "verify", str(proofs), "--expect", newest["sha256"])[0] == 0


def test_an_audit_writes_nothing_to_what_it_reads(here: Run, growing: Growing) -> None:
    def everything() -> dict[str, tuple[int, int]]:
        found = {}
        for root, directories, names in os.walk(growing.directory):
            for name in (*directories, *names):
                stat = os.lstat(os.path.join(root, name))
                found[os.path.join(root, name)] = (stat.st_mtime_ns, stat.st_ctime_ns)
        return found

    before = everything()
    assert here("audit", "pipeline", growing.path)[0] == 0
    assert here("trace", "orders:0@7", growing.path)[0] == 0
    assert everything() == before


def test_a_state_makes_the_next_audit_look_at_what_is_new(
    here: Run, growing: Growing, tmp_path: Path
) -> None:
    state = ("--state", str(tmp_path / "state"), "--output", "json")
    starts = []
    for more in ((), (), ("--full",)):
        code, out, _ = here("audit", "pipeline", growing.path, *state, *more)
        assert code == 0
        starts.append(json.loads(out)["partitions"][0]["start"])
    assert starts == [0, 40, 0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--metrics-port", "0"), "--metrics-port goes with --every"),
        (("--full",), "--full goes with --state"),
        (("--full-every", "3"), "--full-every goes with --state or --every"),
        (("--every", "5"), "has no unit of time"),
        (("--every", "1h", "--metrics-port", "http"), "is no port"),
    ],
)
def test_flags_that_need_others_say_so(
    here: Run, growing: Growing, flags: tuple[str, ...], words: str
) -> None:
    code, _, err = here("audit", "pipeline", growing.path, *flags)
    assert code == 2
    assert words in err


def test_audits_go_on_until_one_fails(
    here: Run, growing: Growing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time between audits passes at once, and while it does a row is taken away."""
    path = growing.files[0]
    before = Path(path).read_bytes()
    waited: list[float] = []
    ports: list[int] = []
    told: list[str] = []

    @contextmanager
    def served(text: Callable[[], str], host: str, port: int) -> Iterator[int]:
        with serve(text, host, port) as taken:
            ports.append(taken)
            yield taken

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{ports[0]}/metrics", timeout=30) as answer:
            told.append(answer.read().decode())
        if len(waited) == 2:
            pq.write_table(pq.read_table(path).slice(1), path)
        return False

    serve = exposition.served
    monkeypatch.setattr(exposition, "served", served)
    monkeypatch.setattr("holdfast.cli.audit_every._wait", wait)
    try:
        code, out, err = here(
            "audit",
            "pipeline",
            growing.path,
            "--every",
            "5m",
            "--metrics-port",
            "0",
            "--certificate",
            str(tmp_path),
        )
    finally:
        Path(path).write_bytes(before)
    lines = out.splitlines()
    assert code == 1
    assert len(waited) == 2
    assert "everything: 40 records" in lines[0]
    assert "what is new: 0 records" in lines[1]
    assert lines[-1].startswith("lost 1, duplicated 0")
    assert "everything was looked at: the part of sink 'parquet' that was proven has changed since" in out
    assert f"metrics at http://127.0.0.1:{ports[0]}/metrics" in err
    assert 'holdfast_audit_runs_total{subject="growing",verdict="proven"} 2' in told[1]
    assert 'holdfast_audit_proven_offset{subject="growing",topic="orders",partition="0"} 40' in told[1]
    assert len(list(tmp_path.iterdir())) == 3


# Certificates


def test_a_broken_chain_is_exit_code_1_and_named(here: Run, growing: Growing, tmp_path: Path) -> None:
    for _ in range(3):
        assert here("audit", "pipeline", growing.path, "--certificate", str(tmp_path))[0] == 0
    path = tmp_path / "growing-000002.json"
    document: dict[str, Any] = json.loads(path.read_text())
    document["report"]["took_ms"] += 1
    path.write_text(json.dumps(document))
    code, out, _ = here("audit", "verify", str(tmp_path))
    assert code == 1
    assert "BROKEN" in out
    assert "broken: growing number 2" in out
    code, out, _ = here("audit", "verify", str(tmp_path / "growing-000001.json"), "--output", "json")
    assert code == 0
    assert json.loads(out)[0]["valid"] is True


def test_certificates_that_are_not_there_are_a_usage_error(here: Run, tmp_path: Path) -> None:
    assert here("audit", "verify", str(tmp_path))[0] == 2
    assert here("audit", "verify", str(tmp_path / "none.json"))[0] == 2

"""The guide to the audit holds: its program proves a pipeline, its words are those of reports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tests.support.audit_sinks import Ledger, ParquetBuilder, rows_of
from tests.support.audit_topics import FakeTopics, dead_letters
from tests.support.fake_cluster import FakeCluster

from holdfast.audit.model import Fate, Verdict
from holdfast.pipeline import Pipeline
from holdfast.pipeline.definition.fingerprint import fingerprint
from holdfast.pipeline.digest import digest_of_offsets
from holdfast.pipeline.ledger import Intake, Routes
from holdfast.pipeline.positions import Place
from holdfast.wire.batch import make_batch

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "audit.md"
COUNT = 10


def program() -> str:
    [found] = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    return str(found)


def write_pipeline(cluster: FakeCluster, text: str) -> None:
    """What the guide's pipeline would have written, in the working directory."""
    names: dict[str, Pipeline] = {}
    exec(text.partition("report =")[0], names)  # the definition alone
    mark = fingerprint(names["orders"].definition())
    topic = cluster.add_topic("orders", 1)
    values = [json.dumps({"id": number, "customer": f"c{number}"}).encode() for number in range(COUNT)]
    topic.partitions[0].append(make_batch(values))
    place = Place("orders", topic.topic_id, 0)
    out, letters = ParquetBuilder("out/orders"), dead_letters(FakeTopics(cluster), "orders-dlt", "orders")
    rows = rows_of(
        [("orders", 0, number, 0) for number in range(COUNT)],
        {"id": list(range(COUNT)), "customer": [f"c{number}" for number in range(COUNT)]},
    )
    digest = digest_of_offsets("orders", 0, np.arange(COUNT))
    made = {"intake": Intake(records=COUNT, digest=digest), "routes": Routes(main=COUNT)}
    for name, commit in (("parquet", out.commit), ("dead-letter", letters.commit)):
        ledger = Ledger("orders", name, mark)
        commit(ledger.opening({place: 0}))
        count = COUNT if name == "parquet" else 0
        entry = ledger.entry({place: (0, COUNT)}, rows=count, **made)  # type: ignore[arg-type]
        if name == "parquet":
            out.commit(entry, rows)
        else:
            letters.commit(entry)


def test_the_program_proves_a_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with FakeCluster() as cluster:
        text = program().replace("localhost:9092", cluster.bootstrap_servers)
        write_pipeline(cluster, text)
        exec(text, {})
        assert capsys.readouterr().out == f"orders 0 {{'output': {COUNT}}}\n"
        [file] = Path("out/orders").glob("batch=*/*.parquet")
        file.unlink()
        with pytest.raises(AssertionError, match="10 lost orders-0 at 0-9 in parquet"):
            exec(text, {})


def test_every_fate_and_verdict_is_explained() -> None:
    text = GUIDE.read_text()
    for fate in Fate:
        assert re.search(rf"\b{str(fate).replace('_', ' ')}\b", text), fate
    for verdict in Verdict:
        assert f"| {verdict} | {verdict.exit_code} |" in text


def test_it_ends_with_what_it_does_not_protect_against() -> None:
    headings = re.findall(r"^## (.*)$", GUIDE.read_text(), re.MULTILINE)
    assert headings[-1] == "What it does not protect against"

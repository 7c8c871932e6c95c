"""`holdfast audit pipeline`: verdicts as exit codes, and what keeps an audit from being made."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from tests.support.audit_sinks import Ledger, ParquetBuilder, rows_of
from tests.support.audit_topics import FakeTopics, dead_letters
from tests.support.fake_cluster import FakeCluster

from holdfast.pipeline.definition.fingerprint import fingerprint
from holdfast.pipeline.definition.loading import load_pipeline
from holdfast.pipeline.digest import digest_of_offsets
from holdfast.pipeline.ledger import Intake, Routes
from holdfast.pipeline.positions import Place
from holdfast.wire.batch import Record, build_batch

Run = Callable[..., CompletedProcess[bytes]]
RECORDS = 6


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as found:
        yield found


@pytest.fixture
def definition(tmp_path: Path, cluster: FakeCluster) -> str:
    path = tmp_path / "shop.yaml"
    path.write_text(
        f"""
pipeline: shop
source:
  topics: [orders]
  bootstrap: {cluster.bootstrap_servers}
  settings: {{default.api.timeout.ms: "3000", retry.backoff.ms: "1", socket.connection.setup.timeout.ms: "2000"}}
  value:
    format: json
    fields: {{id: long}}
sinks:
  - parquet: {{path: out}}
"""
    )
    return str(path)


def written(cluster: FakeCluster, definition: str, kept: set[int] | None = None) -> None:
    """Six records, taken in one batch; `kept` are the rows that are in the sink in the end."""
    topic = cluster.add_topic("orders")
    values = [b'{"id":%d}' % at for at in range(RECORDS)]
    records = [Record(at, 0, f"key-{at}".encode(), value, ()) for at, value in enumerate(values)]
    topic.partitions[0].append(build_batch(records, base_timestamp=1_700_000_000_000))
    place = Place("orders", topic.topic_id, 0)
    mark = fingerprint(load_pipeline(definition).definition)
    digest = digest_of_offsets("orders", 0, np.arange(RECORDS))
    parquet = ParquetBuilder(os.path.join(os.path.dirname(definition), "out"))
    letters = dead_letters(FakeTopics(cluster), "shop-dlt", "shop")
    rows = sorted(range(RECORDS) if kept is None else kept)
    table = rows_of([("orders", 0, at, 0) for at in rows], {"id": np.array(rows, np.int64).tolist()})
    for name, commit in (
        ("parquet", lambda entry: parquet.commit(entry, table if entry.range else None)),
        ("dead-letter", letters.commit),
    ):
        ledger = Ledger("shop", name, mark)
        commit(ledger.opening({place: 0}))
        commit(
            ledger.entry(
                {place: (0, RECORDS)},
                rows=RECORDS if name == "parquet" else 0,
                intake=Intake(records=RECORDS, digest=digest),
                routes=Routes(main=RECORDS),
            )
        )


def test_a_proof_ends_with_0_and_says_so(
    run_here_anywhere: Run, cluster: FakeCluster, definition: str
) -> None:
    written(cluster, definition)
    result = run_here_anywhere("audit", "pipeline", definition)
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"lost 0, duplicated 0: proven" in result.stdout


def test_a_loss_ends_with_1_and_names_offset_and_key(
    run_here_anywhere: Run, cluster: FakeCluster, definition: str
) -> None:
    written(cluster, definition, kept={0, 1, 2, 4, 5})
    result = run_here_anywhere("audit", "pipeline", definition, "--output", "json")
    assert result.returncode == 1
    report = json.loads(result.stdout)
    assert report["verdict"] == "failed"
    lost = next(each for each in report["findings"] if each["fate"] == "lost")
    assert (lost["sink"], lost["ranges"], lost["keys"]) == ("parquet", [[3, 3]], ["key-3"])


def test_what_has_expired_ends_with_4_and_from_earliest_with_0(
    run_here_anywhere: Run, cluster: FakeCluster, definition: str
) -> None:
    written(cluster, definition)
    cluster.topics["orders"].partitions[0].log_start = 2
    assert run_here_anywhere("audit", "pipeline", definition).returncode == 4
    assert run_here_anywhere("audit", "pipeline", definition, "--from", "earliest").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", "yesterday"], b"--from yesterday"),
        (["--output", "poem"], b"poem"),
        (["--command-config", "/nowhere.properties"], b"/nowhere.properties"),
    ],
)
def test_a_wrong_flag_ends_with_2(
    run_here_anywhere: Run, cluster: FakeCluster, definition: str, arguments: list[str], words: bytes
) -> None:
    written(cluster, definition)
    result = run_here_anywhere("audit", "pipeline", definition, *arguments)
    assert result.returncode == 2
    assert words in result.stderr


def test_a_definition_that_is_not_there_ends_with_2(run_here_anywhere: Run) -> None:
    assert run_here_anywhere("audit", "pipeline", "nowhere.yaml").returncode == 2


def _never_ran(cluster: FakeCluster, definition: str) -> None:
    cluster.add_topic("orders")


def _source_gone(cluster: FakeCluster, definition: str) -> None:
    written(cluster, definition)
    del cluster.topics["orders"]


def _unreachable(cluster: FakeCluster, definition: str) -> None:
    cluster.stop(0)


def _log_damaged(cluster: FakeCluster, definition: str) -> None:
    written(cluster, definition)
    log = cluster.topics["orders"].partitions[0]
    header, batch = log.batches[0]
    log.batches[0] = (header, batch[:-1] + bytes([batch[-1] ^ 1]))


def _sink_no_directory(cluster: FakeCluster, definition: str) -> None:
    written(cluster, definition)
    path = os.path.join(os.path.dirname(definition), "out")
    os.rename(path, path + ".gone")
    Path(path).write_text("not a table")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_never_ran, b"has never run"),
        (_source_gone, b"the source is gone"),
        (_unreachable, b"cannot reach the broker"),
        (_log_damaged, b"checksum"),
        (_sink_no_directory, b"is no directory"),
    ],
)
def test_what_keeps_an_audit_from_being_made_ends_with_3_and_never_with_a_verdict(
    run_here_anywhere: Run,
    cluster: FakeCluster,
    definition: str,
    spoil: Callable[[FakeCluster, str], None],
    words: bytes,
) -> None:
    spoil(cluster, definition)
    result = run_here_anywhere("audit", "pipeline", definition)
    assert (result.returncode, result.stdout) == (3, b"")
    assert words in result.stderr
    assert b"Traceback" not in result.stderr

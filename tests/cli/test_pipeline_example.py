"""What `pipeline init` writes runs as it stands: through a process, against a broker, on Spark."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytestmark = [pytest.mark.timeout(600), pytest.mark.java]

Run = Callable[..., subprocess.CompletedProcess[bytes]]
SPARK_TIMEOUT_S = 300


def order(number: int, **changes: object) -> str:
    return json.dumps(
        {"id": number, "customer": "ada", "amount": 2.5 * number, "at": "2026-01-31T12:00:00Z"} | changes
    )


def test_the_example_runs_as_it_is_written(run: Run, bootstrap_servers: str, tmp_path: Path) -> None:
    name = f"orders-{uuid.uuid4().hex[:8]}"
    assert run("pipeline", "init", str(tmp_path)).returncode == 0
    definition = tmp_path / "orders.yaml"
    definition.write_text(  # names of its own, since the broker is shared
        definition.read_text()
        .replace("pipeline: orders", f"pipeline: {name}")
        .replace("topics: [orders]", f"topics: [{name}]")
        .replace("orders-clean", f"{name}-clean")
    )
    for topic in (name, f"{name}-clean", f"{name}-dlt"):
        assert run("topics", "create", "--topic", topic).returncode == 0
    lines = [
        *(order(number) for number in range(1, 21)),
        order(21, customer="test"),
        order(22, amount=-1),
        '{"bad',
    ]
    assert run("produce", "--topic", name, stdin="\n".join(lines).encode()).returncode == 0

    arguments = [
        "pipeline",
        "run",
        str(definition),
        "--output",
        "json",
        "--bootstrap-server",
        bootstrap_servers,
    ]
    result = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", *arguments, "--master", "local[1]"],
        capture_output=True,
        timeout=SPARK_TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr.decode()
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["routes"] == {
        "main": 20,
        "dead_letter": {"parse": 1, "positive-amount": 1},
        "filtered": {"no-tests": 1},
        "duplicate": 0,
        "late": 0,
    }
    table = pq.read_table(tmp_path / "out" / "orders")
    assert sorted(table["id"].to_pylist()) == list(range(1, 21))
    assert table["tax"].to_pylist() == pytest.approx(
        [0.19 * amount for amount in table["amount"].to_pylist()]
    )
    status = run(
        "pipeline", "status", str(definition), "--bootstrap-server", bootstrap_servers, "--output", "json"
    )
    assert {sink["name"]: sink["lag"] for sink in json.loads(status.stdout)["sinks"]} == {
        "dead-letter": 0,
        "parquet": 0,
        "kafka": 0,
    }
    reset = run("pipeline", "reset", str(definition), "--bootstrap-server", bootstrap_servers)
    assert reset.returncode == 2
    assert b"parquet: 23 offsets again, 0 left out" in reset.stdout

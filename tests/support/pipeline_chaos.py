"""Pipelines killed as real processes: `holdfast pipeline run` with all it starts, and what is found in its sinks.

A run is the driver, Spark's JVM, the daemon of Python workers and the workers. The daemon makes a process group of its
own, so the whole is found by a mark in the environment that all of them inherit. Two ways to die: all at once, as with
the machine; or the driver alone, so that workers of the old run may still be at work when the next one starts.

The source is made so that a row tells where it belongs: record `n` of a partition holds `n`, and every 97th is broken.
What a sink holds is then compared with what it must hold, place by place.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from confluent_kafka import Producer
from tests.support.history import Violation

from holdfast.client.dead_letter_dialects import read_failure
from holdfast.testing.engines import QUIET, await_decided, read_log
from holdfast.testing.processes import MARK, POLL_SECONDS, die_with_parent, kill_marked

BROKEN_EVERY: Final = 97
WAIT_SECONDS_MAX: Final = 300.0
"""For a Spark to start and to do a batch, on a machine that has other work."""
SHOWN: Final = 5
ONCE: Final = "S6"


class Row(NamedTuple):
    """One row in a sink: where it says it comes from, and where its content says so."""

    partition: int
    offset: int
    part: int
    number: int


# ------------------------------------------------------------------------------- the source


class Orders:
    """Fills the topic of the source, a share at a time."""

    def __init__(self, bootstrap_servers: str, topic: str, partitions: int) -> None:
        self._producer = Producer(
            {"bootstrap.servers": bootstrap_servers, "enable.idempotence": True, **QUIET}
        )
        self._topic = topic
        self.sent = dict.fromkeys(range(partitions), 0)

    def send(self, count: int) -> None:
        """So many more, spread evenly."""
        for turn in range(count):
            part = turn % len(self.sent)
            number = self.sent[part]
            self.sent[part] += 1
            while True:
                try:
                    self._producer.produce(self._topic, order(part, number), partition=part)
                    break
                except BufferError:
                    self._producer.poll(0.05)
        assert self._producer.flush(WAIT_SECONDS_MAX) == 0

    def good(self) -> dict[int, list[int]]:
        """The offsets that must be in every sink."""
        return {part: [n for n in range(end) if not is_broken(n)] for part, end in self.sent.items()}

    def broken(self) -> dict[int, list[int]]:
        """The offsets that must be dead letters."""
        return {part: [n for n in range(end) if is_broken(n)] for part, end in self.sent.items()}


def is_broken(number: int) -> bool:
    return number % BROKEN_EVERY == BROKEN_EVERY - 1


def order(part: int, number: int) -> bytes:
    text = json.dumps({"part": part, "number": number, "amount": number / 4, "note": "x" * (number % 50)})
    return (text[:-1] if is_broken(number) else text).encode()


# ------------------------------------------------------------------------------- the process


class PipelineProcess:
    """`holdfast pipeline run`, again and again on the same definition."""

    def __init__(self, file: Path, bootstrap_servers: str, home: Path) -> None:
        self._command = [sys.executable, "-m", "holdfast.cli", "pipeline", "run", str(file)]
        self._command += ["--bootstrap-server", bootstrap_servers]
        self._home = home
        self._output = file.with_suffix(".out")
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = uuid.uuid4().hex

    def start(self, *options: str) -> None:
        with open(self._output, "ab") as output:
            self._process = subprocess.Popen(
                [*self._command, *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, MARK: self._mark},
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    def require_alive(self) -> None:
        assert self._process is not None
        code = self._process.poll()
        assert code is None, f"the pipeline ended by itself with {code}:\n{self.said()}"

    def finish(self) -> None:
        """Wait for its own end, which is a good one."""
        assert self._process is not None
        code = self._process.wait(WAIT_SECONDS_MAX)
        assert code == 0, f"the pipeline ended with {code}:\n{self.said()}"

    def kill(self, *, whole: bool) -> None:
        """SIGKILL to all of it, or to the driver alone."""
        assert self._process is not None
        if whole:
            # Everything this run started, and what earlier ones left.
            kill_marked(self._mark, self._process)
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Leave nothing behind."""
        if self._process is not None:
            self.kill(whole=True)
            self._process = None

    def said(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")[-4000:]

    # What it has done, by the files of its home

    def plan(self) -> int:
        """Changes with every plan that is written."""
        try:
            return (self._home / "plan.json").stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def batches(self) -> list[dict[str, Any]]:
        """The batches of all runs so far."""
        found = []
        with contextlib.suppress(FileNotFoundError), open(self._home / "log.jsonl", "rb") as file:
            for line in file:
                with contextlib.suppress(ValueError):  # a line that a kill cut short
                    document = json.loads(line)
                    if document.get("event") == "batch":
                        found.append(document)
        return found


# ------------------------------------------------------------------------------- the storm


class PipelineStorm:
    """Kills a pipeline again and again, at moments of chance: while it starts, and in or after a batch."""

    STARTING: Final = 0.15
    """So many die before their first batch."""
    DRIVER_ALONE: Final = 0.3

    def __init__(self, chance: random.Random, process: PipelineProcess) -> None:
        self._chance = chance
        self._process = process
        self.log: list[str] = []
        self.recoveries_s: list[float] = []
        """From the start of a process after a kill to the end of its first batch, of those that came so far."""
        self._start_s = 10.0
        self._batch_s = 2.0

    def kill_once(self) -> None:
        """Start the pipeline and kill it."""
        seen, plan = len(self._process.batches()), self._process.plan()
        began = time.monotonic()
        self._process.start()
        if self._chance.random() < self.STARTING:
            moment = f"{self._pause(self._start_s):.2f} s after its start"
        else:
            self._until(lambda: self._process.plan() != plan)
            self._start_s = time.monotonic() - began
            wanted = self._chance.choice((0, 0, 1, 1, 2))
            self._await_batches(seen, wanted, began)
            moment = f"{self._pause(self._batch_s):.2f} s into batch {wanted + 1}"
        whole = self._chance.random() >= self.DRIVER_ALONE
        self._process.kill(whole=whole)
        self.log.append(f"{'all' if whole else 'driver'} killed {moment}")

    def finish(self) -> None:
        """The last run, which nobody kills."""
        seen, began = len(self._process.batches()), time.monotonic()
        self._process.start("--once")
        self._await_batches(seen, 1, began)
        self._process.finish()

    def _await_batches(self, seen: int, wanted: int, began: float) -> None:
        if not wanted:
            return
        self._until(lambda: len(self._process.batches()) > seen)
        if self.log:
            self.recoveries_s.append(time.monotonic() - began)
        self._until(lambda: len(self._process.batches()) >= seen + wanted)
        self._batch_s = max(0.2, self._process.batches()[-1]["duration_ms"] / 1000)

    def _until(self, come_about: Any) -> None:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not come_about():
            self._process.require_alive()
            assert time.monotonic() < deadline, (
                f"no batch in {WAIT_SECONDS_MAX:.0f} s:\n{self._process.said()}"
            )
            time.sleep(POLL_SECONDS)

    def _pause(self, most_s: float) -> float:
        pause = self._chance.uniform(0.0, most_s)
        time.sleep(pause)
        return pause


# ------------------------------------------------------------------------------- what is in the sinks


def check_once(expected: Mapping[int, Sequence[int]], found: Iterable[Row], what: str) -> None:
    """Every expected place is there once, nothing else is, and a row's content is that of its place."""
    places: Counter[tuple[int, int]] = Counter()
    for row in found:
        if (row.part, row.number) != (row.partition, row.offset):
            raise Violation(
                ONCE,
                f"{what}: a row of {row.partition}@{row.offset} has the content of {row.part}@{row.number}",
            )
        places[(row.partition, row.offset)] += 1
    wanted = {(part, offset) for part, offsets in expected.items() for offset in offsets}
    for name, some in (
        ("missing", wanted - places.keys()),
        ("not expected", places.keys() - wanted),
        ("there twice", {place for place, times in places.items() if times > 1}),
    ):
        if some:
            raise Violation(
                ONCE, f"{what}: {len(some)} of {len(wanted)} are {name}, such as {sorted(some)[:SHOWN]}"
            )


def table_rows(table: Any) -> Iterator[Row]:
    """Rows of an Arrow table as file sinks store them."""
    lineage = table.column("_hf").combine_chunks()
    columns = (
        lineage.field("partition"),
        lineage.field("offset"),
        table.column("part"),
        table.column("number"),
    )
    yield from (Row(*values) for values in zip(*(column.to_pylist() for column in columns), strict=True))


def parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow.dataset as ds

    return table_rows(ds.dataset(path, format="parquet").to_table(columns=["_hf", "part", "number"]))


def delta_rows(path: Path) -> Iterator[Row]:
    from deltalake import DeltaTable

    return table_rows(DeltaTable(path).to_pyarrow_table(columns=["_hf", "part", "number"]))


def postgres_rows(url: str, table: str) -> Iterator[Row]:
    import psycopg

    with psycopg.connect(url) as connection:
        rows = connection.execute(f"select _hf_partition, _hf_offset, part, number from {table}").fetchall()
    yield from (Row(*row) for row in rows)


def kafka_rows(bootstrap_servers: str, topic: str) -> Iterator[Row]:
    """Records that the Kafka sink wrote, by the header that names their source."""
    for message in committed(bootstrap_servers, topic):
        _, _, place = dict(message.headers())["hf-source"].decode().rpartition(":")
        partition, _, offset = place.partition("#")[0].partition("@")
        content = json.loads(message.value())
        yield Row(int(partition), int(offset), content["part"], content["number"])


def dead_letter_rows(bootstrap_servers: str, topic: str) -> Iterator[Row]:
    for message in committed(bootstrap_servers, topic):
        failure = read_failure(message.headers())
        assert failure is not None
        assert failure.partition is not None
        assert failure.offset is not None
        content = json.loads(message.value() + b"}")
        yield Row(failure.partition, failure.offset, content["part"], content["number"])


def committed(bootstrap_servers: str, topic: str) -> Iterator[Any]:
    """Every message of a topic that a reader of committed ones sees."""
    assert await_decided(bootstrap_servers, topic, WAIT_SECONDS_MAX), f"{topic} is not decided"
    return read_log(bootstrap_servers, topic, seconds=WAIT_SECONDS_MAX)

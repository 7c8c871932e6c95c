"""The real processes of the demo: a broker, a sender and a Spark job, each of which can be killed and started again.

Every one of them dies with the demo, however that ends: the kernel kills what was started directly when the demo's main
thread is gone, so processes are started from there only. What a job starts in turn (a JVM, Python workers) is found by
a mark in the environment that all of them inherit.

The demo's Spark jobs: our pipeline, and the plain one that `--unsafe` puts beside it.

A job tells what it has done by the files it leaves, never by word of mouth: how many batches it has finished, how many
of its outputs anybody can see, how far it has come, and what it has written.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from holdfast.demo.orders import SOURCE, definition_text
from holdfast.demo.sender import Errand
from holdfast.errors import HoldfastError
from holdfast.lab.engines import ApacheMachine
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.processes import MARK, die_with_parent, kill_marked

STOP_SECONDS_MAX: Final = 120.0
"""A pipeline ends with the batch under way."""
POLL_SECONDS: Final = 0.01
QUOTED_CHARACTERS: Final = 2_000


class DemoFailed(HoldfastError):
    """One of the demo's own processes did what it must not do; its last words are in the message."""


EMBEDDED: Final = "holdfast"


class Engine(NamedTuple):
    """A broker that is killed, and what the demo calls it."""

    name: str
    machine: BrokerProcess | ApacheMachine

    @classmethod
    def in_directory(cls, kind: str, directory: Path) -> Engine:
        """`kind` is `EMBEDDED` or `kafka`; the broker is started later."""
        if kind == EMBEDDED:
            return cls("holdfast's own broker", BrokerProcess(str(directory / "data")))
        from holdfast.testing.apache import KAFKA_VERSION, ApacheKafka, jars

        jars()  # fetched once, before anything else is started
        kafka = ApacheKafka(directory=directory / "kafka", heap_options=("-Xmx512M", "-Xms256M"))
        return cls(f"Apache Kafka {KAFKA_VERSION}", ApacheMachine(kafka))


class Child:
    """A command with everything it starts, killed as a whole."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self._log = log
        self._mark = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"the {self.name} was not started"
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def spawn(self, command: Sequence[str], *, talks: bool = False) -> subprocess.Popen[bytes]:
        """Start; one that talks has pipes for standard input and output, all the rest goes to its log."""
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else log,
                stderr=log,
                env={**os.environ, MARK: self._mark},
                # Ctrl-C is for the demo, which ends them in order.
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        return self._process

    def kill(self) -> int:
        """SIGKILL to all of it at once; returns how many processes that were."""
        if self._process is None:
            return 0
        killed = len(kill_marked(self._mark, self._process))
        self._process.wait()
        self._process = None
        return killed

    def stop(self) -> None:
        """SIGTERM, and wait for a good end; what it would leave behind (an archive of classes being made) ends too."""
        assert self._process is not None
        self._process.terminate()
        try:
            code = self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"the {self.name} does not end after SIGTERM{self.last_words()}") from None
        kill_marked(self._mark, self._process)
        self._process = None
        if code:
            raise DemoFailed(f"the {self.name} ended with {code}{self.last_words()}")

    def require_alive(self) -> None:
        if not self.is_alive:
            code = None if self._process is None else self._process.returncode
            raise DemoFailed(f"the {self.name} ended by itself with {code}{self.last_words()}")

    def last_words(self) -> str:
        text = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        return f"; {self._log} ends:\n{text[-QUOTED_CHARACTERS:]}"


class Sender(Child):
    """The sender, and what it has answered so far: a new process goes on behind the last answer."""

    def __init__(self, log: Path, errand: Errand) -> None:
        super().__init__("sender", log)
        self._errand = errand
        self.until = 0
        """How far it may go."""
        self.taken = 0
        """Orders whose customers were told so, by all its processes."""
        self.is_done = False
        self._listener: threading.Thread | None = None

    def start(self, bootstrap: str) -> None:
        errand = replace(self._errand, bootstrap=bootstrap, first=self.taken)
        command = [sys.executable, "-m", "holdfast.demo.sender", errand.as_json()]
        process = self.spawn(command, talks=True)
        assert process.stdout is not None
        self._listener = threading.Thread(target=self._listen, args=(process.stdout,), daemon=True)
        self._listener.start()
        self.allow(self.until)

    def allow(self, until: int) -> None:
        """It may go so far."""
        self.until = until
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"%d\n" % until)
            self._process.stdin.flush()
        except BrokenPipeError:
            self.require_alive()
            raise

    def kill(self) -> int:
        killed = super().kill()
        if self._listener is not None:
            self._listener.join()  # what it answered in its last moment counts
        return killed

    def _listen(self, answers: IO[bytes]) -> None:
        for line in answers:
            word, _, number = line.decode().strip().partition(" ")
            if word == "taken":
                self.taken = int(number)
            elif word == "done":
                self.is_done = True

    def require_alive(self) -> None:
        if not self.is_done:
            super().require_alive()


DEFINITION_FILE: Final = "orders.yaml"


class Counts(NamedTuple):
    """What a job has written so far; nothing where it does not tell."""

    output: int = 0
    dead_letter: int | None = None
    duplicate: int | None = None
    late: int | None = None
    windows: int | None = None


class Job(Child, ABC):
    """A Spark job that reads the orders."""

    @abstractmethod
    def start(self, bootstrap: str) -> None: ...

    @abstractmethod
    def batches(self) -> int:
        """Finished, so far as it has noted them."""

    @abstractmethod
    def outputs(self) -> int:
        """Changes as soon as a reader could see new rows of it."""

    @abstractmethod
    def position(self) -> int:
        """Offsets of the source that it is through with."""

    @abstractmethod
    def unfinished(self) -> str:
        """Of a job that is dead: what of its last batch was written and what was not, in words."""

    @abstractmethod
    def counts(self) -> Counts: ...


class PipelineJob(Job):
    """`holdfast pipeline run` on a definition that is written here."""

    def __init__(self, directory: Path, batch_records: int) -> None:
        super().__init__("pipeline", directory / "pipeline.log")
        self.directory = directory
        self.file = directory / DEFINITION_FILE
        self._batch_records = batch_records
        self._events = _Lines(directory / "home" / "log.jsonl")
        self._batches: dict[str, dict[str, Any]] = {}
        out = directory / "out"
        self._rows = {name: _Rows(out / name, "batch=*/*.parquet") for name in ("orders", "late", "totals")}

    def start(self, bootstrap: str) -> None:
        if not self.file.exists():
            self.file.write_text(definition_text(bootstrap, self._batch_records), encoding="utf-8")
        self.spawn([sys.executable, "-m", "holdfast.cli", "pipeline", "run", str(self.file)])

    def _seen(self) -> dict[str, dict[str, Any]]:
        """Batches by their range: one that is taken once more for a sink that was behind is the same."""
        for document in self._events.read():
            if document.get("event") == "batch":
                self._batches[json.dumps(document["range"], sort_keys=True)] = document
        return self._batches

    def batches(self) -> int:
        return len(self._seen())

    def outputs(self) -> int:
        return _count_files(self.directory / "out" / "orders", "batch=*")

    def unfinished(self) -> str:
        newest = {
            path.name: max((each.name for each in path.glob("batch=*")), default="")
            for path in sorted((self.directory / "out").iterdir())
        }
        behind = [name for name, batch in newest.items() if batch < newest["orders"]]
        if not behind:
            return "between two batches"
        others = "another output has" if len(behind) == 1 else f"{len(behind)} other outputs have"
        return f"in mid-batch: 'orders' has it, {others} not"

    def position(self) -> int:
        ends: dict[str, int] = {}
        for document in self._seen().values():
            for place, end in _ends(document["range"]):
                ends[place] = max(end, ends.get(place, 0))
        return sum(ends.values())

    def counts(self) -> Counts:
        routes = [document["routes"] for document in self._seen().values()]
        return Counts(
            output=self._rows["orders"].count(),
            dead_letter=sum(sum(route["dead_letter"].values()) for route in routes),
            duplicate=sum(route["duplicate"] for route in routes),
            late=self._rows["late"].count(),
            windows=self._rows["totals"].count(),
        )


class PlainJob(Job):
    """Structured Streaming as its guide shows it: Kafka's connector, foreachBatch, append."""

    def __init__(self, directory: Path, batch_records: int) -> None:
        super().__init__("plain Spark", directory / "plain.log")
        self.directory = directory
        self._batch_records = batch_records
        self._rows = _Rows(directory / "out" / "orders", "part-*.parquet")

    def start(self, bootstrap: str) -> None:
        errand = {"bootstrap": bootstrap, "directory": str(self.directory), "batch": self._batch_records}
        self.spawn([sys.executable, "-m", "holdfast.demo.plain", json.dumps(errand)])

    def batches(self) -> int:
        return _count_files(self.directory / "checkpoint" / "commits", "[0-9]*")

    def outputs(self) -> int:
        return _count_files(self.directory / "out" / "orders", "part-*.parquet")

    def unfinished(self) -> str:
        if _count_files(self.directory / "checkpoint" / "offsets", "[0-9]*") <= self.batches():
            return "between two batches"
        return "in mid-batch: 'orders' has it, the checkpoint has not"

    def position(self) -> int:
        numbers = [int(file.name) for file in (self.directory / "checkpoint" / "commits").glob("[0-9]*")]
        if not numbers:
            return 0
        text = (self.directory / "checkpoint" / "offsets" / str(max(numbers))).read_text(encoding="utf-8")
        return sum(json.loads(text.splitlines()[-1]).get(SOURCE, {}).values())

    def counts(self) -> Counts:
        return Counts(output=self._rows.count())


class _Rows:
    """The rows of a growing directory of Parquet files, by the numbers in them; each file is looked into once."""

    def __init__(self, directory: Path, pattern: str) -> None:
        self._directory = directory
        self._pattern = pattern
        self._counts: dict[Path, int] = {}

    def count(self) -> int:
        import pyarrow.parquet as pq

        for file in self._directory.glob(self._pattern):
            if file not in self._counts:
                self._counts[file] = pq.read_metadata(file).num_rows
        return sum(self._counts.values())


class _Lines:
    """The whole lines of a growing file of JSON, each read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def read(self) -> Iterator[dict[str, Any]]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return
        whole = text.rfind(b"\n") + 1
        self._read += whole
        for line in text[:whole].splitlines():
            with contextlib.suppress(ValueError):  # a line that a kill cut short, with the next one behind it
                yield json.loads(line)


def _count_files(directory: Path, pattern: str) -> int:
    return sum(1 for _ in directory.glob(pattern))


def _ends(document: Any) -> Iterator[tuple[str, int]]:
    """Where a batch's range ends, by partition."""
    from holdfast.pipeline.positions import BatchRange

    for place, span in BatchRange.from_json(document).spans.items():
        yield f"{place.topic}-{place.partition}", span.end

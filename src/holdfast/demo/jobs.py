"""The demo's Spark jobs: our pipeline, and the plain one that `--unsafe` puts beside it.

A job tells what it has done by the files it leaves, never by word of mouth: how many batches it has finished, how many
of its outputs anybody can see, how far it has come, and what it has written.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from holdfast.demo.orders import SOURCE, definition_text
from holdfast.demo.processes import Child

DEFINITION_FILE: Final = "orders.yaml"


class Counts(NamedTuple):
    """What a job has written so far; nothing where it does not tell."""

    output: int = 0
    dead_letter: int | None = None
    duplicate: int | None = None
    late: int | None = None
    windows: int | None = None


class Job(Protocol):
    name: str

    def start(self, bootstrap: str) -> None: ...

    @property
    def pid(self) -> int: ...

    def kill(self) -> int: ...

    def stop(self) -> None: ...

    def require_alive(self) -> None: ...

    def batches(self) -> int:
        """Finished, so far as it has noted them."""

    def outputs(self) -> int:
        """Changes as soon as a reader could see new rows of it."""

    def position(self) -> int:
        """Offsets of the source that it is through with."""

    def unfinished(self) -> str:
        """Of a job that is dead: what of its last batch was written and what was not, in words."""

    def counts(self) -> Counts: ...


class PipelineJob(Child):
    """`holdfast pipeline run` on a definition that is written here."""

    def __init__(self, directory: Path, batch_records: int) -> None:
        super().__init__("pipeline", directory / "pipeline.log")
        self.name = "pipeline"
        self.directory = directory
        self.file = directory / DEFINITION_FILE
        self._batch_records = batch_records
        self._log = directory / "pipeline.log"
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


class PlainJob(Child):
    """Structured Streaming as its guide shows it: Kafka's connector, foreachBatch, append."""

    def __init__(self, directory: Path, batch_records: int) -> None:
        super().__init__("plain Spark", directory / "plain.log")
        self.name = "plain Spark"
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

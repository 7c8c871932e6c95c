"""The pipeline's own directory: a lock, the plan of the batch under way, its stage, and the log.

    lock            held while a copy runs; its content is that process's id
    plan.json       the newest batch: what it takes, and whether it is done; replaced atomically, flushed
    definition.json the definition that made the newest batch, without secrets; marks of those before it (`earlier`)
    stage/<label>/  the rows of a batch while it is under way; removed after it
    state/          what steps remember, in versions (`state.store`)
    aside/          which rows left the chain, batch by batch (`pipeline.aside`): what an audit asks for
    sinks.json      how far each sink had come (`engine.known_sinks`)
    log.jsonl       one line per batch
    spark.log       Spark's own words

Positions are in the sinks: losing the directory costs the batch under way, which is then read again, the state,
which is then missed and rebuilt from the source, and the proof of which rows were let go.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

from holdfast.atomic import read_named, write_atomically
from holdfast.pipeline.core.failures import AlreadyRunning
from holdfast.pipeline.definition.fingerprint import EARLIER, marks_of
from holdfast.pipeline.engine.planning import Plan
from holdfast.pipeline.positions import to_text
from holdfast.real import RealFileSystem, RealLock

PLAN_VERSION: Final = 1
LOCK_ATTEMPTS: Final = 10
LOCK_PAUSE_S: Final = 0.05
LOG_BYTES_MAX: Final = 64 * 1024 * 1024
"""The log is set aside as log.jsonl.1 when it has grown to this: two of them are kept at most."""


class Home:
    """The directory of one pipeline. Used within `with`, by one process at a time."""

    def __init__(self, path: str, pipeline: str) -> None:
        self.path = os.path.abspath(path)
        self.pipeline = pipeline
        self.attempt = uuid.uuid4().hex[:12]
        """Unique to this run: marks what it wrote."""
        self._files = RealFileSystem()
        self._lock: RealLock | None = None
        self._batches = 0
        self._noted_definition: Mapping[str, Any] | None = None

    def __enter__(self) -> Self:
        os.makedirs(self.path, exist_ok=True)
        lock_path = os.path.join(self.path, "lock")
        self._lock = self._locked(lock_path)
        with open(lock_path, "w", encoding="ascii") as file:
            file.write(f"{os.getpid()}\n")
        shutil.rmtree(os.path.join(self.path, "stage"), ignore_errors=True)
        return self

    def _locked(self, lock_path: str) -> RealLock:
        """`holder` takes the lock for an instant to see whether it is free, so one refusal is not enough."""
        for _ in range(LOCK_ATTEMPTS):
            with contextlib.suppress(BlockingIOError):
                return self._files.lock(lock_path)
            time.sleep(LOCK_PAUSE_S)
        raise AlreadyRunning(
            f"pipeline {self.pipeline!r} is running already, as process {holder(self.path) or 'unknown'}, in "
            f"{self.path}: stop it first, or give this copy a name and a home of its own"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -------------------------------------------------------------------- the plan

    def note_plan(self, plan: Plan, fingerprint: str, *, is_done: bool = False) -> None:
        """Write down what the next batch takes, before any of it is read; and once more when it is done."""
        noted = {**plan.as_json(), "fingerprint": fingerprint, "is_done": is_done}
        text = to_text({"version": PLAN_VERSION, **noted})
        write_atomically(self._files, os.path.join(self.path, "plan.json"), text.encode("utf-8"))

    def unfinished_plan(self, fingerprint: str) -> Plan | None:
        """The plan of a batch that was not finished under the same definition; anything unreadable is no plan."""
        try:
            document = json.loads(read_named(os.path.join(self.path, "plan.json")))
            if (
                document["version"] != PLAN_VERSION
                or document["is_done"]
                or document["fingerprint"] != fingerprint
            ):
                return None
            return Plan.from_json(document)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    # -------------------------------------------------------------------- the definition

    def note_definition(self, canonical: Mapping[str, Any]) -> None:
        """Keep what the newest batch was made by, and marks of those before it; written only when it differs."""
        if self._noted_definition is canonical:
            return
        kept = self._kept()
        if kept != {**canonical, EARLIER: (kept or {}).get(EARLIER)}:
            earlier = dict((kept or {}).get(EARLIER) or {})
            for each in (self.kept_definition(), canonical):
                earlier |= {} if each is None else marks_of(each)
            path = os.path.join(self.path, "definition.json")
            text = to_text({**canonical, EARLIER: earlier})
            write_atomically(self._files, path, text.encode("utf-8"))
        self._noted_definition = canonical

    def forget_definition(self) -> None:
        """No sink knows the pipeline any more."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, "definition.json"))
        self._noted_definition = None

    def kept_definition(self) -> dict[str, Any] | None:
        """The canonical definition that made the newest batch; anything unreadable is none."""
        kept = self._kept()
        return None if kept is None else {name: each for name, each in kept.items() if name != EARLIER}

    def _kept(self) -> dict[str, Any] | None:
        try:
            document = json.loads(read_named(os.path.join(self.path, "definition.json")))
        except (FileNotFoundError, ValueError):
            return None
        return document if isinstance(document, dict) and "source" in document else None

    # -------------------------------------------------------------------- the stage

    def new_stage(self) -> tuple[str, str]:
        """A label for an attempt at a batch, and an empty directory for its rows."""
        label = self.new_label()
        directory = os.path.join(self.path, "stage", label)
        os.makedirs(directory)
        return label, directory

    def new_label(self) -> str:
        self._batches += 1
        return f"{self.attempt}-{self._batches}"

    def remove_stage(self, label: str) -> None:
        shutil.rmtree(os.path.join(self.path, "stage", label), ignore_errors=True)

    # -------------------------------------------------------------------- the log

    def log(self, document: Mapping[str, Any]) -> None:
        """Add one line of JSON to the log."""
        path = os.path.join(self.path, "log.jsonl")
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n")
            size = file.tell()
        if size > LOG_BYTES_MAX:
            os.replace(path, path + ".1")


def holder(path: str) -> int | None:
    """The process that runs the pipeline of this home, if one does."""
    lock_path = os.path.join(path, "lock")
    if not os.path.exists(lock_path):
        return None
    try:
        RealFileSystem().lock(lock_path).release()
    except BlockingIOError:
        with open(lock_path, encoding="ascii", errors="replace") as file:
            text = file.read().strip()
        return int(text) if text.isdigit() else None
    return None


def last_logged(path: str) -> dict[str, Any] | None:
    """The newest line of the log that is about a batch."""
    try:
        with open(os.path.join(path, "log.jsonl"), "rb") as file:
            file.seek(max(0, os.path.getsize(file.name) - 256 * 1024))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            document: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        if document.get("event") == "batch":
            return document
    return None

"""What an audit has proven so far, kept in a file so that the next one costs what is new.

Only an audit that proved everything in its scope moves it. It stands for one definition: another fingerprint begins
anew. Positions name a topic by its id, so those of a topic that was created again say nothing of the new one. The file
is the auditor's own; losing it costs one full audit. Beside it lies what audits hand on to the next ones
(`stateful.carried`), each in a file that is named by its digest: one that is missing or another costs a full audit too.

Some earlier checkpoints are kept as well, the fewer the older they are. Where batches of files were merged or changed,
the next audit goes back to the newest checkpoint before them.

What the old part of a sink looks like from outside, cheaply: enough to notice that it is no longer what was proven.

A mark says "this was so when it was proven", in a few bytes for a batch, a file or a table. The next audit takes the
marks again; where an old one is missing or different, somebody changed what was proven (or merged it, which is allowed
and looks the same), and that audit looks at everything. A mark never accuses and never acquits: it says where to look.

What is seen:

- Parquet: size, times, number and name of every file of every batch.
- Delta, on a file system: the same of every file, and new versions that take files or rows away.
- PostgreSQL, append: the table's storage and number, rows below the proven positions, and how often rows were changed
  or deleted, as the server counts it.
- Kafka: the topic's id, where its logs begin, and that they did not get shorter.

What cannot be seen without reading is said to be unseen: tables that are upserted (their old rows change by design),
Delta in an object store. Marks are taken before an audit reads, so that a change while it reads shows in the next.
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from holdfast.atomic import write_atomically
from holdfast.audit.model import Document, Fate, Kind, Report
from holdfast.audit.sinks.files import place_of
from holdfast.audit.sinks.kafka import own_settings
from holdfast.audit.sinks.parquet import BATCH
from holdfast.errors import HoldfastError, UsageError
from holdfast.pipeline.definition.model import (
    DeltaSink,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    SinkDefinition,
)
from holdfast.pipeline.definition.naming import dead_letter_sink
from holdfast.pipeline.positions import Place
from holdfast.reader.cluster import Cluster
from holdfast.reader.errors import TopicMissing
from holdfast.reader.model import TopicPartition
from holdfast.real import RealFileSystem

MERGED: Final = "it keeps one row for each key: rows that were proven may be replaced by newer ones"
DELTA_LOG: Final = "_delta_log"
CARRIED: Final = re.compile(r"([0-9a-f]{64})\.carried")
GROWS: Final = ">="
"""A mark that begins so may only grow."""
END_OF: Final = "end of "
BELOW: Final = "rows below "
"""A mark whose name begins so is about positions: when they move, another takes its place."""


@dataclass(frozen=True)
class Seen:
    """The marks of one sink, or why there are none."""

    marks: Mapping[str, str] = field(default_factory=dict)
    unseen: str = ""
    """Why its old part is not looked at again by an incremental audit; nothing: it is."""


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Which of the old marks are not there any more, or are others."""
    return [name for name, mark in before.items() if not _still(mark, now.get(name, ""))]


def _still(before: str, now: str) -> bool:
    if before.startswith(GROWS) and now.startswith(GROWS):
        return int(now.removeprefix(GROWS)) >= int(before.removeprefix(GROWS))
    return before == now


def kept(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """What to remember of an audit that began with `before` and ended with `after`: what stood at the beginning as it
    was then, what came meanwhile as it is now."""
    return {**after, **{name: mark for name, mark in before.items() if not name.startswith(BELOW)}}


def take(
    definition: PipelineDefinition,
    sink: SinkDefinition,
    settings: Mapping[str, str],
    proven: Mapping[Place, int],
) -> Seen:
    """The marks of a sink, of a definition with its secrets expanded. What fails is unseen, and says why."""
    try:
        match sink:
            case ParquetSink():
                return Seen(_marks(place_of(definition, sink.path), _batch_of))
            case DeltaSink():
                return _delta(definition, sink)
            case PostgresSink():
                return _postgres(sink, proven)
            case KafkaSink():
                return _kafka(sink, settings)
    except (OSError, HoldfastError) as error:
        return Seen(unseen=str(error))


def take_all(
    definition: PipelineDefinition, settings: Mapping[str, str], proven: Mapping[Place, int]
) -> dict[str, Seen]:
    """Of every sink of a pipeline, and of its dead letters."""
    sinks = (*definition.sinks, dead_letter_sink(definition))
    return {sink.name: take(definition, sink, settings, proven) for sink in sinks}


# ------------------------------------------------------------------------ files


def _files(root: str, below: str = "") -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(os.path.join(root, below)) as entries:
        for entry in entries:
            path = os.path.join(below, entry.name)
            if entry.is_dir(follow_symlinks=False):
                yield from _files(root, path)
            else:
                yield path, entry.stat(follow_symlinks=False)


def _marks(root: str, name_of: Callable[[str], str]) -> dict[str, str]:
    """By name, what the files that go by it look like from outside; nothing: a file has no mark."""
    lines: dict[str, list[str]] = {}
    for path, found in _files(root):
        name = name_of(path)
        if name:
            times = f"{found.st_mtime_ns}\0{found.st_ctime_ns}\0{found.st_ino}"
            line = f"{path.removeprefix(name + os.sep)}\0{found.st_size}\0{times}"
            lines.setdefault(name, []).append(line)
    texts = {name: "\n".join(sorted(each)) for name, each in lines.items()}
    return {
        name: hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:24]
        for name, text in texts.items()
    }


def _batch_of(path: str) -> str:
    """Of a sink of batches: its directory appears whole, and never changes afterwards."""
    name = path.partition(os.sep)[0]
    return name if name.startswith("batch=") else ""


def _data_or_version(path: str) -> str:
    """Of a Delta table: not the ledger, which has its own proof, and not the pointer to the newest checkpoint."""
    is_other = path.startswith("_hf" + os.sep) or os.path.basename(path) == "_last_checkpoint"
    return "" if is_other else path


def _delta(definition: PipelineDefinition, sink: DeltaSink) -> Seen:
    if sink.mode != "append":
        return Seen(unseen=MERGED)
    root = place_of(definition, sink.path)
    if "://" in root:
        return Seen(unseen="its files are not on a file system of this machine")
    marks = _marks(root, _data_or_version)
    versions = [path for path in marks if path.startswith(DELTA_LOG + os.sep) and path.endswith(".json")]
    return Seen({**marks, "removals": str(sum(_removals(os.path.join(root, path)) for path in versions))})


def _removals(path: str) -> int:
    """How many files, or rows of files, a version of a table takes away."""
    count = 0
    with open(path, encoding="utf-8") as file:
        for line in file:
            if '"remove"' not in line and '"deletionVector"' not in line:
                continue
            try:
                action = json.loads(line)
            except ValueError:
                count += 1  # not our place to judge: it is no longer what it was
                continue
            count += "remove" in action or bool((action.get("add") or {}).get("deletionVector"))
    return count


# ------------------------------------------------------------------------ servers


def _postgres(sink: PostgresSink, proven: Mapping[Place, int]) -> Seen:
    if sink.mode != "append":
        return Seen(unseen=MERGED)
    if sink.rows:
        return Seen(unseen="it has rows of a step, which name no offset")
    import psycopg

    try:
        with psycopg.connect(sink.url, connect_timeout=10, application_name="holdfast audit") as connection:
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            found = connection.execute(
                "SELECT c.oid, pg_relation_filenode(c.oid), s.n_tup_upd, s.n_tup_del FROM pg_class c "
                "JOIN pg_namespace n ON n.oid = c.relnamespace "
                "LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid WHERE n.nspname = %s AND c.relname = %s",
                (sink.schema_name, sink.table),
            ).fetchone()
            if found is None:
                return Seen({"table": "none"})
            marks = dict(zip(("table", "storage", "changed", "deleted"), map(str, found), strict=True))
            marks |= _counts_below(connection, sink, proven)
            return Seen(marks)
    except psycopg.Error as error:
        return Seen(unseen=str(error).strip())


def _counts_below(connection: Any, sink: PostgresSink, proven: Mapping[Place, int]) -> dict[str, str]:
    """By partition, how many rows the table has of what is proven, and which transactions wrote them.

    One pass over the table, however many partitions there are. The server's own count of changes comes seconds late.
    """
    from psycopg import sql

    places = sorted(proven)
    if not places:
        return {}
    statement = sql.SQL(
        "SELECT p.topic, p.number, count(*) || ' by ' || sum(t.xmin::text::bigint) "
        "FROM unnest(%s::text[], %s::int[], %s::bigint[]) AS p(topic, number, below) "
        "JOIN {} AS t ON t._hf_topic = p.topic AND t._hf_partition = p.number AND t._hf_offset < p.below GROUP BY 1, 2"
    ).format(sql.Identifier(sink.schema_name, sink.table))
    parameters = [
        [each.topic for each in places],
        [each.partition for each in places],
        [*map(proven.get, places)],
    ]
    found = {(topic, number): written for topic, number, written in connection.execute(statement, parameters)}
    return {
        f"{BELOW}{topic}-{number}@{proven[place]}": found.get((topic, number), "0")
        for place in places
        for topic, _, number in [place]
    }


def _kafka(sink: KafkaSink, settings: Mapping[str, str]) -> Seen:
    with Cluster(own_settings(settings, sink.bootstrap, sink.settings)) as cluster:
        try:
            topic = cluster.topics([sink.topic])[sink.topic]
        except TopicMissing:
            return Seen({"topic": "none"})
        places = [TopicPartition(sink.topic, number) for number in topic.partitions]
        starts = cluster.offsets(places, "earliest")
        ends = cluster.offsets(places, "last-stable")
    begins = {f"start of {each.partition}": str(starts[each].offset) for each in places}
    stands = {f"{END_OF}{each.partition}": f"{GROWS}{ends[each].offset}" for each in places}
    return Seen({"topic": str(topic.topic_id), **begins, **stands})


def topic_ends(seen: Seen) -> dict[int, int]:
    """Where the partitions of a topic ended when its marks were taken; nothing for other sinks."""
    return {
        int(name.removeprefix(END_OF)): int(mark.removeprefix(GROWS))
        for name, mark in seen.marks.items()
        if name.startswith(END_OF) and mark.startswith(GROWS)
    }


# ---------------------------------------------------------------------------- proven


STATE_VERSION: Final = 1
STATE_KIND: Final = "holdfast-audit-state"

Marks = Mapping[str, Mapping[str, str]]
"""By sink, what its old part looked like from outside (`holdfast.audit.proven`)."""


@dataclass(frozen=True)
class TopicStart(Document):
    """From where a sink that is a topic has to be read."""

    offsets: Mapping[int, int]
    """By partition: records below are of what is proven."""
    since: Mapping[Place, int]
    """Up to where they hold the source: what stands behind `offsets` must not be of that again."""


Topics = Mapping[str, TopicStart]
"""By sink."""


@dataclass(frozen=True)
class Checkpoint(Document):
    """From where an audit may go on."""

    positions: Mapping[Place, int] = field(default_factory=dict)
    topics: Topics = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    """By sink, the newest entry of its ledger below the positions."""
    carried: str = ""
    """The digest of what the audit has handed on; nothing: it has handed on nothing."""
    lacks: str = ""
    """Why none can go on from here all the same."""
    records: int = 0
    fates: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Proven(Document):
    """Up to where everything is accounted for."""

    subject: str
    fingerprint: str = ""
    positions: Mapping[Place, int] = field(default_factory=dict)
    """In each partition, every offset below was looked at and is accounted for."""
    marks: Marks = field(default_factory=dict)
    topics: Topics = field(default_factory=dict)
    records: int = 0
    """Looked at since the last full audit began, that one included."""
    fates: Mapping[str, int] = field(default_factory=dict)
    at_ms: int = 0
    runs_since_full: int = 0
    checkpoints: tuple[Checkpoint, ...] = ()
    """Ascending; the last is where the positions are."""
    secret: str = ""
    """The auditor's own, for digests of rows that are looked at again."""
    certificate: str = ""
    """The hash of the newest certificate: whoever keeps the state keeps the end of the chain."""

    def as_json(self) -> dict[str, Any]:
        return {"kind": STATE_KIND, "version": STATE_VERSION, **super().as_json()}


def advanced(before: Proven | None, report: Report, marks: Marks, certificate: str = "") -> Proven:
    """After a report that proved its scope, on top of what it began with; nothing: it began at the start."""
    if report.verdict.exit_code:
        raise UsageError(f"an audit that is {report.verdict} proves nothing")
    positions = {each.place: each.end for each in report.partitions}
    records = sum(each.kinds.get(Kind.RECORD, 0) for each in report.partitions)
    fates = {
        str(fate): report.total(fate) for fate in Fate if fate is not Fate.PENDING and report.total(fate)
    }
    before = before or Proven(report.subject, runs_since_full=-1)
    return replace(
        before,
        fingerprint=report.fingerprint,
        positions={**before.positions, **positions},
        marks=marks,
        topics={},
        records=before.records + records,
        fates=dict(Counter(before.fates) + Counter(fates)),
        at_ms=report.started_ms,
        runs_since_full=before.runs_since_full + 1,
        certificate=certificate or before.certificate,
    )


SPREAD: Final = 4
"""Of checkpoints that are between so many times and its square as far back as the next, one is kept: the oldest."""
CHECKPOINTS_MAX: Final = 8


def spread(checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Those to keep: the newest, and of those before it the fewer the older they are."""
    *earlier, newest = checkpoints
    oldest: dict[int, Checkpoint] = {}
    for each in reversed(earlier):
        oldest[int(math.log(max(newest.records - each.records, 1), SPREAD))] = each
    return (*sorted(oldest.values(), key=lambda each: each.records)[1 - CHECKPOINTS_MAX :], newest)


def first_changed(before: Mapping[str, str], now: Mapping[str, str]) -> int:
    """Of a sink of batches in directories: the lowest entry whose batch is not as it was. -1: it is none such."""
    changed = set(changes(before, now))
    first = 0
    for name in sorted(before) if all(map(BATCH.fullmatch, before)) else ():
        if name in changed:
            return first
        first = int(name.removeprefix("batch=")) + 1
    return -1


class Handed:
    """What audits have handed on, by digest: in files beside the state, or in memory."""

    def __init__(self, state_path: str | None) -> None:
        self._path = None if state_path is None else os.path.abspath(state_path)
        self._held: dict[str, bytes] = {}

    def put(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        if self._path is None:
            self._held[digest] = data
        else:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            write_atomically(RealFileSystem(), self._file(digest), data)
        return digest

    def get(self, digest: str) -> bytes | None:
        """Nothing: it is not there any more, or it is not what was written."""
        if self._path is None:
            return self._held.get(digest)
        try:
            with open(self._file(digest), "rb") as file:
                data = file.read()
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == digest else None

    def keep(self, digests: Collection[str]) -> None:
        """Forget all others."""
        self._held = {name: data for name, data in self._held.items() if name in digests}
        if self._path is None:
            return
        mine = f"{self._path}."
        for path in glob.glob(f"{glob.escape(self._path)}.*.carried"):
            found = CARRIED.fullmatch(path.removeprefix(mine))
            if found and found[1] not in digests:
                with suppress(FileNotFoundError):
                    os.unlink(path)

    def _file(self, digest: str) -> str:
        return f"{self._path}.{digest}.carried"


def read_state(path: str) -> Proven | None:
    """What the file says; nothing when there is none. A file that is no state is an error: it may be somebody's."""
    try:
        with open(path, "rb") as file:
            document = json.loads(file.read())
        if document["kind"] != STATE_KIND:
            raise ValueError("it is of another kind")
        if document["version"] != STATE_VERSION:
            raise ValueError(f"its version is {document['version']}, this holdfast reads {STATE_VERSION}")
        return Proven.from_json(document)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path} does not hold the state of an audit ({error}): name another file, or remove it to begin anew"
        ) from error


def write_state(path: str, proven: Proven) -> None:
    whole = os.path.abspath(path)
    os.makedirs(os.path.dirname(whole), exist_ok=True)
    text = json.dumps(proven.as_json(), ensure_ascii=False, separators=(",", ":"))
    write_atomically(RealFileSystem(), whole, text.encode("utf-8", "backslashreplace") + b"\n")
    os.chmod(whole, 0o600)  # the key of the digests that the next audit goes on from is in it

"""File sinks on a disk that forgets what was not flushed.

`Forgetful` writes down every change and every flush, in whichever process it happens, to a journal. `lose_power` then
does to a copy of the table what a power cut could do at any moment of that history, at its worst: content that was not
flushed is gone, and so is every name whose directory was not flushed after it was made or moved.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

from holdfast.pipeline.definition.model import DeltaSink, ParquetSink
from holdfast.pipeline.sinks.base import SinkContext
from holdfast.pipeline.sinks.delta import DeltaSinkWriter
from holdfast.pipeline.sinks.delta_upsert import DeltaUpsertWriter
from holdfast.pipeline.sinks.files import Disk
from holdfast.pipeline.sinks.parquet import ParquetSinkWriter, ParquetStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Forgetful(Disk):
    """The real disk, with a journal; it goes to Spark's workers as it is."""

    def __init__(self, journal: str) -> None:
        self._journal = journal

    def _note(self, *words: str) -> None:
        with open(self._journal, "a", encoding="utf-8") as file:
            file.write("\t".join(words) + "\n")

    def make_directory(self, path: str) -> None:
        super().make_directory(path)
        self._note("make", path)

    def open_new(self, path: str) -> IO[bytes]:
        self._note("create", path)
        return super().open_new(path)

    def flush_file(self, path: str) -> None:
        super().flush_file(path)
        self._note("flush", path)

    def flush_directory(self, path: str) -> None:
        super().flush_directory(path)
        self._note("flush-names", path, *sorted(os.listdir(path)))

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self._note("rename", old, new)

    def moments(self) -> Iterator[list[list[str]]]:
        """The journal up to each of its lines."""
        lines = [line.split("\t") for line in Path(self._journal).read_text().splitlines()]
        for end in range(len(lines) + 1):
            yield lines[:end]


@dataclass
class File:
    created: int
    """Which line of the journal made it: that is which file it is, whatever its name."""
    is_flushed: bool = False


@dataclass
class Directory:
    seen: dict[str, File | Directory] = field(default_factory=dict)
    held: dict[str, File | Directory] = field(default_factory=dict)
    """What a power cut leaves of it."""


def replayed(history: list[list[str]], table: str) -> Directory:
    """The table's directory as programs see it and as the disk holds it."""
    root = Directory()

    def walk(path: str) -> Directory:
        at = root
        for name in path[len(table) :].strip("/").split("/"):
            if name:
                at = at.seen.setdefault(name, Directory())  # type: ignore[assignment]
        return at

    for line, words in enumerate(history):
        # A table's own parents are durable before anything in it counts.
        if not all(path == table or path.startswith(table + "/") for path in words[1:2]):
            continue
        parent, name = os.path.split(words[1])
        match words[0], words[2:]:
            case "make", _:
                walk(words[1])
            case "create", _:
                walk(parent).seen[name] = File(line)
            case "flush", _:
                # One that `deltalake` made is in no journal.
                walk(parent).seen.setdefault(name, File(line)).is_flushed = True  # type: ignore[union-attr]
            case "rename", [new]:
                node = walk(parent).seen.pop(name)
                walk(os.path.dirname(new)).seen[os.path.basename(new)] = node
            case "flush-names", _:
                directory = walk(words[1])
                directory.held = dict(directory.seen)
    return root


def files_in(directory: Directory, *, held: bool, below: str = "") -> Iterator[tuple[str, File]]:
    for name, node in (directory.held if held else directory.seen).items():
        path = f"{below}/{name}"
        if isinstance(node, File):
            yield path, node
        else:
            yield from files_in(node, held=held, below=path)


def after_power_loss(history: list[list[str]], whole: list[list[str]], table: str, copy: str) -> None:
    """The table as found when the power is back: `copy`."""
    where = {file.created: path for path, file in files_in(replayed(whole, table), held=False)}
    shutil.rmtree(copy, ignore_errors=True)
    os.makedirs(copy)
    for path, file in files_in(replayed(history, table), held=True):
        os.makedirs(os.path.dirname(copy + path), exist_ok=True)
        if file.is_flushed:
            shutil.copyfile(table + where[file.created], copy + path)
        else:
            Path(copy + path).write_bytes(b"")


def test_a_parquet_batch_survives_power_loss_as_a_whole_or_not_at_all(
    tmp_path: Path, rows: Any, batches: Any, context: SinkContext, spark: SparkSession
) -> None:
    table, copy = str(tmp_path / "table"), str(tmp_path / "copy")
    disk = Forgetful(str(tmp_path / "journal"))
    sink, cut = (
        ParquetSinkWriter(ParquetSink(table, partition_by=("name",)), "shop", disk=disk),
        batches("parquet"),
    )
    sink.open(context, spark)
    try:
        values = [{"id": at, "name": f"n{at % 2}"} for at in range(4)]
        cut.write(sink, cut.at(0, 4), rows(values).repartition(2))
        acknowledged = len(list(disk.moments())) - 1
        cut.write(sink, cut.at(4, 8), rows(values, start=4).repartition(2))
    finally:
        sink.close()
    found = set()
    whole = list(disk.moments())[-1]
    for at, history in enumerate(disk.moments()):
        after_power_loss(history, whole, table, copy)
        store = ParquetStore("parquet", "shop", copy)
        entries = list(store.entries())
        offsets = sorted(row["_hf"]["offset"] for row in read(copy))
        assert offsets == list(range(4 * len(entries)))
        assert at < acknowledged or len(entries) >= 1
        found.add(len(entries))
    assert found == {0, 1, 2}
    assert len(entries) == 2


def read(path: str) -> list[Any]:
    if not any(name.startswith("batch=") for name in os.listdir(path)):
        return []
    dataset = ds.dataset(path, format="parquet", partitioning="hive")
    return list(dataset.to_table(columns=["_hf"]).to_pylist()) if dataset.files else []


def test_a_sink_that_forgets_to_flush_is_found_out(
    tmp_path: Path, rows: Any, batches: Any, context: SinkContext, spark: SparkSession
) -> None:
    """The test above can fail."""

    class Careless(Forgetful):
        def flush_file(self, path: str) -> None:
            if not path.endswith(".parquet"):
                super().flush_file(path)

    table, copy = str(tmp_path / "table"), str(tmp_path / "copy")
    disk = Careless(str(tmp_path / "journal"))
    sink, cut = ParquetSinkWriter(ParquetSink(table), "shop", disk=disk), batches("parquet")
    sink.open(context, spark)
    try:
        cut.write(sink, cut.at(0, 2), rows([{"id": 1}, {"id": 2}]))
    finally:
        sink.close()
    whole = list(disk.moments())[-1]
    after_power_loss(whole, whole, table, copy)
    assert ParquetStore("parquet", "shop", copy).last_entry() is not None
    with pytest.raises(Exception, match="Parquet"):
        read(copy)


@pytest.mark.parametrize(
    ("kind", "words"), [(DeltaSinkWriter, {}), (DeltaUpsertWriter, {"mode": "upsert", "key": ("id",)})]
)
def test_files_of_a_delta_table_are_durable_before_the_commit_that_names_them(
    kind: type[DeltaSinkWriter],
    words: dict[str, Any],
    tmp_path: Path,
    rows: Any,
    batches: Any,
    context: SinkContext,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = str(tmp_path / "table")
    disk = Forgetful(str(tmp_path / "journal"))
    sink, cut = kind(DeltaSink(table, **words), "shop"), batches("delta")
    sink.ledger.disk = disk
    sink.open(context, spark)
    honest = DeltaSinkWriter.commit_actions
    named: list[int] = []

    def watched(*arguments: Any) -> bool:
        history = list(disk.moments())[-1]
        files = files_in(replayed(history, table), held=True)
        durable = {path for path, file in files if file.is_flushed}
        wanted = {f"/{action.path}" for action in arguments[2]}
        assert wanted <= durable
        assert sum(path.startswith("/_hf/") for path in durable) == len(named) + 1
        named.append(len(wanted))
        return honest(*arguments)

    monkeypatch.setattr(DeltaSinkWriter, "commit_actions", watched)
    cut.write(sink, cut.at(0, 2), rows([{"id": 1}, {"id": 2}]))
    cut.write(sink, cut.at(2, 3), rows([{"id": 2}], start=2))
    assert [count > 0 for count in named] == [True, True]
    last = list(disk.moments())[-1]
    version = DeltaTable(table).version()
    assert ["flush", f"{table}/_delta_log/{version:020d}.json"] in last
    assert [each[:2] for each in last if each[0] != "remove"][-1] == ["flush-names", f"{table}/_delta_log"]

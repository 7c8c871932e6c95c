"""The golden pipelines, unpacked beside their broker, for tests with Spark and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.golden.opening import GENERATIONS, PACKED, broker_at, expected_of, unpack

from holdfast.audit.model import Report
from holdfast.audit.pipeline_audit import audit_pipeline
from holdfast.pipeline.definition.loading import Loaded, load_pipeline
from holdfast.real import RealClock

ARCHIVES = [path for generation in GENERATIONS for path in generation.glob(f"pipelines{PACKED}")]


def name_of(archive: Path) -> str:
    return archive.parent.name


class Pipelines(NamedTuple):
    bootstrap_servers: str
    directory: Path
    expected: Any

    def load(self, name: str) -> Loaded:
        return load_pipeline(str(self.directory / f"{name}.yaml"))

    def audit(self, name: str) -> Report:
        return audit_pipeline(self.load(name).definition, bootstrap=self.bootstrap_servers)

    def rows(self, path: str) -> list[dict[str, Any]]:
        """All rows of a Parquet sink or of one of its batches, read without any code of ours."""
        import pyarrow.parquet as pq

        files = sorted((self.directory / path).rglob("part-*.parquet"))
        return [row for file in files for row in pq.read_table(file, partitioning=None).to_pylist()]

    def delta_rows(self, path: str) -> list[dict[str, Any]]:
        from deltalake import DeltaTable

        rows: list[dict[str, Any]] = (
            DeltaTable(str(self.directory / path)).to_pyarrow_dataset().to_table().to_pylist()
        )
        return rows


@contextmanager
def opened(archive: Path, directory: Path) -> Iterator[Pipelines]:
    unpack(archive, directory)
    expected = expected_of(archive)
    with broker_at(
        RealClock(),
        str(directory / "data"),
        boot_id=expected["boot_id"],
        seed=4711,
        settings=expected["settings"],
    ) as broker:
        yield Pipelines(broker.bootstrap_servers, directory, expected)


def restore(url: str, directory: Path) -> None:
    """The tables of the golden database."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute((directory / "postgres.sql").read_text("utf-8").encode())

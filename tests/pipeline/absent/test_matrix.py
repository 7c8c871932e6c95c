"""docs/ABSENT-PIPELINES.md says what happens to whatever a pipeline misses, and each of its cells is tried here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.absent.matrix import written
from tests.pipeline.absent.matrix import DOCUMENT, cell, table, written_cell
from tests.pipeline.absent.trials import MOMENTS, THINGS
from tests.pipeline.absent.world import Worlds

START, RUNNING = MOMENTS
BY_NAME = {thing.name: thing for thing in THINGS}
SAMPLE = (
    ("`state/versions/`", "older", START),
    ("Parquet: a file of rows", "missing", START),
    ("Delta: a file of rows", "missing", START),
    ("PostgreSQL: the table", "empty", START),
    ("Kafka: the topic", "another's", START),
    ("Parquet: the directory", "missing", RUNNING),
)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    with Worlds(tmp_path_factory.mktemp("worlds")) as made:
        yield made


@pytest.mark.check
def test_cells_of_the_document_are_what_happens(worlds: Worlds) -> None:
    found = {(name, way, moment): cell(worlds, BY_NAME[name], way, moment) for name, way, moment in SAMPLE}
    assert found == {
        (name, way, moment): written_cell(BY_NAME[name], way, moment) for name, way, moment in SAMPLE
    }


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("moment", MOMENTS)
def test_every_cell_of_the_document_is_what_happens(worlds: Worlds, moment: str) -> None:
    assert written(moment, DOCUMENT) == table(worlds, moment), (
        "python -m tests.pipeline.absent.matrix writes them anew"
    )


def test_what_people_meet_is_noticed() -> None:
    """A lost disk, an older copy, a dropped table. Retention empties topics every day, and nobody's tool a commit."""
    cells = {
        (thing.name, way)
        for thing in THINGS
        for way in ("missing", "empty", "older", "unreadable")
        if any("not noticed" in written_cell(thing, way, moment) for moment in MOMENTS)
    }
    assert cells <= {
        ("Kafka: the topic", "empty"),
        ("the dead letter topic", "empty"),
        ("Delta: the newest commit", "empty"),
        ("Delta: a commit before it", "empty"),
    }

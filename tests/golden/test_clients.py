"""What our clients of earlier versions left: a state, a database, retries that wait; each goes on where it was."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.golden import clients
from tests.golden.opening import GENERATIONS, PACKED, broker_at, expected_of, unpack

from holdfast.client import changelog
from holdfast.client.dead_letter_dialects import read_failure
from holdfast.reader import read
from holdfast.real import RealClock

ARCHIVES = [path for generation in GENERATIONS for path in generation.glob(f"clients{PACKED}")]


class Scene(NamedTuple):
    bootstrap_servers: str
    directory: Path
    expected: Any

    def rows(self, topic: str) -> list[dict[str, Any]]:
        """Everything committed in a topic."""
        return [row for batch in read(self.bootstrap_servers, topic) for row in batch.to_pylist()]


@pytest.fixture(params=ARCHIVES, ids=lambda archive: archive.parent.name)
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    unpack(request.param, tmp_path)
    expected = expected_of(request.param)
    with broker_at(
        RealClock(),
        str(tmp_path / "data"),
        boot_id=expected["boot_id"],
        seed=4711,
        settings=expected["settings"],
    ) as broker:
        yield Scene(broker.bootstrap_servers, tmp_path, expected)


@pytest.mark.parametrize("has_cache", [True, False], ids=["from-its-files", "from-its-changelog"])
def test_a_processor_goes_on_with_its_state(
    scene: Scene, has_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    created = changelog.StateCache._created

    def noted(cache: Any) -> Any:
        made.append(Path(cache._path))
        return created(cache)

    monkeypatch.setattr(changelog.StateCache, "_created", noted)
    if has_cache:
        # Files that slept for too long are not used: to them, no time has passed.
        monkeypatch.setattr(changelog, "_now_ms", lambda: 0)
    else:
        shutil.rmtree(scene.directory / "state")
    clients.fill(scene.bootstrap_servers, clients.READINGS, scene.expected["parts"] + 1)
    clients.process(scene.bootstrap_servers, scene.directory, clients.PER_PART)
    rows = scene.rows(f"{clients.READINGS}-totals")
    assert sorted((row["key"], row["value"]) for row in rows) == clients.totals(scene.expected["parts"] + 1)
    assert bool(made) is not has_cache


def test_a_database_goes_on_from_its_positions(scene: Scene) -> None:
    clients.fill(scene.bootstrap_servers, clients.BOOKINGS, scene.expected["parts"] + 1)
    clients.store(scene.bootstrap_servers, scene.directory, clients.PER_PART)
    with sqlite3.connect(scene.directory / "bookings.sqlite") as connection:
        found = [number for (number,) in connection.execute("select number from results order by number")]
    connection.close()
    assert found == list(range((scene.expected["parts"] + 1) * clients.PER_PART))


def test_retries_that_wait_are_tried_and_dead_letters_stay(scene: Scene) -> None:
    waiting = [number for number in clients.numbers(1) if number % 10 == 7]
    mailer = clients.Mailer(is_away=False)
    clients.consume(scene.bootstrap_servers, mailer, len(waiting))
    assert sorted(mailer.sent) == [(number, f"{clients.MAIL}-retry-0") for number in waiting]
    dead = [number for number in clients.numbers(1) if number % 10 == 3]
    assert sorted([*scene.expected["mailed"], *waiting, *dead]) == list(clients.numbers(1))
    letters = scene.rows(f"{clients.MAIL}-dlt")
    assert sorted(int(row["value"]) for row in letters) == dead
    for row in letters:
        failure = read_failure(tuple((each["key"], each["value"]) for each in row["headers"]))
        assert failure is not None
        assert (failure.group, failure.message) == ("mailers", "no such address")

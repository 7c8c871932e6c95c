"""A home of spools: one owner each, and none forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.client.spool.home import SpoolHome
from holdfast.errors import UsageError
from holdfast.real import RealFileSystem, RealRandomness


def home_in(path: Path) -> SpoolHome:
    return SpoolHome(RealFileSystem(), str(path), RealRandomness())


def test_a_spool_has_one_owner_at_a_time(tmp_path: Path) -> None:
    home = home_in(tmp_path / "spools")
    owned = home.create()
    assert home.take(owned.id) is None
    owned.lock.release()
    again = home.take(owned.id)
    assert again is not None
    again.lock.release()


def test_the_spools_of_the_dead_are_taken_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    home = home_in(tmp_path)
    alive, dead = home.create(), home.create()
    dead.lock.release()
    taken = list(home.take_abandoned())
    assert [owned.id for owned in taken] == [dead.id]
    for owned in (alive, *taken):
        owned.lock.release()


def test_a_removed_spool_is_gone(tmp_path: Path) -> None:
    home = home_in(tmp_path)
    owned = home.create()
    home.remove(owned)
    assert home.ids() == []
    assert home.take(owned.id) is None


def test_other_files_in_a_home_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    home = home_in(tmp_path)
    assert home.ids() == []
    assert list(home.take_abandoned()) == []


def test_a_file_in_place_of_the_home_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory", encoding="utf-8")
    with pytest.raises(UsageError, match="not a directory"):
        home_in(tmp_path / "file").create()

"""A home of spools: one owner each, and none forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.client.spool.home import OwnedSpool, SpoolHome
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


class EagerNeighbour(RealFileSystem):
    """Another process takes the first spool that is made here, the moment its directory is there."""

    def __init__(self, home: SpoolHome, *, removes: bool) -> None:
        self._home = home
        self._removes = removes
        self.taken: list[OwnedSpool] = []

    def make_directory(self, path: str) -> None:
        super().make_directory(path)
        if not self.taken:
            self.taken.extend(self._home.take_abandoned())
            if self._removes:
                for owned in self.taken:
                    self._home.remove(owned)


@pytest.mark.parametrize("removes", [False, True], ids=["kept", "removed"])
def test_a_new_spool_that_another_takes_for_a_dead_owners_is_left_to_it(
    tmp_path: Path, removes: bool
) -> None:
    neighbour = home_in(tmp_path)
    files = EagerNeighbour(neighbour, removes=removes)
    owned = SpoolHome(files, str(tmp_path), RealRandomness()).create()
    (other,) = files.taken
    assert owned.id != other.id
    assert sorted(neighbour.ids()) == sorted([owned.id] if removes else [owned.id, other.id])
    assert neighbour.take(owned.id) is None
    owned.lock.release()
    if not removes:
        other.lock.release()

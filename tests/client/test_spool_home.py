"""A home of spools: one owner each, and none forgotten."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.client.delivery import Waiting
from holdfast.client.spool.format import SpooledMessage
from holdfast.client.spool.groups import make_item
from holdfast.client.spool.home import OwnedSpool, SpoolHome
from holdfast.client.spool.store import SpoolStore
from holdfast.errors import UsageError
from holdfast.real import RealFileSystem, RealRandomness
from holdfast.testing.disk import SimulatedDisk


def take_abandoned(home: SpoolHome) -> list[OwnedSpool]:
    return [owned for owned in map(home.take, home.ids()) if owned is not None]


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
    taken = take_abandoned(home)
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
    assert take_abandoned(home) == []


def test_a_file_in_place_of_the_home_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory", encoding="utf-8")
    with pytest.raises(UsageError, match="not a directory"):
        home_in(tmp_path / "file").create()


def unmade(disk: SimulatedDisk, home: SpoolHome) -> None:
    """Neither the home nor what is above it is there."""


def begun_and_killed(disk: SimulatedDisk, home: SpoolHome) -> None:
    disk.make_directory("/var/lib")
    disk.kill()


def made_and_killed(disk: SimulatedDisk, home: SpoolHome) -> None:
    disk.prepare("/var/lib/app")
    disk.make_directory(home.path)
    disk.kill()


def created_and_killed(disk: SimulatedDisk, home: SpoolHome) -> None:
    disk.prepare(home.path)
    disk.make_directory(home.directory("0123456789abcdef"))
    disk.kill()


@pytest.mark.parametrize("path", ["/var/lib/app/spools", "/var/lib/app/spools/"])
@pytest.mark.parametrize("before", [unmade, begun_and_killed, made_and_killed, created_and_killed])
def test_what_is_stored_first_survives_a_loss_of_power_whoever_made_its_directories(
    before: Callable[[SimulatedDisk, SpoolHome], None], path: str
) -> None:
    for seed in range(20):
        disk = SimulatedDisk(seed=seed)
        disk.prepare("/var")
        home = SpoolHome(disk, path, RealRandomness())
        before(disk, home)
        home.make()
        owned = next(iter(take_abandoned(home)), None) or home.create()
        store = SpoolStore(disk, owned.directory)
        store.write([make_item(SpooledMessage("orders", 0, None, b"kept", (), 1, -1), Waiting())])
        disk.crash()
        groups, _ = SpoolStore(disk, owned.directory).read(0)
        assert [message.value for group in groups for message in group.messages] == [b"kept"]


def test_a_home_below_a_directory_that_may_not_be_read_is_used(tmp_path: Path) -> None:
    class Closed(RealFileSystem):
        def flush_directory(self, path: str) -> None:
            if path == str(tmp_path):
                raise PermissionError(errno.EACCES, "not for you", path)
            super().flush_directory(path)

    (tmp_path / "home").mkdir()
    home = SpoolHome(Closed(), f"{tmp_path}/home", RealRandomness())
    home.create().lock.release()
    with pytest.raises(UsageError, match="not for you"):
        SpoolHome(Closed(), f"{tmp_path}/new", RealRandomness()).create()


class EagerNeighbour(RealFileSystem):
    """Another process takes the first spool that is made here, the moment its directory is there."""

    def __init__(self, home: SpoolHome, *, removes: bool) -> None:
        self._home = home
        self._removes = removes
        self.taken: list[OwnedSpool] = []

    def make_directory(self, path: str) -> None:
        super().make_directory(path)
        if not self.taken:
            self.taken.extend(take_abandoned(self._home))
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

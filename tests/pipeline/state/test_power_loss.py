"""State on a disk that forgets what was not flushed, cut off at every moment of its history."""

from __future__ import annotations

import os
import random
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.pipeline.positions import Place, Position, Positions
from holdfast.pipeline.sinks.files import Disk
from holdfast.pipeline.state.segments import Segment, StepState
from holdfast.pipeline.state.store import StateStore, Version


@dataclass
class Lossy(Disk):
    """Keeps, beside the real disk, what a power cut would leave of it at its worst.

    Content counts once it is flushed, a name (and that it is gone) once its directory is. Whoever wrote a file, its
    content is not there before. Removals may become durable at once and in any order, with nothing flushed: those of
    names that end with one of `eager` do.
    """

    root: str
    eager: tuple[str, ...]
    content: dict[str, bytes] = field(default_factory=dict)
    """Flushed, by path."""
    names: set[str] = field(default_factory=set)
    pictures: list[dict[str, bytes]] = field(default_factory=list)
    """What would be found, after each act."""
    seen: list[dict[str, bytes]] = field(default_factory=list)
    """What another process would find there: the end of this one alone loses nothing."""

    def _picture(self) -> None:
        found = {
            path: self.content.get(path, b"")
            for path in self.names
            if os.path.isfile(path) or path in self.content
        }
        self.pictures.append({path: data for path, data in found.items() if self._reachable(path)})
        here = [os.path.join(folder, name) for folder, _, names in os.walk(self.root) for name in names]
        self.seen.append({path: Path(path).read_bytes() for path in here})

    def _reachable(self, path: str) -> bool:
        while path != self.root:
            if path not in self.names:
                return False
            path = os.path.dirname(path)
        return True

    def flush_file(self, path: str) -> None:
        super().flush_file(path)
        self.content[path] = Path(path).read_bytes()
        self._picture()

    def flush_directory(self, path: str) -> None:
        super().flush_directory(path)
        there = {os.path.join(path, name) for name in os.listdir(path)}
        self.names -= {name for name in self.names if os.path.dirname(name) == path and name not in there}
        self.names |= there
        self._picture()

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self.content[new] = self.content[old]
        self._picture()

    def remove(self, path: str) -> None:
        super().remove(path)
        if path.endswith(self.eager):
            self.names.discard(path)
        self._picture()


class Hurried(Disk):
    """For what nobody pulls the plug of."""

    def flush_file(self, path: str) -> None:
        return

    def flush_directory(self, path: str) -> None:
        return


def at(offset: int) -> Positions:
    return Positions({Place("orders", uuid.UUID(int=7), 0): Position(offset)})


def adopted(store: StateStore, untils: Sequence[int], label: str) -> Segment:
    directory = store.segment_dir(label, "totals")
    os.mkdir(directory)
    pq.write_table(
        pa.table({"_until": pa.array(untils, pa.int64())}), os.path.join(directory, "part.parquet")
    )
    segment = store.adopt(directory)
    assert segment is not None
    return segment


def lived(store: StateStore, disk: Lossy, chance: random.Random) -> list[tuple[int, int | None]]:
    """A life of the store; for each version how many pictures there were when it counted, and when it could go."""
    segments: list[Segment] = []
    born: dict[int, int] = {}
    gone: dict[int, int] = {}
    for number in range(1, 7):
        segments.append(adopted(store, [number, number + 10], f"a-{number}"))
        if chance.random() < 0.3:
            segments = segments[chance.randrange(len(segments)) :]
        store.publish(Version(number, at(number * 10), {}, {"totals": StepState("f", tuple(segments))}))
        born[number] = len(disk.pictures)
        if chance.random() < 0.3:
            continue
        kept = {number, *(each for each in born if each not in gone and chance.random() < 0.4)}
        for each in [each for each in born if each not in kept and each not in gone]:
            gone[each] = len(disk.pictures)
        store.gc([at(each * 10) for each in kept])
    return [(born[number], gone.get(number)) for number in sorted(born)]


def laid_out(picture: dict[str, bytes], root: str, copy: str) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    os.makedirs(copy)
    for path, data in picture.items():
        where = os.path.join(copy, os.path.relpath(path, root))
        os.makedirs(os.path.dirname(where), exist_ok=True)
        Path(where).write_bytes(data)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("eager", [(), (".parquet",), (".json",)], ids=["nothing", "segments", "manifests"])
def test_whatever_a_version_names_is_there_after_power_loss_at_any_moment(
    tmp_path: Path, eager: tuple[str, ...], seed: int
) -> None:
    root, copy = str(tmp_path / "home"), str(tmp_path / "copy")
    os.mkdir(root)
    disk = Lossy(root, eager)
    lives = lived(StateStore(os.path.join(root, "state"), disk=disk), disk, random.Random(seed))
    assert len(disk.pictures) > 40
    for pictures in (disk.pictures, disk.seen):
        for moment, picture in enumerate(pictures, 1):
            laid_out(picture, root, copy)
            # It raises where anything that a manifest names is missing or empty.
            found = StateStore(os.path.join(copy, "state"), disk=Hurried())
            numbers = {version.number for version in found.versions()}
            for number, (born, gone) in enumerate(lives, 1):
                if born <= moment and (gone is None or moment <= gone):
                    assert number in numbers, f"version {number} is lost at moment {moment}"
            for version in found.versions():
                for segment in version.segments:
                    for path in found.paths(segment):
                        assert pq.read_metadata(path).num_rows == 2


def test_the_fake_disk_notices_a_store_that_does_not_flush(tmp_path: Path) -> None:
    class Hasty(Lossy):
        def flush_file(self, path: str) -> None:
            if not path.endswith(".parquet"):
                super().flush_file(path)

    root = str(tmp_path / "home")
    os.mkdir(root)
    disk = Hasty(root, ())
    lived(StateStore(os.path.join(root, "state"), disk=disk), disk, random.Random(0))
    assert any(
        path.endswith(".json") and not picture[other]
        for picture in disk.pictures
        for path in picture
        for other in picture
        if other.endswith(".parquet")
    )

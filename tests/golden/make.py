"""Make the golden directories of a new generation: `python -m tests.golden.make GENERATION [PART ...]`.

See README.md beside this file: a generation is added, never made again.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from tests.golden import make_broker, make_clients, make_pipelines, make_spools
from tests.golden.opening import HERE, PACKED, SUMS, expected_of, pack, unpack

WORK: Final = Path("/golden")
"""Where golden files are made. Delta writes down where a table was made, so it is the same place on every machine."""
PATHS: Final = ("/tmp", "/root", "/home", "/usr", "/var", "/opt", str(HERE.parents[1]), sys.prefix)
"""No golden file says where it was made, nor with what."""


def in_process(module: str, *arguments: str) -> int:
    """Run a part of the making in a process of its own, which may kill itself."""
    command = [sys.executable, "-m", "tests.golden.make", "--run", module, *arguments]
    return subprocess.run(command, check=False).returncode


def make_broker_parts(work: Path, generation: Path) -> None:
    directory, notes = work / "broker", work / "broker.json"
    for name in make_broker.RUNS:
        code = in_process("broker", name, str(directory), str(notes))
        if code != (-9 if name in make_broker.KILLED_RUNS else 0):
            sys.exit(f"the {name} run of the broker ended with {code}")
        if name in make_broker.KILLED_RUNS:
            make_broker.tear(directory, notes)
        if name == "third":
            keep(directory, notes, generation, "broker-clean")
    keep(directory, notes, generation, "broker-killed")


def make_spool_parts(work: Path, generation: Path) -> None:
    code = in_process("spools", "all", str(work / "spools"), str(work / "spools.json"))
    if code != -9:
        sys.exit(f"the producers ended with {code}")
    keep(work / "spools", work / "spools.json", generation, "spools")


def make_in_one_go(part: str) -> Callable[[Path, Path], None]:
    def make(work: Path, generation: Path) -> None:
        code = in_process(part, "all", str(work / part), str(work / f"{part}.json"))
        if code != 0:
            sys.exit(f"{part}: ended with {code}")
        keep(work / part, work / f"{part}.json", generation, part)

    return make


def keep(directory: Path, notes: Path, generation: Path, name: str) -> None:
    shutil.copy(notes, generation / f"{name}.json")
    archive = generation / f"{name}{PACKED}"
    pack(directory, archive, expected_of(archive)["clock_ms"])


PARTS: Final[Mapping[str, Callable[[Path, Path], None]]] = {
    "broker": make_broker_parts,
    "spools": make_spool_parts,
    "clients": make_in_one_go("clients"),
    "pipelines": make_in_one_go("pipelines"),
}
RUNS: Final = {
    "broker": make_broker.run,
    "spools": make_spools.run,
    "clients": make_clients.run,
    "pipelines": make_pipelines.run,
}


def machine_paths(generation: Path) -> list[str]:
    """Every place in the golden files that names this machine or a directory of it."""
    host = rf"\b{re.escape(socket.gethostname())}\b"
    # In the bytes of checksums and ids, names of one or two letters are found by chance.
    hosts = [host] if len(socket.gethostname()) > 2 else []
    words = re.compile("|".join((*map(re.escape, PATHS), *hosts)).encode())
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for archive in sorted(generation.iterdir()):
            if archive.name.endswith(PACKED):
                unpack(archive, Path(scratch) / archive.name.removesuffix(PACKED))
            else:
                shutil.copy(archive, scratch)
        for path in sorted(Path(scratch).rglob("*")):
            if path.is_file():
                found += [
                    f"{path.relative_to(scratch)}: {match.group()!r}"
                    for match in words.finditer(path.read_bytes())
                ]
    return found


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        _, _, module, name, directory, notes = sys.argv
        RUNS[module](name, Path(directory), Path(notes))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("generation", type=int)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", help=", ".join(PARTS))
    options = parser.parse_args()
    generation = HERE / f"generation-{options.generation}"
    generation.mkdir(exist_ok=True)
    for part in options.parts or PARTS:
        refuse_rewriting(generation, part)
        WORK.mkdir()  # whoever may not, or finds something there, is told so
        try:
            PARTS[part](WORK, generation)
        finally:
            shutil.rmtree(WORK)
    found = machine_paths(generation)
    if found:
        sys.exit("golden files name this machine:\n" + "\n".join(found))
    seal(generation)


def refuse_rewriting(generation: Path, part: str) -> None:
    """What was sealed is on somebody's disk in that shape, and stays."""
    listed = (generation / SUMS).read_text("ascii") if (generation / SUMS).exists() else ""
    if re.search(rf" {part}[-.]", listed):
        sys.exit(
            f"{generation.name} has its {part} already, and old generations are never rewritten: make the next"
        )


def seal(generation: Path) -> None:
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(generation.iterdir())
        if path.name != SUMS
    ]
    (generation / SUMS).write_text("".join(sums), "ascii")


if __name__ == "__main__":
    main()

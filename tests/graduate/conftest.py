"""A node's stopped log directories, with something of everything that a hand-over has to deal with."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from holdfast import Broker
from holdfast.graduate.handing_over import Request
from holdfast.testing.engines import Engine


@dataclass(frozen=True)
class Stopped:
    paths: tuple[str, ...]
    output: str

    @property
    def request(self) -> Request:
        return Request(self.paths, ("127.0.0.1", 19092), ("127.0.0.1", 19093), self.output)

    def asking(self, **changes: object) -> Request:
        return replace(self.request, **changes)  # type: ignore[arg-type]

    def tree(self) -> dict[str, tuple[int, int, int, bytes]]:
        """Every file and directory with mode, owner, modification time and content."""
        found = {}
        for root in self.paths:
            for directory, names, files in os.walk(root):
                for name in (*names, *files):
                    path = Path(directory, name)
                    status = path.stat()
                    content = path.read_bytes() if path.is_file() else b""
                    when = status.st_mtime_ns if path.is_file() and not name.startswith("0") else 0
                    found[str(path)] = (status.st_mode, status.st_uid, when, content)
        return found


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("stopped")
    paths = (str(where / "a"), str(where / "b"))
    with Broker(",".join(paths)) as broker:
        engine = Engine("holdfast", broker.bootstrap_servers)
        engine.create_topic("orders", 3, {"holdfast.flush": "os", "retention.ms": "86400000"})
        engine.create_topic("prices", 1, {"cleanup.policy": "compact", "flush.messages": "500"})
        engine.write("orders", {0: map(str, range(300)), 2: ["one"]})
    os.makedirs(f"{paths[0]}/notes/inner")
    Path(paths[0], "notes/inner/text").write_text("a stranger's")
    os.makedirs(f"{paths[1]}/orders-7-stray")
    Path(paths[1], "orders-7-stray/00000000000000000000.log").write_bytes(b"kept")
    first = next(path for path in paths if os.path.isdir(f"{path}/orders-0"))
    Path(first, "orders-0/00000000000000000300.cut").write_bytes(b"torn")
    return where


@pytest.fixture
def stopped(template: Path, tmp_path: Path) -> Stopped:
    for name in ("a", "b"):
        shutil.copytree(template / name, tmp_path / name)
    return Stopped((str(tmp_path / "a"), str(tmp_path / "b")), str(tmp_path / "out"))

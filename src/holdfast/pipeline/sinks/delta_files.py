"""Files of a Delta table: on this machine, flushed; or in an object store, which keeps what it took."""

from __future__ import annotations

import contextlib
import os
from typing import IO, Any

from holdfast.pipeline.sinks.files import Disk
from holdfast.pipeline.sinks.parquet import local_path


class ObjectStore(Disk):
    """Files under a URL, through Arrow's file systems; credentials come from the environment, as `deltalake`'s do."""

    looks_at = 32

    def open_new(self, path: str) -> IO[bytes]:
        system, where = self._find(path)
        return _file(system.open_output_stream(where))

    def open_existing(self, path: str) -> IO[bytes]:
        system, where = self._find(path)
        return _file(system.open_input_file(where))

    def size(self, path: str) -> int:
        system, where = self._find(path)
        return int(system.get_file_info(where).size)

    def remove(self, path: str) -> None:
        system, where = self._find(path)
        with contextlib.suppress(FileNotFoundError):
            system.delete_file(where)

    def create_directory(self, path: str) -> None:
        """An object store has none."""

    def flush_file(self, path: str) -> None:
        """An object is durable when its upload is done."""

    def flush_directory(self, path: str) -> None:
        """An object store has none."""

    def _find(self, path: str) -> tuple[Any, str]:
        from pyarrow import fs

        system, where = fs.FileSystem.from_uri(path)
        return system, where


def _file(stream: Any) -> IO[bytes]:
    file: IO[bytes] = stream
    return file


def files_for(path: str, directory: str) -> tuple[str, Disk]:
    """Where a table is, and how its files are written."""
    local = local_path(path)
    if local is None:
        return path.rstrip("/"), ObjectStore()
    return os.path.abspath(os.path.join(directory, local)), Disk()

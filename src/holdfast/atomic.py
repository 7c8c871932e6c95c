"""Small files that are replaced as a whole: a reader finds the old content or the new, never a mixture.

The new content is written aside, flushed, renamed over the old and the directory flushed, in that order;
when `write_atomically` returns, the new content survives power loss. A failure before the rename leaves the
old file as it was and at most a `.tmp` beside it, which the next write cuts and nobody reads.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from contextlib import closing

from holdfast.seams import FileSystem, FlushTarget

ASIDE_SUFFIX = ".tmp"


def parent_of(path: str) -> str:
    """The directory that holds `path`."""
    directory, slash, _ = path.rpartition("/")
    if directory:
        return directory
    return "/" if slash else "."


def write_atomically(fs: FileSystem, path: str, data: bytes) -> None:
    """Replace the content of `path` by `data`, durably. On `OSError` the old content may still stand."""
    aside = path + ASIDE_SUFFIX
    with closing(fs.open(aside, "create")) as file:
        file.truncate(0)
        file.pwritev([data], 0)
        file.flush()
    fs.rename(aside, path)
    fs.flush_directory(parent_of(path))


def read_whole(fs: FileSystem, path: str) -> bytes:
    """The content of a small file; `FileNotFoundError` when there is none."""
    with closing(fs.open(path, "read")) as file:
        return file.pread(file.size(), 0)


def read_named(path: str) -> bytes:
    """The content of a small file; whatever the system refuses, the error names it, which an error of reading does not
    by itself."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        error.filename = path
        raise


def rename_all(fs: FileSystem, renames: Sequence[tuple[str, str]]) -> None:
    """Rename files, all or none: when one is refused, those before it get their old names back.

    That is for the running program; a crash may find any of them done. Where even that is refused the error is EIO,
    whatever it was: nobody may go on with files that are neither here nor there.
    """
    for count, (old, new) in enumerate(renames):
        try:
            fs.rename(old, new)
        except OSError:
            _rename_back(fs, renames[:count])
            raise


def _rename_back(fs: FileSystem, renames: Sequence[tuple[str, str]]) -> None:
    for old, new in reversed(renames):
        try:
            fs.rename(new, old)
        except OSError as error:
            raise OSError(
                errno.EIO,
                f"one of several renames failed, and this one cannot be undone: {error.strerror}",
                new,
            ) from error


def flush_file(fs: FileSystem, path: str) -> None:
    """Make a file durable that somebody else has written. Blocks."""
    with closing(fs.open(path, "write")) as file:
        file.flush()


def flush_each(fs: FileSystem, targets: Iterable[FlushTarget]) -> None:
    """Flush files and directories in order; the first failure ends it. Blocks."""
    for target in targets:
        if isinstance(target, str):
            fs.flush_directory(target)
        else:
            target.flush()

"""The protocols our logic is written against: time, chance, disk, flushing, background work, journals.

Nothing below `holdfast.broker.server` touches the operating system. It receives these objects, so that the
same broker runs on a real disk (`holdfast.real`) and on a simulated one that tears writes,
forgets what was not flushed and fills up (`holdfast.testing`).

The rules every implementation keeps:

- A `File` and a `FileSystem` raise `OSError`, with its errno, when the operating system refuses.
  Nothing is retried inside a seam.
- What `pwritev` wrote is visible to `pread` at once and is durable only after a flush of that file,
  and, for a file that is new, renamed or removed, of its directory.
- A flush that failed is never repeated as if nothing had happened: after it, cached and stored bytes
  may differ, and only the caller knows what that costs.
- `Flusher` and `Worker` return at once and report later, on the thread that runs the node, never from
  inside the call. Every job is reported, whatever went wrong with it or with the report of another.

Paths are plain strings joined with "/"; packages above stay free of `os`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
OpenMode: TypeAlias = Literal["read", "write", "create"]


class Now(NamedTuple):
    """One reading of the clocks, taken by the shell when an event arrives."""

    wall_ms: int
    """Milliseconds since the epoch: what goes into records and decides retention. It may step back."""
    monotonic_ms: int
    """Milliseconds since some moment: what decides time-outs. It never steps back."""


class Clock(Protocol):
    @property
    def read_ns(self) -> int:
        """The monotonic clock when `now` was last called, as finely as the machine tells it."""
        ...

    def now(self) -> Now: ...

    def monotonic_ns(self) -> int:
        """What durations are measured with."""
        ...

    def since_boot_ms(self) -> int:
        """Milliseconds since the machine booted, those it slept included, the same for every process."""
        ...


class Randomness(Protocol):
    def uuid_bytes(self) -> bytes:
        """16 bytes of a random (version 4) UUID."""
        ...

    def below(self, bound: int) -> int:
        """A uniform integer in [0, bound)."""
        ...


class File(Protocol):
    """One open file, addressed by position; it has no cursor."""

    @property
    def path(self) -> str: ...

    def pread(self, length: int, position: int) -> bytes:
        """Up to `length` bytes; fewer only at the end of the file."""
        ...

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        """Write all of `buffers` at `position` or raise; returns the bytes written."""
        ...

    def size(self) -> int: ...

    def is_at_path(self) -> bool:
        """Whether its path still leads to this file, and not to nothing or to another one."""
        ...

    def truncate(self, length: int) -> None: ...

    def flush(self) -> None:
        """Make the file's content and size durable (fdatasync). Blocks: start, stop and small files only."""
        ...

    def drop_cache(self) -> None:
        """Forget clean cached pages, so that the next read shows what the disk holds."""
        ...

    def close(self) -> None: ...


class Lock(Protocol):
    def is_in_place(self) -> bool:
        """Whether the path of the directory it locks still leads to that directory."""
        ...

    def release(self) -> None: ...


class FileSystem(Protocol):
    def open(self, path: str, mode: OpenMode) -> File:
        """ "read" and "write" need the file to exist; "create" makes it when missing and never cuts it."""
        ...

    def exists(self, path: str) -> bool:
        """False only where there is nothing. What cannot be looked at raises: it is not absent."""
        ...

    def is_directory(self, path: str) -> bool:
        """As `exists`, and false for what is no directory."""
        ...

    def size(self, path: str) -> int: ...

    def modified_ms(self, path: str) -> int: ...

    def set_modified_ms(self, path: str, modified_ms: int) -> None: ...

    def list(self, directory: str) -> list[str]:
        """Names in a directory, sorted."""
        ...

    def make_directory(self, path: str) -> None:
        """Create a directory and its missing parents; an existing one is fine."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Replace `new` by `old` in one step."""
        ...

    def remove(self, path: str) -> None: ...

    def remove_tree(self, path: str) -> None: ...

    def flush_directory(self, path: str) -> None:
        """Make the directory's entries durable. Blocks."""
        ...

    def flush_many(self, targets: Sequence[FlushTarget]) -> None:
        """Make files and directories durable, with more of the file system where that is cheaper. Blocks."""
        ...

    def free_bytes(self, path: str) -> int: ...

    def lock(self, path: str) -> Lock:
        """Take an exclusive lock that dies with the process; raise `BlockingIOError` when it is held."""
        ...


FlushTarget: TypeAlias = File | str
"""A file, or the path of a directory whose entries must be durable."""


class FlushJob(NamedTuple):
    """Targets to flush, in order; the first failure ends the job."""

    targets: tuple[FlushTarget, ...]
    done: Callable[[OSError | None], None]
    is_background: bool = False
    """Nobody's answer waits for it: it must not hold up flushes that somebody waits for."""
    gather: Callable[[], tuple[FlushTarget, ...]] | None = None
    """Names the targets when the flush is about to begin, so that what comes until then is among them."""

    def gathered(self) -> FlushJob:
        """The job with its targets settled. For flushers: once, on the node's thread, before the first flush."""
        return self if self.gather is None else self._replace(targets=self.gather(), gather=None)


class Flusher(Protocol):
    def submit(self, job: FlushJob) -> None:
        """Flush in the background, then call `job.done` on the node's thread; `job.gather` is called there too."""
        ...


class Worker(Protocol):
    """Background work that must not run in the broker's interpreter: compaction, deep scans."""

    def submit(
        self,
        task: str,
        arguments: Mapping[str, Any],
        done: Callable[[Mapping[str, Any] | None, str | None], None],
    ) -> None:
        """Run a task of `holdfast.broker.log.tasks` by name with JSON-like arguments.

        `done(result, None)` or `done(None, what went wrong)` follows on the node's thread.
        """
        ...


class Scheduled(Protocol):
    def cancel(self) -> None: ...


class Schedule(Protocol):
    """Deadlines of a machine that has no clock of its own."""

    def at(self, deadline_ms: int, action: Callable[[Now], None]) -> Scheduled:
        """Call `action` once the monotonic clock has reached `deadline_ms`, never from inside this call."""
        ...


class Journal(Protocol):
    """The log a coordinator keeps its state in: a record counts once it is appended, and is shown once durable.

    A coordinator appends first and changes its state after, so that a refused append leaves both as they were.
    Its answers, reads included, leave through `when_durable`: nobody learns what a crash could take back.
    """

    def append(
        self,
        records: Sequence[tuple[bytes, bytes | None]],
        now: Now,
        *,
        producer: tuple[int, int] | None = None,
    ) -> None:
        """Append keys and values (None: a tombstone) as one batch, whole or not at all.

        With `producer`, an id and an epoch, the batch is part of that producer's transaction. Raises `ApiError`
        when the log cannot be written, and then nothing was.
        """
        ...

    def when_durable(self, done: Callable[[Exception | None], None]) -> None:
        """Call `done(None)` once all that was appended so far is durable, or `done` with why it never will be."""
        ...

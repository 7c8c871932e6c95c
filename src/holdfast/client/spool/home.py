"""Where spools live: a directory that many processes share, each with a spool of its own inside.

    HOME/<id>/            one spool; the id, 16 hexadecimal digits, is chosen once and names its messages for ever
    HOME/<id>/lock        held by the process that owns the spool, let go of by its death
    HOME/<id>/*.spool     its segments
    HOME/<id>/progress    how far it was delivered; what is not known here is sent again
    HOME/<id>/refused/    messages that no broker will ever take, with the reasons
    HOME/<id>/retry       somebody asks for the refused messages to be sent once more
    HOME/<id>/waiting.json   what cannot be sent now, and why
    HOME/<id>/identity.json  the cluster its messages are for, and who has opened it
    HOME/<id>/delivery    how it was delivered last, at-least-once or exactly-once, and the partitioner

A process that opens a home takes every spool whose owner is dead: it writes to one of them, or to a new one when there
is none, and delivers what the others hold, if they are for the same cluster. A spool that is empty and not in use is
removed by whoever finds it so.
"""

from __future__ import annotations

import errno
from typing import Final, NamedTuple

from holdfast.atomic import parent_of, read_whole, write_atomically
from holdfast.client.partitioner import DEFAULT_PARTITIONER, PARTITIONERS
from holdfast.errors import UsageError
from holdfast.seams import FileSystem, Lock, Randomness

LOCK_FILE: Final = "lock"
REFUSED_DIRECTORY: Final = "refused"
ID_DIGITS: Final = 16
RETRY_FILE: Final = "retry"
DELIVERY_FILE: Final = "delivery"
AT_LEAST_ONCE: Final = "at-least-once"
EXACTLY_ONCE: Final = "exactly-once"
GONE_SUFFIX: Final = ".gone"
NOT_ALLOWED: Final = frozenset((errno.EACCES, errno.EPERM, errno.EROFS))


class OwnedSpool(NamedTuple):
    """A spool of which this process is the owner."""

    id: str
    directory: str
    lock: Lock


class DeliveryMode(NamedTuple):
    """How a spool is delivered."""

    delivery: str = AT_LEAST_ONCE
    partitioner: str = DEFAULT_PARTITIONER


def read_delivery_mode(fs: FileSystem, directory: str) -> DeliveryMode:
    """How the spool was delivered last, so that whoever goes on for a dead owner does the same."""
    path = f"{directory}/{DELIVERY_FILE}"
    if not fs.exists(path):
        return DeliveryMode()
    words = read_whole(fs, path).decode("ascii", "replace").split()
    if len(words) == 2 and words[0] in (AT_LEAST_ONCE, EXACTLY_ONCE) and words[1] in PARTITIONERS:
        return DeliveryMode(words[0], words[1])
    return DeliveryMode()


def note_delivery_mode(fs: FileSystem, directory: str, mode: DeliveryMode) -> None:
    if read_delivery_mode(fs, directory) != mode or not fs.exists(f"{directory}/{DELIVERY_FILE}"):
        write_atomically(fs, f"{directory}/{DELIVERY_FILE}", " ".join(mode).encode())


class SpoolHome:
    def __init__(self, fs: FileSystem, path: str, randomness: Randomness) -> None:
        self._fs = fs
        self.path = path
        self._randomness = randomness

    def ids(self) -> list[str]:
        """Every spool there is, whoever owns it."""
        if not self._fs.exists(self.path):
            return []
        return [name for name in self._fs.list(self.path) if is_spool_id(name)]

    def directory(self, spool_id: str) -> str:
        return f"{self.path}/{spool_id}"

    def take(self, spool_id: str) -> OwnedSpool | None:
        """Own a spool that exists; None while another process, or another producer of this one, does."""
        directory = self.directory(spool_id)
        try:
            lock = self._fs.lock(f"{directory}/{LOCK_FILE}")
        except BlockingIOError:
            return None
        except FileNotFoundError:
            # Removed by its owner between the listing and now.
            return None
        if not self._fs.exists(f"{directory}/{LOCK_FILE}"):
            # Removed between opening the lock file and locking it: what we hold has no name any more.
            lock.release()
            return None
        try:
            # Whoever made it may have died before its name was durable.
            self._fs.flush_directory(self.path)
        except BaseException:
            lock.release()
            raise
        return OwnedSpool(spool_id, directory, lock)

    def sweep(self) -> None:
        """Finish what a process that died while it removed a spool has left."""
        if self._fs.exists(self.path):
            for name in self._fs.list(self.path):
                if name.endswith(GONE_SUFFIX) and is_spool_id(name.removesuffix(GONE_SUFFIX)):
                    try:
                        self._fs.remove_tree(f"{self.path}/{name}")
                    except FileNotFoundError:
                        # Another process is at it.
                        continue

    def make(self) -> None:
        """The home itself and what is missing above it, each durable in its parent before the next is made."""
        try:
            missing = []
            path = self.path.rstrip("/") or "/"
            while not self._fs.exists(path):
                missing.append(path)
                path = parent_of(path)
            self._flush_name(path)
            for path in reversed(missing):
                self._fs.make_directory(path)
                self._fs.flush_directory(parent_of(path))
            if not self._fs.is_directory(self.path):
                raise UsageError(f"{self.path} is not a directory; a spool needs one of its own")
        except (FileExistsError, NotADirectoryError) as error:
            raise UsageError(f"{self.path} is not a directory; a spool needs one of its own") from error
        except OSError as error:
            raise self._explained(error) from error

    def _flush_name(self, path: str) -> None:
        """Whoever made a directory may have died before its name was durable."""
        try:
            self._fs.flush_directory(parent_of(path))
        except OSError as error:
            # Whoever may not open what is above it has not made it.
            if error.errno not in NOT_ALLOWED:
                raise

    def _explained(self, error: OSError) -> Exception:
        if error.errno in NOT_ALLOWED:
            return UsageError(f"{self.path} cannot be written: {error.strerror}")
        return error

    def create(self) -> OwnedSpool:
        """A new spool, durable as a name before anything is stored in it."""
        self.make()
        try:
            owned = None
            while owned is None:
                # Until its lock is held it looks like a dead owner's, and may become somebody else's.
                spool_id = self._randomness.uuid_bytes().hex()[:ID_DIGITS]
                self._fs.make_directory(self.directory(spool_id))
                owned = self.take(spool_id)
        except OSError as error:
            raise self._explained(error) from error
        return owned

    def rename(self, owned: OwnedSpool) -> str:
        """Give a spool a new id, under which nothing of it was ever delivered; returns it."""
        spool_id = self._randomness.uuid_bytes().hex()[:ID_DIGITS]
        self._fs.rename(owned.directory, self.directory(spool_id))
        self._fs.flush_directory(self.path)
        return spool_id

    def remove(self, owned: OwnedSpool) -> None:
        """Take an empty spool away and let go of it, also when it cannot be removed. Its id is never used again."""
        try:
            # Out of sight in one step: whoever looks for a spool finds it whole or not at all.
            gone = owned.directory + GONE_SUFFIX
            self._fs.rename(owned.directory, gone)
            self._fs.remove_tree(gone)
            self._fs.flush_directory(self.path)
        finally:
            owned.lock.release()


def is_spool_id(name: str) -> bool:
    return len(name) == ID_DIGITS and all(digit in "0123456789abcdef" for digit in name)

"""Whose a spool is: the cluster that its messages are for, and the processes that have opened it.

The file `identity.json` keeps the address that the owner was given (`bootstrap_servers`), the id of the cluster that
was found there when the first message was to be sent (`cluster_id`), and an opening, a random number, for each process
that opened the spool since brokers were last told of one (`openings`). From then on the spool is for that cluster: at
another one it waits, whatever answers at the address. An opening that brokers know and the spool does not proves that
the spool is an older copy.

A spool of an earlier version has no such file: it is for the first cluster that takes a message from it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from holdfast.atomic import read_whole, write_atomically
from holdfast.client.spool.store import NO_ROOM
from holdfast.errors import StorageError
from holdfast.seams import FileSystem, Randomness

IDENTITY_FILE: Final = "identity.json"


class Identity(NamedTuple):
    cluster_id: str | None = None
    bootstrap_servers: str | None = None
    openings: tuple[int, ...] = ()


def read_identity(fs: FileSystem, directory: str) -> Identity:
    path = f"{directory}/{IDENTITY_FILE}"
    if not fs.exists(path):
        # Not lost: it is durable before the spool is told anything by brokers, and an earlier version wrote none.
        return Identity()
    try:
        found = json.loads(read_whole(fs, path))
        return Identity(found["cluster_id"], found["bootstrap_servers"], tuple(map(int, found["openings"])))
    except (ValueError, TypeError, KeyError) as error:
        raise StorageError(
            f"{path} cannot be read ({error}), so nobody knows which cluster its messages are for. If it is the one "
            "that the producer is given, remove the file"
        ) from error


def write_identity(fs: FileSystem, directory: str, identity: Identity) -> None:
    write_atomically(fs, f"{directory}/{IDENTITY_FILE}", json.dumps(identity._asdict()).encode())


def draw_opening(randomness: Randomness) -> int:
    """Never 0, which stands for the openings of earlier versions."""
    return randomness.below(2**32 - 1) + 1


class IdentityFile:
    """The identity of a spool that is open."""

    def __init__(self, fs: FileSystem, directory: str, bootstrap_servers: str, opening: int) -> None:
        self._fs = fs
        self._directory = directory
        self.opening = opening
        was = read_identity(fs, directory)
        self._noted = was
        self.now = Identity(was.cluster_id, bootstrap_servers, (*was.openings, opening))

    def is_of(self, cluster_id: str | None) -> bool:
        """Whether messages may be sent to this cluster; brokers that do not say which they are count as right."""
        return None in (cluster_id, self.now.cluster_id) or cluster_id == self.now.cluster_id

    def expect(self, cluster_id: str | None) -> None:
        """Messages are about to be sent to this cluster: from now on they are for no other."""
        if self.now.cluster_id is None:
            self.now = self.now._replace(cluster_id=cluster_id)
        self.note()

    def told(self, opening: int) -> None:
        """Brokers were last told of this opening, or none yet: earlier ones need not be remembered."""
        kept = self.now.openings[self.now.openings.index(opening) :] if opening else self.now.openings
        self.now = self.now._replace(openings=kept)
        self.note()

    def note(self) -> None:
        """Write down what is not written down yet, durably; raises `OSError`."""
        if self.now != self._noted:
            write_identity(self._fs, self._directory, self.now)
            self._noted = self.now


SAY_SECONDS: Final = 60.0
"""Between two lines about another cluster."""


class HomeCluster:
    """The cluster that a spool's messages are for: no other gets any, and what another confirms does not count."""

    def __init__(self, identity: IdentityFile, bootstrap_servers: Any, say: Callable[[str], None]) -> None:
        self.identity = identity
        self._bootstrap_servers = bootstrap_servers
        self._say = say
        self.is_checked = False
        """Whether brokers have said that they are the cluster that the messages are for."""
        self.is_astray = False
        """Whether messages may have been confirmed by another cluster since progress was written down last."""
        self._elsewhere: str | None = None
        self._said_at = float("-inf")

    @property
    def elsewhere(self) -> str | None:
        """Why nothing is sent, while the brokers belong to another cluster."""
        if self._elsewhere is None:
            return None
        return (
            f"its messages are for cluster {self.identity.now.cluster_id}, and the brokers at "
            f"{self._bootstrap_servers} belong to cluster {self._elsewhere}: nothing is sent there, "
            "and the messages wait. If that cluster is the right one now, end the producer and call "
            "`holdfast spool accept-cluster`"
        )

    def is_home(self, cluster_id: str | None) -> bool:
        """Whether brokers that say this of themselves are those that the messages are for."""
        if self.identity.is_of(cluster_id):
            if self._elsewhere is not None:
                self._elsewhere, self._said_at = None, float("-inf")
                self._say(f"the brokers are of cluster {cluster_id} again: sending what waits")
            return True
        self._elsewhere, self.is_checked, self.is_astray = cluster_id, False, True
        if time.monotonic() - self._said_at >= SAY_SECONDS:
            self._said_at = time.monotonic()
            self._say(self.elsewhere or "")
        return False

    def expect(self, cluster_id: str | None) -> None:
        """Before the first message is sent: whoever opens the spool next must know where it went."""
        try:
            self.identity.expect(cluster_id)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        self.is_checked = True

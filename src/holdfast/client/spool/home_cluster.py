"""The cluster that a spool's messages are for: no other gets any, and what another confirms does not count."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from holdfast.client.spool.identity import IdentityFile
from holdfast.client.spool.store import NO_ROOM

SAY_SECONDS: Final = 60.0
"""Between two lines about another cluster."""


class HomeCluster:
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
            f"its messages are for cluster {self.identity.cluster_id}, and the brokers at "
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

"""The positions, shown to lag tools as a consumer group's. Written after each batch.

Positions are never read back. The metadata beside them names the heads of the sinks' ledgers, as a place that neither
the sinks nor the home have in common: a start and an audit hold the ledgers against them.

A group that has members belongs to somebody: it is refused. A commit that fails is told and forgotten, since nothing
depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from holdfast.admin import brokers
from holdfast.admin.errors import ClusterError
from holdfast.pipeline.core.failures import EnvironmentFails
from holdfast.pipeline.positions import Positions

if TYPE_CHECKING:
    from holdfast.reader.cluster import Cluster

DEADLINE_MS: Final = 10_000


class Monitoring:
    """One group, shown to whoever looks."""

    def __init__(self, cluster: Cluster, group: str, warn: Callable[[str], None]) -> None:
        self.group = group
        self._cluster = cluster
        self._warn = warn

    def refuse_members(self) -> None:
        """`EnvironmentFails` if the group is somebody's."""
        try:
            members = brokers.member_count(self._cluster, self.group)
        except ClusterError:
            return  # it cannot be asked: then nothing can be shown either
        if members:
            raise EnvironmentFails(
                f"the group {self.group!r} has {members} members, so its offsets are not for monitoring: name "
                "another one by `monitoring_group`"
            )

    def show(self, positions: Positions, heads: Sequence[str] = ()) -> None:
        """Commit these positions to the group, and these texts beside them."""
        offsets = {
            (place.topic, place.partition): (at.offset, heads[number % len(heads)] if heads else "")
            for number, (place, at) in enumerate(sorted(positions.at.items()))
        }
        if not offsets:
            return
        try:
            self._cluster.retrying(lambda: brokers.commit(self._cluster, self.group, offsets), DEADLINE_MS)
        except ClusterError as error:
            self._warn(
                f"positions could not be shown as group {self.group!r}: {error}; nothing depends on it"
            )

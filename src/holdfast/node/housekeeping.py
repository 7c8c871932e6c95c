"""Work that recurs: retention, producer expiry, compaction. Each piece is short, or runs in the `Worker`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.seams import Now

if TYPE_CHECKING:
    from holdfast.node.node import Node


def schedule(node: Node, now: Now) -> None:
    """Arrange the recurring work of a node that has started."""

"""Deleting the files of removed segments, in two steps.

Renaming them is quick and happens at once. `file.delete.delay.ms` later, when nobody has them open any more, the
worker deletes them: that frees their blocks and may take long. What a stop leaves behind goes at the next start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.broker.node.hosted import HostedPartition
from holdfast.saying import warn

if TYPE_CHECKING:
    from holdfast.broker.node.node import Node


def remove_below_start(node: Node, hosted: HostedPartition) -> bool:
    """Take segments that lie below the log start, which is durable, out of the log, oldest first.

    False when one could not be: the directory is offline, or it has no room for a name, and the rest goes at the next
    check of retention.
    """
    log = hosted.log
    if hosted.offline:
        return False
    if len(log.segments) < 2 or log.segments[1].base_offset > log.start_offset:
        return True
    retired: list[str] = []
    refusal: OSError | None = None
    try:
        for segment in log.segments_before(log.start_offset):
            retired += log.remove([segment])
    except OSError as error:
        if not node.refused(hosted.directory, error):
            return False
        refusal = error
    remove_later(node, retired, log.config.file_delete_delay_ms)
    return refusal is None


def remove_later(node: Node, paths: list[str], delay_ms: int) -> None:
    """Have the worker delete files that were renamed out of the way."""

    def done(result: object, error: str | None) -> None:
        if error is not None:
            node.say(warn(f"files of removed segments could not be deleted: {error}", kind="removal"))

    def remove() -> None:
        if not node.is_stopping:
            node.seams.worker.submit("remove", {"paths": paths}, done)

    if paths:
        node.timers.at(node.now().monotonic_ms + delay_ms, remove)

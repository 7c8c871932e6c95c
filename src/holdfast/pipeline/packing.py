"""Packing the range of a batch into tasks.

A task costs a fixed amount (a Python worker's turn, connections, a file), whatever it reads: 200 partitions of five
records cost seconds as 200 tasks and a fraction of one as two. So the number of tasks follows the amount to read and
the cores there are, where they are known, never the number of partitions: small spans share a task, a large one is cut
between several.
"""

from __future__ import annotations

from holdfast.pipeline.positions import BatchRange
from holdfast.reader import PartitionRange

Task = tuple[PartitionRange, ...]

OFFSETS_WORTH_A_TASK = 20_000


def pack(
    batch: BatchRange, cores: int | None, *, at_least: int = 1, worth: int = OFFSETS_WORTH_A_TASK
) -> list[Task]:
    """The spans of a batch as tasks of about equal size, each in the order of topic, partition and offset.

    As many as there are cores when there is enough to read, and `at_least` that many as far as offsets go. Where nobody
    knows the cores, a task has no more than it is `worth`.
    """
    spans = [(place, span) for place, span in sorted(batch.spans.items()) if span.offsets]
    total = sum(span.offsets for _, span in spans)
    if total == 0:
        return []
    most = -(-total // worth)
    wanted = min(total, max(at_least, most if cores is None else min(max(cores, 1), most)))
    tasks: list[Task] = []
    pieces: list[PartitionRange] = []
    taken = 0
    for place, span in spans:
        at = span.start
        while at < span.end:
            # The task's end lies at its share of the total, so that rounding never adds up.
            room = total * (len(tasks) + 1) // wanted - taken
            end = min(span.end, at + room)
            pieces.append(
                PartitionRange(place.topic, place.topic_id, place.partition, at, end, span.leader_epoch)
            )
            taken += end - at
            at = end
            if taken == total * (len(tasks) + 1) // wanted:
                tasks.append(tuple(pieces))
                pieces = []
    return tasks

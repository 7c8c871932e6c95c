"""Where a job on Spark's own Kafka source stands, by its checkpoint: a pipeline that takes over begins exactly there.

Spark writes `offsets/<n>` before batch n, with the offsets at which it ends, and `commits/<n>` after it. The newest
batch that has both is where the job stands. A batch that was begun and not committed may be in its sink or not: nobody
can tell from here, so it is refused, and the job finishes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final

from holdfast.pipeline.core.failures import DefinitionWrong, nearest
from holdfast.pipeline.engine.planning import Log
from holdfast.pipeline.positions import Place

PREFIX: Final = "checkpoint:"
VERSIONS: Final = ("v1", "v2")


class CheckpointUnfit(DefinitionWrong):
    """The pipeline cannot begin where the checkpoint stands."""

    path = ("source", "starting")


def beginning_of(directory: str, logs: Mapping[Place, Log]) -> dict[Place, int]:
    """For every partition the offset at which the job would have gone on; a partition it never saw from its start."""
    found = committed_offsets(directory)
    for topic in sorted({place.topic for place in logs}):
        if topic not in found:
            hint = nearest(topic, found) or f"; it has {', '.join(sorted(found)) or 'none'}"
            raise CheckpointUnfit(f"the checkpoint {directory} has no offsets of topic {topic!r}{hint}")
    return {
        place: _within(log, found[place.topic].get(place.partition), place) for place, log in logs.items()
    }


def _within(log: Log, offset: int | None, place: Place) -> int:
    if offset is None:
        return log.start
    if offset < log.start:
        raise CheckpointUnfit(
            f"the job stands at offset {offset} of {place.topic}-{place.partition}, and the log begins at {log.start}: "
            f"{log.start - offset} records that it never read are gone. `starting: earliest` begins with what is left"
        )
    if offset > log.end:
        raise CheckpointUnfit(
            f"the job stands at offset {offset} of {place.topic}-{place.partition}, and the log ends at {log.end}: "
            "this is another topic of the same name, or another cluster"
        )
    return offset


def committed_offsets(directory: str) -> dict[str, dict[int, int]]:
    """By topic and partition, the offset behind the last record that a committed batch has."""
    if not os.path.isdir(os.path.join(directory, "offsets")):
        raise CheckpointUnfit(
            f"{directory} is no checkpoint of Structured Streaming: it has no directory 'offsets'; "
            "name what the job has as checkpointLocation"
        )
    planned, committed = _newest(directory, "offsets"), _newest(directory, "commits")
    if planned is None:
        raise CheckpointUnfit(f"the checkpoint {directory} has no batch yet")
    if planned != committed:
        raise CheckpointUnfit(
            f"batch {planned} of the checkpoint {directory} was begun and not committed, so that its sink may have it "
            "or not: start the job once more, with trigger(availableNow=True), and let it end"
        )
    return _offsets(os.path.join(directory, "offsets", str(planned)))


def _newest(directory: str, name: str) -> int | None:
    try:
        names = os.listdir(os.path.join(directory, name))
    except FileNotFoundError:
        return None
    return max((int(each) for each in names if each.isdigit()), default=None)


def _offsets(path: str) -> dict[str, dict[int, int]]:
    """Of the sources that are Kafka: of two that read one topic, the one that is behind."""
    with open(path, encoding="utf-8") as file:
        version, _, *sources = file.read().splitlines()
    if version not in VERSIONS:
        raise CheckpointUnfit(f"{path} has the version {version!r}; {' and '.join(VERSIONS)} are understood")
    found: dict[str, dict[int, int]] = {}
    for line in sources:
        text = line.partition(":")[2] if version == "v2" else line
        for topic, partitions in _of_kafka(text).items():
            held = found.setdefault(topic, {})
            for partition, offset in partitions.items():
                held[int(partition)] = min(offset, held.get(int(partition), offset))
    return found


def _of_kafka(text: str) -> dict[str, dict[str, int]]:
    try:
        document: Any = json.loads(text)
    except ValueError:
        return {}  # `-`: a source that has no offset yet
    if not isinstance(document, dict):
        return {}
    return {topic: each for topic, each in document.items() if isinstance(each, dict)}

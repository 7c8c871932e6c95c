"""Dead letters of plain consumers and foreign jobs, as the offsets they came from.

Every dialect that `holdfast.client.dead_letter_dialects` reads is understood; a letter that does not say where it came
from accounts for nothing, nor does one of another group.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from holdfast.audit.heaps import Numbers
from holdfast.client.dead_letter_dialects import read_failure
from holdfast.reader import TopicPartition, read


def read_dead_letters(
    topic: str | None, settings: Mapping[str, str], group: str | None = None
) -> dict[TopicPartition, Numbers]:
    """The origins of a topic's letters, by partition; nothing without a topic.

    With a group, those that it gave up on: of dialects that do not name one, all.
    """
    if topic is None:
        return {}
    own = {name: value for name, value in settings.items() if name != "bootstrap.servers"}
    found: dict[TopicPartition, list[int]] = {}
    for batch in read(settings["bootstrap.servers"], topic, settings=own):
        for headers in batch.column("headers").to_pylist():
            failure = read_failure([(each["key"], each["value"]) for each in headers or ()])
            if failure is None or (group is not None and failure.group not in (None, group)):
                continue
            origin, partition, offset = failure.topic, failure.partition, failure.offset
            if origin is not None and partition is not None and offset is not None:
                found.setdefault(TopicPartition(origin, partition), []).append(offset)
    return {place: np.unique(np.array(offsets, np.int64)) for place, offsets in found.items()}

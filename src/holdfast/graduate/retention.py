"""What retention had put off because the wall clock could not be believed, and Kafka will delete.

holdfast lets records expire by the time that is known to have passed. Kafka goes by the wall clock. Where the two are
apart, everything that has expired by the one and not by the other goes with Kafka's first check, half a minute after
its start; so it is named before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import NamedTuple

from holdfast.broker.log.index import TimeIndex
from holdfast.broker.log.segment import TIME_INDEX_SUFFIX
from holdfast.broker.metadata.image import Resource, ResourceType
from holdfast.broker.metadata.names import REQUIRED_SETTINGS
from holdfast.broker.node.wall_clock import CLOCK_FILE, STEP_MS
from holdfast.config.broker import BrokerConfig
from holdfast.errors import CorruptLog
from holdfast.manifest.directory import DataDirectories, LogFiles
from holdfast.real import RealClock, boot_id


class PutOff(NamedTuple):
    topic: str
    partition: int
    first_offset: int
    end_offset: int
    segments: int
    bytes: int


def proven_ms(directories: DataDirectories) -> int | None:
    """How late it is as far as that is known; None where nothing was written down."""
    path = f"{os.path.dirname(directories.metadata.path)}/{CLOCK_FILE}"
    try:
        with open(path, "rb") as file:
            last = json.loads(file.read())
        proven = int(last["proven_ms"])
        if last["boot_id"] == boot_id():
            proven += max(0, RealClock().since_boot_ms() - int(last["since_boot_ms"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return proven


def put_off(directories: DataDirectories, config: BrokerConfig, now_ms: int) -> Iterator[PutOff]:
    """What has expired by the wall clock `now_ms` and not by the time that is known to have passed."""
    proven = proven_ms(directories)
    if proven is None or now_ms - proven <= STEP_MS:
        return
    for (topic, index), files in sorted(directories.partitions.items()):
        settings = directories.image.settings(Resource(ResourceType.TOPIC, topic))
        wanted = config.topic_config({**settings, **REQUIRED_SETTINGS.get(topic, {})})
        if "delete" not in wanted.cleanup_policy or wanted.retention_ms < 0:
            continue
        bases = files.segments()
        expired = 0
        for base_offset in bases:
            newest = _newest_ms(files, base_offset)
            if newest is None or newest >= now_ms - wanted.retention_ms:
                break
            expired += 1
        if expired:
            end = bases[expired] if expired < len(bases) else files.recovery_point
            size = sum(os.path.getsize(files.segment_path(base)) for base in bases[:expired])
            if end > bases[0]:
                yield PutOff(topic, index, max(bases[0], files.log_start), end, expired, size)


def _newest_ms(files: LogFiles, base_offset: int) -> int | None:
    """The largest timestamp of a segment; of one without an index, when it was last written."""
    try:
        with open(files.segment_path(base_offset, TIME_INDEX_SUFFIX), "rb") as file:
            index = TimeIndex.from_bytes(file.read(), base_offset)
    except (OSError, CorruptLog):
        index = TimeIndex(base_offset)
    if len(index) and index.last_entry[0] >= 0:
        return index.last_entry[0]
    if not os.path.getsize(files.segment_path(base_offset)):
        return None
    return os.stat(files.segment_path(base_offset)).st_mtime_ns // 1_000_000

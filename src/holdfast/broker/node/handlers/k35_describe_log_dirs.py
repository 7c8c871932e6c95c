"""DescribeLogDirs (35), versions 1 to 5: log directories, their room, and the partitions in them.

Null asks for every partition. A directory is listed even when it holds none of those asked for, and an
offline one with KAFKA_STORAGE_ERROR. The capacity of a directory is not known here and stands as -1.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.directories import LogDirectory
from holdfast.broker.node.services import ClusterServices
from holdfast.seams import Now

UNKNOWN_BYTES: Final = -1


def handle(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    asked: set[tuple[str, int]] | None = None
    if request.topics is not None:
        asked = {(topic.topic, index) for topic in request.topics for index in topic.partitions}
    return {
        "throttle_time": 0,
        "error_code": ErrorCode.none,
        "results": [_one(node, directory, asked) for directory in node.directories],
    }


def _one(node: ClusterServices, directory: LogDirectory, asked: set[tuple[str, int]] | None) -> Fields:
    if directory.offline:
        return {"error_code": ErrorCode.kafka_storage_error, "log_dir": directory.path, "topics": []}
    sizes: dict[str, list[Fields]] = {}
    for hosted in node.partitions:
        if hosted.directory is directory and (asked is None or (hosted.topic, hosted.index) in asked):
            sizes.setdefault(hosted.topic, []).append(
                {
                    "partition_index": hosted.index,
                    "partition_size": hosted.log.size,
                    "offset_lag": 0,
                    "is_future_key": False,
                }
            )
    return {
        "error_code": ErrorCode.none,
        "log_dir": directory.path,
        "topics": [{"name": topic, "partitions": partitions} for topic, partitions in sizes.items()],
        "total_bytes": UNKNOWN_BYTES,
        "usable_bytes": _free_bytes(node, directory),
        "is_cordoned": False,
    }


def _free_bytes(node: ClusterServices, directory: LogDirectory) -> int:
    try:
        return node.seams.fs.free_bytes(directory.path)
    except OSError:
        # Not worth an error of its own: a directory that no longer works is found out by a write or flush.
        return UNKNOWN_BYTES

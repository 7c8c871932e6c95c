"""Compactions and deletions of segments that a crash interrupted, ended when their log is opened."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.atomic import ASIDE_SUFFIX
from holdfast.broker.log.scan import scan_headers
from holdfast.broker.log.segment import (
    CLEANED_SUFFIX,
    DELETED_SUFFIX,
    INDEX_SUFFIX,
    LOG_SUFFIX,
    SNAPSHOT_SUFFIX,
    SUMS_SUFFIX,
    SWAP_SUFFIX,
    TIME_INDEX_SUFFIX,
    TXN_INDEX_SUFFIX,
)
from holdfast.seams import FileSystem


def finish_interrupted_work(fs: FileSystem, directory: str, say: Callable[[str], None]) -> None:
    """Complete or undo what a crash interrupted: deletions go on, swaps complete, unfinished cleaning goes.

    A `.log.swap` is a promise that everything else of the cleaned segment is on disk (see `compaction`). Until
    that file has its name, all of this may happen again.
    """
    names = fs.list(directory)
    swaps = [name for name in names if name.endswith(LOG_SUFFIX + SWAP_SUFFIX)]
    for name in swaps:
        _complete_swap(fs, directory, name)
        say(f"{directory}: completed the compaction into {name[:20]} that was interrupted")
    leftovers = [
        name
        for name in fs.list(directory)
        if name.endswith((DELETED_SUFFIX, CLEANED_SUFFIX, SWAP_SUFFIX, ASIDE_SUFFIX))
    ]
    for name in leftovers:
        if name.endswith(SWAP_SUFFIX):
            _settle_index_swap(fs, f"{directory}/{name}")
        else:
            fs.remove(f"{directory}/{name}")
    if leftovers:
        fs.flush_directory(directory)


def _complete_swap(fs: FileSystem, directory: str, swap_name: str) -> None:
    """Let a cleaned segment take the place of those inside the offsets it spans."""
    base = int(swap_name[:20])
    file = fs.open(f"{directory}/{swap_name}", "read")
    last_offset = base
    for found in scan_headers(file, 0, file.size()):
        last_offset = found.header.last_offset
    file.close()
    for name in fs.list(directory):
        stem, _, suffix = name.partition(".")
        if not stem.isdigit() or not base <= int(stem) <= last_offset:
            continue
        is_index = "." + suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX, SUMS_SUFFIX)
        # Indexes are rebuilt from the batches; of the rest, the segment's own files are replaced in one step.
        if is_index or (int(stem) > base and "." + suffix in (LOG_SUFFIX, TXN_INDEX_SUFFIX, SNAPSHOT_SUFFIX)):
            fs.remove(f"{directory}/{name}")
    transactions = f"{directory}/{swap_name[:20]}{TXN_INDEX_SUFFIX}"
    for aside in (CLEANED_SUFFIX, SWAP_SUFFIX):
        if fs.exists(transactions + aside):
            fs.rename(transactions + aside, transactions)
    fs.flush_directory(directory)
    fs.rename(f"{directory}/{swap_name}", f"{directory}/{swap_name.removesuffix(SWAP_SUFFIX)}")
    fs.flush_directory(directory)


def _settle_index_swap(fs: FileSystem, path: str) -> None:
    """An index that Kafka was about to rename after its segment: of no use without rebuilding, but for one."""
    target = path.removesuffix(SWAP_SUFFIX)
    if target.endswith(TXN_INDEX_SUFFIX):
        fs.rename(path, target)
        return
    fs.remove(path)
    if target.endswith((INDEX_SUFFIX, TIME_INDEX_SUFFIX)) and fs.exists(target):
        fs.remove(target)

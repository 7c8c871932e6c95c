"""Lineage of stored rows: counted and digested from Arrow columns, without Spark."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.pipeline.digest import MASK, digest_of_offsets

FEW_RUNS = 4096
"""Rows mostly come partition by partition; beyond this many changes of partition they are sorted first."""


def digest_of_lineage(lineage: pa.StructArray) -> int:
    """The digest of the rows with this lineage, a struct of topic, partition, offset and index."""
    if len(lineage) == 0:
        return 0
    topics, partitions, offsets = (lineage.field(at) for at in range(3))
    if not pa.types.is_dictionary(topics.type):
        topics = pc.dictionary_encode(topics)
    names = topics.dictionary.to_pylist()
    numbers: npt.NDArray[np.int64] = offsets.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    codes = topics.indices.to_numpy(zero_copy_only=False).astype(np.int64) << 32
    codes |= partitions.to_numpy(zero_copy_only=False).astype(np.int64)
    starts = np.flatnonzero(np.diff(codes)) + 1
    if len(starts) > FEW_RUNS:
        order = np.argsort(codes, kind="stable")
        codes, numbers = codes[order], numbers[order]
        starts = np.flatnonzero(np.diff(codes)) + 1
    bounds = [0, *starts.tolist(), len(codes)]
    total = 0
    for begin, end in pairwise(bounds):
        code = int(codes[begin])
        total += digest_of_offsets(names[code >> 32], code & 0xFFFFFFFF, numbers[begin:end])
    return total & MASK

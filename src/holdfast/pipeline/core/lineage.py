"""The column by which every row says which record it came from."""

from __future__ import annotations

from typing import Final

from holdfast.pipeline.core.sql import literal

LINEAGE: Final = "_hf"
PLACE: Final = ("topic", "partition", "offset", "index")
"""The fields of a row's lineage: the record, and which of the record's rows it is."""
LINEAGE_TYPE: Final = "struct<topic:string,partition:int,offset:bigint,index:int>"
PLACE_COLUMNS: Final = tuple(f"{LINEAGE}_{part}" for part in PLACE)
"""The same as columns of their own."""
PLACE_DDL: Final = "_hf_topic string, _hf_partition int, _hf_offset bigint, _hf_index int"


def of_step(name: str, offset: str, index: str) -> str:
    """The lineage of a row that a step makes out of many: the step stands for the topic."""
    return f"named_struct('topic', {literal(name)}, 'partition', 0, 'offset', {offset}, 'index', {index}) AS {LINEAGE}"

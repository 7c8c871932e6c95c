"""Avro schemas as they are looked at here: parsed, names resolved, logical types set aside; and their strict check.

fastavro decodes values, but takes more than the format allows: a negative choice of a union or an enum counts from the
end, as Python's lists do. So a value is also checked by machine code (`flat_kernel.check_avro`), which walks the same
schema and knows only what is right.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import fastavro
import fastavro.schema
import numpy as np
import numpy.typing as npt

from holdfast.pipeline.formats.flat_layout import (
    ARRAY,
    BOOLEAN,
    BYTES,
    CHECK_WORDS,
    EIGHT_BYTES,
    EMPTY,
    ENUM,
    FIXED,
    FOUR_BYTES,
    MAP,
    RECORD,
    TEXT,
    UNION,
    ZIGZAG,
)
from holdfast.pipeline.formats.json_cells import Cells
from holdfast.pipeline.formats.schema_rows import Mismatch

BROKEN: Final = (
    EOFError,
    IndexError,
    KeyError,
    ValueError,
    TypeError,
    OverflowError,
    MemoryError,
    RecursionError,
    StopIteration,
)
"""What fastavro raises on bytes that are not of the schema."""
CODES: Final = {
    "null": EMPTY,
    "boolean": BOOLEAN,
    "int": ZIGZAG,
    "long": ZIGZAG,
    "float": FOUR_BYTES,
    "double": EIGHT_BYTES,
    "string": TEXT,
    "bytes": BYTES,
}


class Names:
    """The named types of a schema and of those it refers to; whoever is looked up was declared."""

    def __init__(self, text: str, references: Sequence[tuple[str, str]] = (), rejects: bool = False) -> None:
        self.rejects = rejects
        """Whether a writer's field that no column takes is refused."""
        self.types: dict[str, Any] = {}
        try:
            for _, each in references:
                fastavro.parse_schema(_plain(json.loads(each)), self.types)
            self.schema = fastavro.parse_schema(_plain(json.loads(text)), self.types)
        except json.JSONDecodeError as wrong:
            raise Mismatch(f"its Avro schema is not JSON: {wrong}") from None
        except (fastavro.schema.SchemaParseException, *BROKEN) as wrong:
            raise Mismatch(f"its Avro schema is not valid: {type(wrong).__name__}: {wrong}") from None

    def resolve(self, schema: Any) -> Any:
        while isinstance(schema, str) and schema in self.types:
            schema = self.types[schema]
        return schema

    @property
    def record(self) -> Any:
        """The schema itself when it is a record, else nothing."""
        found = self.resolve(self.schema)
        return found if isinstance(found, dict) and found["type"] == "record" else None


LOGICAL: Final = "holdfast.logical"


def _plain(schema: Any) -> Any:
    """The schema with logical types moved to a property that fastavro keeps and does not act on."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        name: _plain(each) if name in ("type", "items", "values", "fields") else each
        for name, each in schema.items()
    }
    if "logicalType" in found:
        found[LOGICAL] = found.pop("logicalType")
    return found


def branches(schema: Any) -> tuple[list[Any], bool]:
    """The types a schema allows, and whether null is one of them."""
    if isinstance(schema, list):
        return [each for each in schema if each != "null"], "null" in schema
    return ([], True) if schema == "null" else ([schema], False)


def kind_of(schema: Any) -> tuple[str, str]:
    """An Avro type's name and its logical type."""
    if isinstance(schema, str):
        return schema, ""
    name = schema["type"]
    return (name, str(schema.get(LOGICAL, ""))) if isinstance(name, str) else kind_of(name)


class Check:
    """A schema as a table of nodes, the first of which is the schema itself."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._nodes: list[tuple[int, int, int]] = []
        self._children: list[int] = []
        self._known: dict[str, int] = {}
        """Nodes of records: one that holds itself is one node."""
        self._add(names.schema)
        self._table = np.array(self._nodes, np.int64).reshape(-1, CHECK_WORDS)
        self._list = np.array([*self._children, 0], np.int64)

    def _add(self, schema: Any) -> int:
        schema = self._names.resolve(schema)
        if isinstance(schema, list):
            return self._family(UNION, schema, None)
        kind, _ = kind_of(schema)
        if kind == "record":
            known = self._known.get(schema["name"])
            return (
                self._family(RECORD, [each["type"] for each in schema["fields"]], schema["name"])
                if known is None
                else known
            )
        node = len(self._nodes)
        if kind in CODES:
            self._nodes.append((CODES[kind], 0, 0))
        elif kind == "fixed":
            self._nodes.append((FIXED, int(schema["size"]), 0))
        elif kind == "enum":
            self._nodes.append((ENUM, 0, len(schema["symbols"])))
        else:
            self._nodes.append((ARRAY if kind == "array" else MAP, 0, 0))
            item = self._add(schema["items" if kind == "array" else "values"])
            self._nodes[node] = (self._nodes[node][0], item, 0)
        return node

    def _family(self, code: int, schemas: Sequence[Any], name: str | None) -> int:
        node = len(self._nodes)
        self._nodes.append((code, 0, len(schemas)))
        if name is not None:
            self._known[name] = node
        found = [self._add(each) for each in schemas]
        self._nodes[node] = (code, len(self._children), len(schemas))
        self._children.extend(found)
        return node

    def mark(self, cells: Cells) -> npt.NDArray[np.uint8]:
        """Marks of the document, in which rows are undecided that are not exactly one value of the schema."""
        document = cells.document
        document.machine.check_avro(
            document.base,
            len(cells),
            cells.begins.ctypes.data,
            cells.ends.ctypes.data,
            document.marks.ctypes.data,
            self._table.ctypes.data,
            self._list.ctypes.data,
            document.scratch.ctypes.data,
        )
        return document.marks

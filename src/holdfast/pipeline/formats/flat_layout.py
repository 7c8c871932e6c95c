"""What the kernel of flat Avro and Protobuf records and the code around it agree on."""

from __future__ import annotations

from typing import Final

ZIGZAG: Final = 0
"""Avro's int and long, Protobuf's sint64."""
VARINT: Final = 1
SIGNED_32: Final = 2
"""The low half of a varint, with its sign."""
UNSIGNED_32: Final = 3
ZIGZAG_32: Final = 4
BOOLEAN: Final = 5
"""Avro's: one byte, 0 or 1."""
TRUTH: Final = 6
"""Protobuf's: a varint, zero or not."""
FOUR_BYTES: Final = 7
EIGHT_BYTES: Final = 8
TEXT: Final = 9
"""A length and UTF-8."""
BYTES: Final = 10
FIXED: Final = 11
"""As many bytes as the schema says."""
BIG_INTEGER: Final = 12
"""A length and a big-endian number with a sign, of at most eight bytes."""
INSTANT: Final = 13
"""A message of seconds and nanoseconds, read as microseconds."""

NO_UNION: Final = -1
STEP_WORDS: Final = 4
"""Avro: code, column, which branch of the union is null, size. Protobuf: code, column, field number, wire type."""

CHECK_WORDS: Final = 3
"""A node of a schema to check: what it is (a code above, or below), and two numbers."""
ENUM: Final = 20
"""How many symbols."""
RECORD: Final = 21
"""Where its fields are in the list of children, and how many."""
UNION: Final = 22
"""Where its branches are in the list of children, and how many."""
ARRAY: Final = 23
"""The node of its items."""
MAP: Final = 24
"""The node of its values."""
EMPTY: Final = 25
"""Null: no bytes at all."""
CHECK_DEPTH_MAX: Final = 64
"""Records of a recursive schema nested deeper than this are refused."""

"""What the kernels of JSON and CSV and the code around them agree on: kinds of values, marks of rows, sizes."""

from __future__ import annotations

from typing import Final

ABSENT: Final = 0
NULL: Final = 1
TRUE: Final = 2
FALSE: Final = 3
INTEGER: Final = 4
"""`-?` digits."""
NUMBER: Final = 5
"""Any other number of JSON's grammar."""
STRING: Final = 6
"""Its slice is the content between the quotes, free of escapes."""
ESCAPED: Final = 7
OBJECT: Final = 8
ARRAY: Final = 9

DECIDED: Final = 0
UNDECIDED: Final = 1
"""The row goes to the reference, which knows what is wrong with it, or that nothing is."""
NOTHING: Final = 2
"""No value: a tombstone, or a struct that is null."""

DEPTH_MAX: Final = 100
KEYS_MAX: Final = 64
"""Keys of one object that are told apart here, by comparing each with each; with more, the row is undecided."""
OPEN_KEYS_MAX: Final = 1024
"""Keys of all objects that are open at one place of a document."""
FRAME_WORDS: Final = 2
SCRATCH_WORDS: Final = OPEN_KEYS_MAX + (DEPTH_MAX + 1) * FRAME_WORDS

DIGITS_MAX: Final = 18
"""Decimal digits that always fit in 64 bits."""
INSTANT_MIN_MS: Final = -62_135_596_800_000
INSTANT_END_MS: Final = 253_402_300_800_000

CELL_TEXT: Final = 0
"""What a column of delimited records takes: anything."""
CELL_NUMBER: Final = 1
CELL_INSTANT: Final = 2
"""An integer, or text."""
CELL_BOOLEAN: Final = 3

"""Numbers that the decoder's machine code and the Python around it agree on."""

from __future__ import annotations

from typing import Final

HEADER_BYTES: Final = 61
RECORD_BYTES_MIN: Final = 7
"""Seven fields of at least one byte."""
INT64_MAX: Final = 2**63 - 1
OFFSET_MAX: Final = 2**62
"""No log gets there; sums with a batch's deltas cannot overflow below it."""
TIMESTAMP_MS_MAX: Final = INT64_MAX // 1000
"""The last millisecond that can be told in microseconds."""

# One batch in the table that `survey` makes and `parse` takes, as columns of 64 bits.
(
    POSITION,
    SIZE,
    BASE_OFFSET,
    LAST_OFFSET,
    ATTRIBUTES,
    BASE_TIMESTAMP,
    MAX_TIMESTAMP,
    PRODUCER_ID,
    COUNT,
    RECORDS_ADDRESS,
    RECORDS_SIZE,
    IS_CHECKED,
    CRC,
    LEADER_EPOCH,
) = range(14)
TABLE_COLUMNS: Final = 14
TABLE_BYTES: Final = TABLE_COLUMNS * 8

FINE: Final = 0
BAD_MAGIC: Final = 1
BAD_LENGTH: Final = 2
BAD_CRC: Final = 3
BAD_ORDER: Final = 4
BAD_COUNT: Final = 5
BAD_VARINT: Final = 6
BAD_RECORD: Final = 7
BAD_OFFSET: Final = 8
BAD_KEY: Final = 9
BAD_VALUE: Final = 10
BAD_HEADERS: Final = 11
LEFT_OVER: Final = 12

MEANINGS: Final = {
    BAD_MAGIC: "it is not of record format 2, the only one since Kafka 0.11",
    BAD_LENGTH: "its length cannot hold its own header",
    BAD_CRC: "its checksum does not hold",
    BAD_ORDER: "its offsets do not follow those before it",
    BAD_COUNT: "its number of records cannot be right",
    BAD_VARINT: "a record is cut off inside a number",
    BAD_RECORD: "a record's length does not fit the batch",
    BAD_OFFSET: "a record's offset lies outside the batch, or before the record before it",
    BAD_KEY: "a record's key does not fit the record",
    BAD_VALUE: "a record's value does not fit the record",
    BAD_HEADERS: "a record's headers do not fill the rest of it",
    LEFT_OVER: "bytes are left after the last record",
}
"""What a status of the machine code says about a batch."""

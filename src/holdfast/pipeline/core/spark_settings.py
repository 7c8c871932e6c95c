"""The settings of Spark that a pipeline's guarantees and results rest on: a session has them so, or is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

FIXED: Final = {
    # Two copies of a task would be two writers.
    "spark.speculation": "false",
    "spark.sql.execution.sortBeforeRepartition": "true",
    "spark.sql.shuffle.orderIndependentChecksum.enabled": "true",
    "spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch": "true",
    # A sum that overflows, a cast that fails and a key that is there twice are errors.
    "spark.sql.ansi.enabled": "true",
    "spark.sql.mapKeyDedupPolicy": "EXCEPTION",
    # A file of staged rows or of state is read whole, or the batch fails.
    "spark.files.ignoreCorruptFiles": "false",
    "spark.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreInvalidPartitionPaths": "false",
    "spark.sql.files.ignoredPathSegmentRegex": "^[._]",
    "spark.sql.optimizer.metadataOnly": "false",
    # Values come back from such a file as they were written.
    "spark.sql.parquet.outputTimestampType": "INT96",
    "spark.sql.parquet.int96AsTimestamp": "true",
    "spark.sql.parquet.int96TimestampConversion": "false",
    "spark.sql.parquet.int96RebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.inferTimestampNTZ.enabled": "true",
    "spark.sql.parquet.binaryAsString": "false",
    "spark.sql.parquet.fieldId.read.enabled": "false",
    # An expression means the same on another machine, and in the audit.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.timestampType": "TIMESTAMP_LTZ",
    "spark.sql.caseSensitive": "false",
    "spark.sql.icu.caseMappings.enabled": "true",
    "spark.sql.preserveCharVarcharTypeInfo": "false",
    "spark.sql.decimalOperations.allowPrecisionLoss": "true",
    "spark.sql.jsonGenerator.ignoreNullFields": "true",
    "spark.sql.ansi.doubleQuotedIdentifiers": "false",
    "spark.sql.ansi.relationPrecedence": "false",
    "spark.sql.parser.escapedStringLiterals": "false",
    "spark.sql.parser.quotedRegexColumnNames": "false",
    "spark.sql.groupByAliases": "true",
    "spark.sql.groupByOrdinal": "true",
    "spark.sql.orderByOrdinal": "true",
    "spark.sql.variable.substitute": "true",
}
"""What results rest on. But for the time zone these are the values that Spark 4.3 has of itself."""
AS_GOOD: Final = {
    "spark.sql.session.timeZone": {"etc/utc"},
    "spark.sql.parquet.outputTimestampType": {"timestamp_micros"},
}
"""Other values, in lower case, that come to the same."""
LOCAL_CORES: Final = "HOLDFAST_LOCAL_CORES"
"""In the environment of the Python processes of a session on this machine alone: how many tasks run at a time. The one
that plans a source knows neither session nor cluster."""
OF_OLD: Final = "legacy"
"""In the name of a setting of Spark's SQL: it brings back what an older version computed."""


def changed(settings: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The settings that change what results rest on, each with what it has to be."""
    for name, value in settings.items():
        wanted = FIXED.get(name)
        if wanted is not None and value.lower() not in {wanted.lower(), *AS_GOOD.get(name, ())}:
            yield name, repr(wanted)
        elif wanted is None and name.startswith("spark.sql.") and OF_OLD in name.lower():
            yield name, "what Spark has of itself"

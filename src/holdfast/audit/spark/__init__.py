"""The audit by Spark: the same report, for logs larger than memory, and with the steps evaluated again.

    source      every offset of the scope, read by tasks with holdfast's own reader
    steps       what rules, filters and queries say of the records, by their SQL
    sinks       what the sinks hold, set aside as files that tasks can read
    comparing   places held against each other
    auditing    the whole of it

It shares the ledgers' part with the audit in memory (`holdfast.audit.pipeline_audit`), and nothing with the engine.
"""

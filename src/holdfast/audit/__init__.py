"""The audit: proof, offset by offset, that what a topic holds is in the sinks or accounted for.

An auditor is a second reader. It walks the source's log itself, reads what the sinks hold, and compares multisets of
places (topic, topic id, partition, offset, index): counts alone prove nothing, since one row lost and one repeated
leave them as they were. It never imports the engine that wrote the rows nor the sinks' writers; of the pipeline it
knows the definition, the ledger's form and the digest. What it has to take on the pipeline's word, it says.

    model           the words of a report: kinds, fates, findings, verdicts
    scope           what is audited: from which offset to which, and why
    source          the log: what every offset of the scope is
    sinks           what the sinks hold
    lineage         the places that rows name, as arrays
    left            what left before the sinks: dead letters, filtered, duplicate, late
    compare         rows held against the log, place by place
    ledgers, books  what the pipeline says of itself, followed and counted again
    stateful        windows, duplicates, late rows and tables of keys, recomputed
    content         what rows hold, held against their records
    sink_judging    all of it put together, each fault told once and of whom it is true
    pipeline_audit  the audit of one pipeline, from its definition to the report
"""

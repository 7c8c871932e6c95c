"""The audit: proof, offset by offset, that what a topic holds is in the sinks or accounted for.

An auditor is a second reader. It walks the source's log itself, reads what the sinks hold, and compares multisets of
places (topic, topic id, partition, offset, index): counts alone prove nothing, since one row lost and one repeated
leave them as they were. It never imports the engine that wrote the rows nor the sinks' writers; of the pipeline it
knows the definition, the ledger's form and the digest. What it has to take on the pipeline's word, it says.

    model           the words of a report: kinds, fates, findings, verdicts
    source          the log: what every offset of the scope is
    lineage         the places that rows name, as arrays
    sinks           what the sinks hold
    compare         the two held against each other
    pipeline_audit  the whole of it for one pipeline
"""

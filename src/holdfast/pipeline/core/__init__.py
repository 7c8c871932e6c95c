"""What every part of the pipeline shares: failures, the text of SQL, schemas, tallies, lineage, Spark's settings."""

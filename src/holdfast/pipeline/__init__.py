"""From topics to exactly-once sinks on Spark."""

"""Exactly-once sinks: each keeps the ledger of what it has inside its own transaction."""

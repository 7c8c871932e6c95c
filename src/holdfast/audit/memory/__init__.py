"""Steps with a memory, audited: event time, lateness, duplicates, windows and superseded rows, from the log alone."""

from holdfast.audit.memory.check import MemoryCheck, MemoryResult

__all__ = ["MemoryCheck", "MemoryResult"]

"""Stateful steps, audited: event time, lateness, duplicates, windows and superseded rows, from the log alone."""

from holdfast.audit.stateful.examination import StatefulCheck, StatefulResult

__all__ = ["StatefulCheck", "StatefulResult"]

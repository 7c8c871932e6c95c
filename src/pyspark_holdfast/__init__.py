"""Spark finds data sources in packages of this name's kind by itself: `format("holdfast")` needs no registration."""

from holdfast.pipeline.source import HoldfastSource as DefaultSource

__all__ = ["DefaultSource"]

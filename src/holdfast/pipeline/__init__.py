"""From topics to exactly-once sinks on Spark.

    from holdfast.pipeline import Pipeline

Importing this package loads neither Spark nor YAML; names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from holdfast.pipeline.definition.builder import Pipeline
    from holdfast.pipeline.definition.errors import DefinitionError
    from holdfast.pipeline.definition.loading import load_pipeline
    from holdfast.pipeline.definition.model import (
        DeadLetter,
        Decoding,
        DeltaSink,
        EventTime,
        Field,
        KafkaSink,
        ParquetSink,
        PipelineDefinition,
        PostgresSink,
    )

__all__ = [
    "DeadLetter",
    "Decoding",
    "DefinitionError",
    "DeltaSink",
    "EventTime",
    "Field",
    "KafkaSink",
    "ParquetSink",
    "Pipeline",
    "PipelineDefinition",
    "PostgresSink",
    "load_pipeline",
]

_PLACES: Final = {"Pipeline": "builder", "DefinitionError": "errors", "load_pipeline": "loading"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.definition.{_PLACES.get(name, 'model')}")
    found = getattr(module, name)
    globals()[name] = found
    return found

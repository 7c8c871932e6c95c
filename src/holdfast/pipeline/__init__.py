"""From topics to exactly-once sinks on Spark.

    from holdfast.pipeline import Pipeline

Importing this package loads neither Spark nor YAML; names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
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
    from holdfast.pipeline.pipeline import Pipeline

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

_PLACES: Final = {
    "Pipeline": "pipeline",
    "DefinitionError": "definition.errors",
    "load_pipeline": "definition.loading",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_PLACES.get(name, 'definition.model')}")
    found = getattr(module, name)
    globals()[name] = found
    return found

"""A pipeline that a Python file defines, and that can run itself."""

from __future__ import annotations

from typing import Any

from holdfast.errors import from_extra
from holdfast.pipeline.definition.builder import PipelineBuilder
from holdfast.pipeline.engine.progress import Summary


class Pipeline(PipelineBuilder):
    def run(self, *, directory: str = ".", **options: Any) -> Summary:
        """Run it in this process, to the end that its trigger means; options as those of `run_pipeline`."""
        with from_extra("spark", "a pipeline"):
            from holdfast.pipeline.engine.running import run_pipeline

        return run_pipeline(self.definition(directory=directory), **options)

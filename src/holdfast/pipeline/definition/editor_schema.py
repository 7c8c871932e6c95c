"""The JSON Schema of a definition, for editors; made from the table that definitions are read by."""

from __future__ import annotations

import json
from typing import Any

from holdfast.pipeline.definition.model import PIPELINE


def json_schema() -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "holdfast pipeline",
        **PIPELINE.schema(),
    }


def json_schema_text() -> str:
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"

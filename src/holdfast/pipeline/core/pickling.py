"""Functions of a definition on their way to workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def pickled(function: Callable[..., Any]) -> bytes:
    """By value, whatever module it stands in: workers need not have its file."""
    import sys

    from pyspark import cloudpickle as untyped

    cloudpickle: Any = untyped
    module = sys.modules.get(getattr(function, "__module__", ""))
    is_ours = module is not None and module.__name__.split(".")[0] in ("holdfast", "builtins")
    if module is None or is_ours or module.__name__ == "__main__":
        return bytes(cloudpickle.dumps(function))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(function))
    finally:
        cloudpickle.unregister_pickle_by_value(module)

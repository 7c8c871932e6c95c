"""holdfast: move data through Kafka without losing a message.

`holdfast.Broker` embeds a broker in a program; everything else lives in subpackages and is imported from there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.platforms import refusal

if TYPE_CHECKING:
    from holdfast.broker.server.embed import Broker as Broker

__version__ = "0.1.0"
__all__ = ["Broker", "__version__"]


def __getattr__(name: str) -> Any:
    # Imported when asked for: `import holdfast` alone must not cost the broker's start-up imports.
    if name == "Broker":
        if why := refusal():
            raise ImportError(why)
        return import_module("holdfast.broker.server.embed").Broker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

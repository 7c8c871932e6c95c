"""For your tests: pytest fixtures, brokers as processes, faults of disk, clock and network, fakes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.testing.broker import BrokerProcess as BrokerProcess
    from holdfast.testing.broker_thread import BrokerThread as BrokerThread
    from holdfast.testing.topics import NotProduced as NotProduced
    from holdfast.testing.topics import Record as Record
    from holdfast.testing.topics import Topics as Topics

_MODULES = {
    "BrokerProcess": "broker",
    "BrokerThread": "broker_thread",
    "NotProduced": "topics",
    "Record": "topics",
    "Topics": "topics",
}
__all__ = ["BrokerProcess", "BrokerThread", "NotProduced", "Record", "Topics"]


def __getattr__(name: str) -> Any:
    # Imported when asked for: the fakes need no broker.
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

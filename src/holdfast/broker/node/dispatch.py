"""Which handler answers which API; what has no handler here is not offered to clients."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from holdfast.broker.node.context import Answer, RequestContext
from holdfast.errors import MalformedFrame
from holdfast.seams import Now
from holdfast.wire.apis import API_VERSIONS, BY_KEY

Handler = Callable[[Any, RequestContext, Any, Now], Answer]
"""Takes the parts of the broker that it needs (`services`), who asks, the decoded request and the time."""

FAMILIES: Final = {
    "produce": (0,),
    "fetch": (1,),
    "log_offsets": (2, 21, 23),
    "metadata": (3, 75),
    "committed_offsets": (8, 9, 28, 47),
    "group_admin": (10, 15, 16, 42, 69),
    "group_members": (11, 12, 13, 14, 68),
    "cluster": (18, 29, 35, 48, 49, 50, 55, 57, 60),
    "topics": (19, 20, 37, 43, 45, 46),
    "transactions": (22, 24, 25, 26, 27, 61, 65, 66),
    "configs": (32, 33, 44, 74),
}
"""API keys by module of `holdfast.broker.node.handlers`, which is imported when it is first needed. The function that
answers an API has the API's name: `describe_log_dirs` for DescribeLogDirs."""
MODULES: Final = {key: module for module, keys in FAMILIES.items() for key in sorted(keys)}

_handlers: dict[tuple[int, int], Handler] = {}


def is_offered(api_key: int, version: int) -> bool:
    return api_key in MODULES and BY_KEY[api_key].is_served(version)


def find(context: RequestContext) -> Handler | None:
    """The handler for a request, or None when the API or its version is not offered."""
    key = (context.api_key, context.version)
    handler = _handlers.get(key)
    if handler is None and is_offered(*key):
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", BY_KEY[context.api_key].name).lower()
        handler = _handlers[key] = getattr(_module(context.api_key), name)
    return handler


def _module(api_key: int) -> ModuleType:
    return import_module(f"holdfast.broker.node.handlers.{MODULES[api_key]}")


def refuse(context: RequestContext) -> Answer:
    """What Kafka does: ApiVersions is answered in version 0, anything else closes the connection."""
    if context.api_key == API_VERSIONS:
        answer: Answer = _module(API_VERSIONS).unsupported()
        return answer
    raise MalformedFrame(f"API {context.api_key} version {context.version} is not offered")

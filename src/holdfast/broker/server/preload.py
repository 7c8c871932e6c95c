"""Message schemas, loaded before they are needed.

Importing all of them takes over a second, so a start loads the few every client asks for first, and the rest
follows one at a time while the loop has nothing else to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

from holdfast.broker.node.dispatch import MODULES
from holdfast.wire.apis import BY_KEY
from holdfast.wire.messages import preload

FIRST: Final = ((18, 3), (18, 4), (3, 12), (3, 13))
"""ApiVersions and Metadata as current clients send them: what every connection begins with."""
COMMON: Final = (0, 1, 22, 2, 3, 18, 19)
"""Then these APIs, newest versions first, then all others."""
IDLE_SECONDS: Final = 0.05


def preload_first() -> None:
    for api_key, version in FIRST:
        preload(api_key, version)


def preload_when_idle(loop: asyncio.AbstractEventLoop, idle_seconds: Callable[[], float]) -> None:
    """Load the rest, a schema at a time, whenever no request has come for a moment."""
    wanted = preload_one_by_one()

    def step() -> None:
        if idle_seconds() < IDLE_SECONDS:
            loop.call_later(IDLE_SECONDS, step)
            return
        if next(wanted, None) is not None:
            loop.call_later(IDLE_SECONDS / 10, step)

    loop.call_later(IDLE_SECONDS, step)


def preload_one_by_one() -> Iterator[tuple[int, int]]:
    """Load another schema with each step; gives the API key and version it was."""
    for api_key, version in FIRST:
        preload(api_key, version)
        yield api_key, version
    for api_key in (*COMMON, *(key for key in MODULES if key not in COMMON)):
        api = BY_KEY[api_key]
        for version in range(api.max, api.served_from - 1, -1):
            if (api_key, version) not in FIRST:
                preload(api_key, version)
                yield api_key, version

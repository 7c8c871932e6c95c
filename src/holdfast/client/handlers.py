"""What a handler may be, and what it may give back.

A message counts as handled when the call of its handler returned: nothing that the call leaves for later is waited for.
So a handler whose call only begins the work (a coroutine where none is awaited, a generator, a future) is refused:
before the first message where its kind can be seen, and otherwise at its first outcome. Then the client stops. Neither
retries nor the dead-letter topic are for it: the next message would fare the same.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, Awaitable, Callable, Generator
from concurrent.futures import Future
from typing import Any, Final

from holdfast.client.errors import ClientError
from holdfast.client.messages import DeadLetter, Retry
from holdfast.errors import UsageError

UNTOLD: Final = "(its text cannot be made"


class UnusableHandler(ClientError, UsageError):
    """A handler that can never finish a message; no message it was given counts as handled."""


def is_coroutine(handler: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await: `async def`, or an object whose call is."""
    return _is(inspect.iscoroutinefunction, handler)


def check_handler(handler: Callable[..., Any], *, awaits: bool = False, iterates: bool = False) -> None:
    """Refuse a handler of a kind that its caller cannot carry out.

    `awaits` and `iterates` say what the caller does with the outcome of a call.
    """
    if not callable(handler):
        raise UnusableHandler(f"{handler!r} is no function: a handler is called with each message")
    if _is(inspect.isasyncgenfunction, handler) or (
        _is(inspect.isgeneratorfunction, handler) and not iterates
    ):
        raise UnusableHandler(
            f"{_name(handler)} yields: calling it runs none of it, so no message would be handled; return instead"
        )
    if is_coroutine(handler) and not awaits:
        raise UnusableHandler(
            f"{_name(handler)} is `async def`, and nobody awaits it here: no message would be handled; "
            "make it a plain function, or use Consumer, which awaits its handlers"
        )


def check_outcome(outcome: Any, *, iterates: bool = False) -> None:
    """An outcome that was returned counts like one that was raised; one that is yet to come counts as none."""
    if outcome is None:
        return
    if isinstance(outcome, Retry | DeadLetter):
        raise outcome
    if isinstance(outcome, Awaitable | AsyncIterable | Future) or (
        isinstance(outcome, Generator) and not iterates
    ):
        if inspect.iscoroutine(outcome):
            outcome.close()  # or Python warns that nobody awaited it
        raise UnusableHandler(
            f"the handler returned a {type(outcome).__name__}: the work has at most begun, and nobody waits for it. "
            "The message does not count as handled; make the handler finish its work before it returns"
        )


def described(error: BaseException) -> str:
    """An error's class and text, even where making the text fails."""
    text = text_of(error)
    return f"{type(error).__name__} {text}" if text.startswith(UNTOLD) else f"{type(error).__name__}: {text}"


def text_of(error: BaseException) -> str:
    """An error's text, even where making it fails."""
    try:
        return str(error)
    except Exception as failed:  # noqa: BLE001 - the error is told all the same
        return f"{UNTOLD}: {type(failed).__name__})"


def _is(kind: Callable[[Any], bool], handler: Callable[..., Any]) -> bool:
    return kind(handler) or kind(getattr(handler, "__call__", None))  # noqa: B004 - the method itself is asked for


def _name(handler: Callable[..., Any]) -> str:
    return str(getattr(handler, "__qualname__", handler))

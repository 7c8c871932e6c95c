"""How a checker says that a history breaks a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from holdfast.testing.history import Event


class Violation(AssertionError):
    """A history that breaks a rule."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


def broken(rule: str, message: str) -> NoReturn:
    raise Violation(rule, message)


class Checker:
    """Hands each event to the method that is there for its type."""

    def __init__(self, handlers: dict[type[Any], Callable[[Any], None]]) -> None:
        self.handlers = handlers

    def observe(self, event: Event) -> None:
        handler = self.handlers.get(type(event))
        if handler is not None:
            handler(event)

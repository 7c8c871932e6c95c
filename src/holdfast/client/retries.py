"""When a failed message is tried again, and when it is given up on.

Retries are bounded by number and by time, and the wait between two of them grows. Some errors are not worth a second
attempt: they are named by their classes, and a message that meets one is given up on at once. What giving up means is
the consumer's: the dead-letter topic, or stopping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from holdfast.client.handlers import UnusableHandler, described
from holdfast.client.messages import DeadLetter, Retry
from holdfast.errors import UsageError

GiveUp: TypeAlias = Literal["dead-letter", "stop"]


class Again(NamedTuple):
    """Try again after so many seconds."""

    seconds: float


class Enough(NamedTuple):
    """No further attempt here: why."""

    reason: str
    is_final: bool = False
    """Whether no later attempt could succeed either, however long the wait."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """In-place retries: the message stays with its worker, and what is ordered behind it waits."""

    attempts: int = 5
    """How often a message is handed to the handler in all."""
    first_seconds: float = 0.1
    factor: float = 2.0
    longest_seconds: float = 30.0
    within_seconds: float | None = None
    """From the first attempt on; no attempt begins later than that."""
    retried: tuple[type[BaseException], ...] = (Exception,)
    final: tuple[type[BaseException], ...] = ()
    """Errors that no second attempt can mend; they win over `retried`."""
    give_up: GiveUp = "dead-letter"

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise UsageError(f"attempts={self.attempts}: a message is handed over at least once")
        if self.first_seconds < 0 or self.factor < 1 or self.longest_seconds < 0:
            raise UsageError("the wait between attempts cannot be negative or shrink")

    def judge(self, error: BaseException, attempt: int, elapsed_seconds: float) -> Again | Enough:
        """What follows on a failure: `attempt` counts from 1. A handler that cannot be used is nobody's to judge."""
        if isinstance(error, UnusableHandler):
            raise error
        if isinstance(error, DeadLetter):
            return Enough(error.reason, is_final=True)
        if self.is_final(error):
            return Enough(f"{described(error)}", is_final=True)
        if attempt >= self.attempts:
            return Enough(f"{attempt} attempts, the last: {described(error)}")
        wait = self.wait_after(attempt)
        if isinstance(error, Retry) and error.after_seconds is not None:
            wait = error.after_seconds
        if self.within_seconds is not None and elapsed_seconds + wait > self.within_seconds:
            return Enough(f"{self.within_seconds} s have passed, the last: {described(error)}")
        return Again(wait)

    def is_final(self, error: BaseException) -> bool:
        """Whether no attempt, now or later, is worth making."""
        return isinstance(error, (DeadLetter, *self.final)) or not isinstance(error, (Retry, *self.retried))

    def wait_after(self, attempt: int) -> float:
        """Doubling from the first wait up to the longest."""
        exponent = min(attempt - 1, 64)
        return min(self.first_seconds * self.factor**exponent, self.longest_seconds)


NO_RETRIES = RetryPolicy(attempts=1)

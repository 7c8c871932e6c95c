"""The demo's sender, a process of its own: it takes orders from "customers", answers them, and is killed on the way.

It reads on standard input up to which number it may go, and answers on standard output, a line each time, how many
orders it has taken. A customer who got no answer asks again: the next process starts at the first unanswered number.

Two ways of sending:

- with a spool an order is taken once it is on this machine's disk, whatever the broker is doing;
- plain, with confluent-kafka as it is installed, an order is taken once `produce` has returned. That is what many
  programs do; what librdkafka holds in memory then is gone when the process is killed.

    python -m holdfast.demo.sender '{"bootstrap": …, "count": …}'
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Final, Protocol

from holdfast.demo.orders import SOURCE, OrderMessage, Orders

CHUNK: Final = 20
"""Orders that are answered together; with a spool they share a flush of the disk."""
CATCH_UP_S: Final = 0.2
"""A sender that was held up hurries by so much and no more."""
POLL_S: Final = 0.05


@dataclass(frozen=True)
class Errand:
    """What one sender is to do."""

    bootstrap: str
    count: int
    start_ms: int
    seed: int
    first: int
    rate: float
    """Orders a second."""
    spool: str | None
    """None for a plain producer."""

    def as_json(self) -> str:
        return json.dumps(asdict(self))


class Way(Protocol):
    def send(self, messages: Sequence[OrderMessage]) -> None:
        """Hand over; when it returns the customers are told that their orders were taken."""

    def settle(self) -> None:
        """Wait until everything has arrived."""

    def close(self) -> None: ...


class Spooled:
    def __init__(self, bootstrap: str, spool: str) -> None:
        from holdfast.client import Producer

        self._producer = Producer(bootstrap, spool=spool, config={"log_level": 0})

    def send(self, messages: Sequence[OrderMessage]) -> None:
        deliveries = [
            self._producer.send(
                SOURCE,
                message.value,
                key=message.key,
                headers=message.headers,
                partition=message.partition,
            )
            for message in messages
        ]
        deliveries[-1].wait_stored()  # and with it those before

    def settle(self) -> None:
        report = self._producer.flush()
        if not report.is_complete:
            raise SystemExit(f"not delivered: {report.under_way} under way, refused: {report.refused}")

    def close(self) -> None:
        self._producer.close()


class Plain:
    def __init__(self, bootstrap: str) -> None:
        from confluent_kafka import Producer

        self._producer = Producer({"bootstrap.servers": bootstrap, "log_level": 0})

    def send(self, messages: Sequence[OrderMessage]) -> None:
        for message in messages:
            partition = -1 if message.partition is None else message.partition
            while True:
                try:
                    self._producer.produce(
                        SOURCE, message.value, message.key, partition, headers=message.headers
                    )
                    break
                except BufferError:
                    self._producer.poll(POLL_S)
        self._producer.poll(0)

    def settle(self) -> None:
        self._producer.flush()

    def close(self) -> None:
        """It has no such thing: what was not settled is gone."""


class Allowance:
    """How far the sender may go, as it was last told; closed when there is nobody left to tell."""

    def __init__(self, lines: IO[str]) -> None:
        self._until = 0
        self._is_over = False
        self._changed = threading.Condition()
        threading.Thread(target=self._listen, args=(lines,), daemon=True).start()

    def _listen(self, lines: IO[str]) -> None:
        for line in lines:
            with self._changed:
                self._until = int(line)
                self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait_beyond(self, number: int) -> int:
        """Up to where it may go, once that is further than this number."""
        with self._changed:
            self._changed.wait_for(lambda: self._until > number or self._is_over)
            if self._until <= number:
                raise SystemExit("nobody is there to say how far to go")
            return self._until


class Pace:
    """Keeps to a rate without making up for long pauses."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._due_s = time.monotonic()

    def wait(self, orders: int) -> None:
        now = time.monotonic()
        self._due_s = max(self._due_s, now - CATCH_UP_S) + orders / self._rate
        if self._due_s > now:
            time.sleep(self._due_s - now)


def run(errand: Errand, way: Way, allowance: Allowance, answer: Callable[[str], None]) -> None:
    orders = Orders(errand.count, errand.start_ms, errand.seed)
    pace = Pace(errand.rate)
    number = errand.first
    while number < errand.count:
        until = min(errand.count, allowance.wait_beyond(number), number + CHUNK)
        way.send([orders.message(each) for each in range(number, until)])
        answer(f"taken {until}")
        pace.wait(until - number)
        number = until
    # Windows are closed by what comes last, so it must come last.
    way.settle()
    way.send(orders.closing())
    way.settle()
    way.close()
    answer("done")


def main() -> None:
    errand = Errand(**json.loads(sys.argv[1]))
    way: Way = Plain(errand.bootstrap) if errand.spool is None else Spooled(errand.bootstrap, errand.spool)

    def answer(line: str) -> None:
        print(line, flush=True)

    run(errand, way, Allowance(sys.stdin), answer)


if __name__ == "__main__":
    main()

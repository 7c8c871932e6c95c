"""A till that takes orders whether or not the broker is there.

What it shows: `Producer` with a spool. An order is confirmed to the customer when it is on this machine's disk; it
reaches the broker when there is one, also when this program is killed in between and started again.

    holdfast serve --data-dir ./data                                    # in one terminal
    holdfast topics create --topic orders --partitions 3                # in another
    python examples/orders_producer.py --spool ./till --count 100

Stop the broker, send more orders, kill this program with `kill -9`, start both again: every confirmed order arrives.
`holdfast spool status --spool ./till` shows what is waiting. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import random
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress

from holdfast.client import Producer, as_json

ITEMS = ("anchor", "compass", "lantern", "rope", "sextant")


def orders() -> Iterator[dict[str, object]]:
    """What customers want, without end."""
    while True:
        customer = f"customer-{random.randrange(20)}"
        yield {"id": uuid.uuid4().hex, "customer": customer, "item": random.choice(ITEMS)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bootstrap-server", default="localhost:9092")
    parser.add_argument("--topic", default="orders")
    parser.add_argument("--spool", default="./orders-spool", help="a directory for what is not delivered yet")
    parser.add_argument("--count", type=int, help="how many orders to take (without end)")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two orders")
    options = parser.parse_args()

    with (
        suppress(KeyboardInterrupt),
        Producer(options.bootstrap_server, spool=options.spool, value=as_json) as producer,
    ):
        for number, order in enumerate(orders()):
            if number == options.count:
                break
            # Orders of one customer have one key, so they stay in order.
            producer.send(options.topic, order, key=str(order["customer"])).wait_stored()
            print("confirmed", order["id"], flush=True)
            time.sleep(options.pause)


if __name__ == "__main__":
    main()

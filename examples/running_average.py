"""The average of everything a sensor has ever said, right after every reading.

What it shows: `StatefulProcessor`. Sum and count of each sensor are state; state, output and position change in one
transaction. Kill this program at any moment: no reading is counted twice, none is left out.

    holdfast serve --data-dir ./data                                    # in one terminal
    holdfast topics create --topic readings --partitions 3              # in another
    holdfast topics create --topic averages --partitions 3
    python examples/running_average.py --directory ./averages
    printf 'roof\t20.5\nroof\t21.5\n' | holdfast produce --topic readings --property parse.key=true
    holdfast consume --topic averages --from-beginning --isolation-level read_committed --property print.key=true

Readings of a sensor have its name as key, so that they are in one partition, with their state. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import json

from holdfast.client import Message, Output, State, StatefulProcessor


def average(message: Message, state: State) -> list[Output]:
    """One reading in, one average out; a reading that is none changes nothing."""
    if message.key is None or message.value is None:
        return []
    try:
        reading = float(message.value)
    except ValueError:
        return []
    total, count = json.loads(state.get(message.key, b"[0, 0]"))
    total, count = total + reading, count + 1
    state[message.key] = json.dumps([total, count]).encode()
    return [Output("averages", f"{total / count:.3f}".encode(), key=message.key)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bootstrap-server", default="localhost:9092")
    parser.add_argument("--directory", default="./averages", help="where a copy of the state is kept")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of Kafka's consumer"
    )
    options = parser.parse_args()

    StatefulProcessor(
        options.bootstrap_server,
        group="running-average",
        topics=["readings"],
        directory=options.directory,
        config=dict(each.split("=", 1) for each in options.set),
    ).run(average)


if __name__ == "__main__":
    main()

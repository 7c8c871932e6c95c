"""Counts words: one step splits lines, the next one counts.

What it shows: `Processor`, and how to go on by another key. Lines arrive without a key; a word is counted in one place
only if it *is* the key. So `split` reads lines and writes words, each keyed by itself, and `count` keeps a number for
each. Both work in transactions: kill either at any moment, and the counts are right in the end.

    holdfast serve --data-dir ./data                                    # in one terminal
    for topic in lines words counts; do holdfast topics create --topic $topic --partitions 3; done
    python examples/word_count.py split                                 # in another
    python examples/word_count.py count --directory ./word-counts       # in a third
    holdfast produce --topic lines < README.md
    holdfast consume --topic counts --from-beginning --isolation-level read_committed --property print.key=true

Ctrl-C ends either.
"""

from __future__ import annotations

import argparse
import re

from holdfast.client import Message, Output, Processor, State, StatefulProcessor

WORD = re.compile(r"\w+")


def split(message: Message) -> list[Output]:
    """One line in, its words out."""
    line = (message.value or b"").decode("utf-8", "replace")
    return [Output("words", b"1", key=word.encode()) for word in WORD.findall(line.lower())]


def count(message: Message, state: State) -> list[Output]:
    """One word in, its new count out."""
    if message.key is None:
        return []
    total = int(state.get(message.key, b"0")) + 1
    state[message.key] = b"%d" % total
    return [Output("counts", b"%d" % total, key=message.key)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["split", "count"])
    parser.add_argument("--bootstrap-server", default="localhost:9092")
    parser.add_argument(
        "--directory", default="./word-counts", help="where `count` keeps a copy of its state"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of Kafka's consumer"
    )
    options = parser.parse_args()

    server = options.bootstrap_server
    settings = dict(each.split("=", 1) for each in options.set)
    if options.step == "split":
        Processor(server, group="word-splitter", topics=["lines"], config=settings).run(split)
    else:
        StatefulProcessor(
            server,
            group="word-counter",
            topics=["words"],
            directory=options.directory,
            config=settings,
        ).run(count)


if __name__ == "__main__":
    main()

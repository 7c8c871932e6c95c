"""Books transfers between accounts, each of them exactly once.

What it shows: `DatabaseSink`. The two accounts, the record of the transfer and the position in the topic are one
transaction of the database. Kill this program at any moment, start two of them: no transfer is booked twice, none is
forgotten, and no money appears or disappears.

    holdfast serve --data-dir ./data                                    # in one terminal
    holdfast topics create --topic transfers --partitions 3             # in another
    holdfast sink migrate --database bank.sqlite                        # or postgresql://me@localhost/bank
    python examples/money_transfer.py --database bank.sqlite
    echo '{"id": "t-1", "from": "ann", "to": "bob", "cents": 250}' | holdfast produce --topic transfers

An account that is not known begins with 1,000.00. A transfer that would overdraw one is recorded as refused: that is an
answer, not an error. A transfer that was *sent* twice is two transfers: send with `delivery="exactly-once"`, or make
the id unique. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from holdfast.client import DatabaseSink, DeadLetter, Message, RetryPolicy

OPENING_CENTS = 100_000
TABLES = (
    f"create table if not exists accounts (name text primary key, cents bigint not null default {OPENING_CENTS})",
    "create table if not exists transfers (id text not null, giver text not null, taker text not null, "
    "cents bigint not null, is_booked boolean not null)",
)


def create_tables(database: str) -> None:
    """The bank's own tables, if they are not there yet; those of the sink are made by `holdfast sink migrate`."""
    if database.startswith("postgresql://"):
        import psycopg

        with psycopg.connect(database) as connection:
            for statement in TABLES:
                connection.execute(statement)
    else:
        import sqlite3

        with sqlite3.connect(database.removeprefix("sqlite:///")) as connection:
            for statement in TABLES:
                connection.execute(statement)


def booking(mark: str) -> Callable[[Message, Any], None]:
    """The handler; `mark` is how the database's driver writes a parameter."""

    def book(message: Message, connection: Any) -> None:
        def run(statement: str, *values: object) -> Any:
            return connection.execute(statement.replace("?", mark), values)

        try:
            asked = json.loads(message.value or b"")
            transfer, giver, taker = str(asked["id"]), str(asked["from"]), str(asked["to"])
            cents = int(asked["cents"])
        except (ValueError, KeyError, TypeError) as error:
            raise DeadLetter(f"not a transfer: {error!r}") from error
        if cents <= 0:
            raise DeadLetter(f"a transfer of {cents} cents")
        for name in sorted({giver, taker}):
            run("insert into accounts (name) values (?) on conflict do nothing", name)
        taken = run(
            "update accounts set cents = cents - ? where name = ? and cents >= ?", cents, giver, cents
        )
        is_booked = taken.rowcount == 1
        if is_booked:
            run("update accounts set cents = cents + ? where name = ?", cents, taker)
        run("insert into transfers values (?, ?, ?, ?, ?)", transfer, giver, taker, cents, is_booked)

    return book


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bootstrap-server", default="localhost:9092")
    parser.add_argument("--database", default="bank.sqlite", help="postgresql://… or a SQLite file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of Kafka's consumer"
    )
    options = parser.parse_args()

    create_tables(options.database)
    sink = DatabaseSink(
        options.bootstrap_server,
        group="bank",
        topics=["transfers"],
        database=options.database,
        retry=RetryPolicy(),
        create_topics=True,
        config=dict(each.split("=", 1) for each in options.set),
    )
    sink.run(booking("%s" if options.database.startswith("postgresql://") else "?"))


if __name__ == "__main__":
    main()

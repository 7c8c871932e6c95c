"""`holdfast dlq`, on both engines: counted, shown, and sent back once."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from holdfast.cli.redriving import Redrive
from holdfast.client.dead_letter_dialects import Failure, Header, failure_headers
from holdfast.testing.engines import await_decided

Run = Callable[..., Any]


@pytest.fixture(scope="session")
def bootstrap_servers(engine_address: str) -> str:
    return engine_address


class Topics:
    def __init__(self, run: Run, bootstrap: str) -> None:
        self.run = run
        self.bootstrap = bootstrap
        self.origin = f"orders-{uuid.uuid4().hex[:10]}"
        self.letters = f"{self.origin}-dlt"
        for topic, partitions in ((self.origin, "2"), (self.letters, "1")):
            self.ok("topics", "create", "--topic", topic, "--partitions", partitions)

    def ok(self, *arguments: str) -> Any:
        result = self.run(*arguments)
        assert result.returncode == 0, result.stderr
        return result

    def write(self, topic: str, messages: Iterable[tuple[bytes, list[Header]]]) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap, "enable.idempotence": True})
        for value, headers in messages:
            producer.produce(topic, value, b"k", headers=[*headers])
        assert producer.flush(30) == 0

    def dead(self, number: int, error: str = "ValueError", partition: int = 1) -> tuple[bytes, list[Header]]:
        failure = Failure(
            self.origin, partition, number, 500, "mailer", error, "unlucky", "2 attempts", "at x", 2, 900
        )
        own: list[Header] = [("trace", b"%d" % number), ("hf-id", b"00ff:1:%d" % number)]
        return b"%d" % number, [*own, *failure_headers(failure)]

    def read(self, topic: str, partitions: int = 2) -> list[Any]:
        assert await_decided(self.bootstrap, topic)
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": "reader",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 10,  # the end is told when a fetch comes back
            }
        )
        consumer.assign([TopicPartition(topic, at, 0) for at in range(partitions)])
        messages: list[Any] = []
        ends = 0
        while ends < partitions:
            message = consumer.poll(10)
            assert message is not None
            if message.error() is not None:
                ends += 1
            else:
                messages.append(message)
        consumer.close()
        return messages

    def json(self, *arguments: str) -> Any:
        return json.loads(self.ok(*arguments, "--output", "json").stdout)


@pytest.fixture
def topics(run_here: Run, bootstrap_servers: str) -> Topics:
    return Topics(run_here, bootstrap_servers)


def test_dead_letters_are_counted_by_origin_and_error(topics: Topics) -> None:
    topics.write(
        topics.letters,
        [
            topics.dead(0),
            topics.dead(1),
            topics.dead(2, "KeyError"),
            (
                b"s",
                [("__streams.errors.topic", b"clicks"), ("__streams.errors.exception", b"SerdeException")],
            ),
            (b"?", []),
        ],
    )
    rows = topics.json("dlq", "list", "--topic", topics.letters)["dead_letters"]
    assert [(row["origin"], row["error"], row["dialect"], row["count"]) for row in rows] == [
        (None, None, None, 1),
        ("clicks", "SerdeException", "streams", 1),
        (topics.origin, "KeyError", "holdfast", 1),
        (topics.origin, "ValueError", "holdfast", 2),
    ]
    table = topics.ok("dlq", "list", "--topic", topics.letters, "--filter", "error=KeyError").stdout.decode()
    assert len(table.splitlines()) == 2
    assert topics.letters in topics.ok("dlq", "list").stdout.decode()


def test_a_dead_letter_is_shown_by_its_place_or_by_a_filter(topics: Topics) -> None:
    topics.write(topics.letters, [topics.dead(0), topics.dead(1, "KeyError")])
    text = topics.ok(
        "dlq", "show", "--topic", topics.letters, "--partition", "0", "--offset", "1", "--stack"
    ).stdout
    for part in (f"{topics.letters}-0@1", f"{topics.origin}-1@1", "KeyError: unlucky", "trace=1", "| at x"):
        assert part in text.decode()
    assert b"@0" not in text
    found = topics.json("dlq", "show", "--topic", topics.letters, "--filter", "error=ValueError")
    assert (found["offset"], found["failure"]["offset"], found["failure"]["stack"]) == (0, 0, "at x")
    first = topics.ok("dlq", "show", "--topic", topics.letters, "--max", "1").stdout.decode()
    assert "@0  " in first
    assert "@1  " not in first
    missing = topics.run("dlq", "show", "--topic", topics.letters, "--partition", "0", "--offset", "9")
    assert (missing.returncode, b"no such dead letter" in missing.stderr) == (1, True)


def test_messages_of_an_ordinary_topic_are_not_shown_as_dead_letters(topics: Topics) -> None:
    topics.write(topics.origin, [(b"an order", [("trace", b"1")])])
    refused = topics.run("dlq", "show", "--topic", topics.origin)
    assert (refused.returncode, refused.stdout) == (1, b"")
    assert b"nothing in" in refused.stderr
    assert topics.json("dlq", "list", "--topic", topics.origin) == {"dead_letters": []}
    topics.write(topics.origin, [topics.dead(7)])
    assert topics.json("dlq", "show", "--topic", topics.origin)["failure"]["offset"] == 7


def test_a_redrive_tells_first_and_sends_only_when_told(topics: Topics) -> None:
    topics.write(topics.letters, [topics.dead(number) for number in range(3)])
    plan = topics.run("dlq", "redrive", "--topic", topics.letters)
    assert plan.returncode == 0
    assert b"--execute carries it out" in plan.stderr
    assert topics.read(topics.origin) == []
    done = topics.json("dlq", "redrive", "--topic", topics.letters, "--execute")
    assert done["destinations"] == {topics.origin: 3}
    messages = topics.read(topics.origin)
    assert [(each.value(), each.key(), each.partition()) for each in messages] == [
        (b"%d" % number, b"k", 1) for number in range(3)
    ]
    assert messages[2].headers() == [
        ("trace", b"2"),
        ("hf-origin-id", b"00ff:1:2"),
        ("hf-original-timestamp", b"500"),
        ("hf-redrives", b"1"),
        ("hf-redriven-from", f"{topics.letters}-0@2".encode()),
    ]
    assert messages[0].timestamp()[1] > 500
    (row,) = topics.json("dlq", "list", "--topic", topics.letters)["dead_letters"]
    assert (row["count"], row["redriven"]) == (3, 3)


def test_what_was_redriven_is_not_sent_again_under_any_filter(topics: Topics) -> None:
    topics.write(
        topics.letters, [topics.dead(at, "KeyError" if at % 3 == 1 else "ValueError") for at in range(9)]
    )
    redrive = ("dlq", "redrive", "--topic", topics.letters, "--execute")
    assert topics.json(*redrive, "--filter", "error=KeyError")["redriven"] == 3
    assert topics.json(*redrive, "--max", "2")["redriven"] == 2
    rest = topics.json(*redrive)
    assert (rest["redriven"], rest["redriven_before"]) == (4, 2)
    assert topics.json(*redrive)["redriven"] == 0
    topics.write(topics.letters, [topics.dead(9)])
    assert topics.json(*redrive)["redriven"] == 1
    assert sorted(int(each.value()) for each in topics.read(topics.origin)) == list(range(10))


@pytest.mark.check
def test_a_redrive_that_another_overtakes_sends_nothing_twice(
    topics: Topics, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics.write(topics.letters, [topics.dead(number) for number in range(3)])
    redrive = ("dlq", "redrive", "--topic", topics.letters, "--execute")
    begin = Redrive._make_producer

    def late(redriving: Redrive) -> Any:
        """Another one comes before it has its transactional id, and finds one dead letter more."""
        topics.write(topics.letters, [topics.dead(3)])
        assert run(*redrive).returncode == 0
        return begin(redriving)

    monkeypatch.setattr(Redrive, "_make_producer", late)
    assert topics.json(*redrive)["redriven"] == 0
    assert sorted(int(each.value()) for each in topics.read(topics.origin)) == [0, 1, 2, 3]


def test_dead_letters_of_every_dialect_go_home(topics: Topics) -> None:
    failure = Failure(topics.origin, 0, 3, 400, "g", "E", "m")
    topics.write(
        topics.letters,
        [
            (dialect.encode(), [("own", b"1"), *failure_headers(failure, dialect)])
            for dialect in ("streams", "connect", "spring", "holdfast")
        ],
    )
    assert topics.json("dlq", "redrive", "--topic", topics.letters, "--execute")["redriven"] == 4
    messages = topics.read(topics.origin)
    assert [each.value() for each in messages] == [b"streams", b"connect", b"spring", b"holdfast"]
    for message in messages:
        assert {name for name, _ in message.headers()} <= {
            "own",
            "hf-redrives",
            "hf-redriven-from",
            "hf-original-timestamp",
        }


def test_without_an_origin_it_needs_a_destination(topics: Topics) -> None:
    topics.write(topics.letters, [(b"lost", []), topics.dead(1)])
    result = topics.run("dlq", "redrive", "--topic", topics.letters, "--execute")
    assert (result.returncode, b"do not tell where they came from" in result.stderr) == (1, True)
    assert [each.value() for each in topics.read(topics.origin)] == [b"1"]
    told = topics.json("dlq", "redrive", "--topic", topics.letters, "--to", topics.origin, "--execute")
    assert (told["redriven"], told["redriven_before"]) == (1, 1)


def test_a_redrive_keeps_to_its_rate(topics: Topics) -> None:
    topics.write(topics.letters, [topics.dead(number) for number in range(3)])
    result = topics.json("dlq", "redrive", "--topic", topics.letters, "--rate", "20", "--execute")
    assert result["redriven"] == 3


def test_topics_that_are_not_there_are_named(topics: Topics) -> None:
    topics.write(topics.letters, [(b"x", list(failure_headers(Failure("gone-topic", 0, 0))))])
    result = topics.run("dlq", "redrive", "--topic", topics.letters, "--execute")
    assert result.returncode == 1
    assert b"'gone-topic'" in result.stderr
    assert topics.run("dlq", "redrive", "--topic", "no-such-dlt").returncode == 1
    assert topics.run("dlq", "show", "--topic", "no-such-dlt").returncode == 1
    assert topics.run("dlq", "list", "--topic", "no-such-dlt").returncode == 1


@pytest.mark.parametrize(
    "flags",
    [
        ("show", "--topic", "t", "--offset", "3"),
        ("redrive", "--topic", "t", "--dry-run", "--execute"),
        ("redrive", "--topic", "t", "--rate", "0"),
        ("redrive", "--topic", "t", "--to", "t"),
        ("list", "--filter", "nonsense"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(run_here: Run, flags: tuple[str, ...]) -> None:
    assert run_here("dlq", *flags).returncode == 2

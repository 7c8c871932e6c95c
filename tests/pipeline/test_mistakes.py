"""The mistakes people make in a definition or at a run: one line says where it stands, what was found and expected.

Nothing else is printed: no traceback, no stack of the JVM, no second line. Each message stands here as a stranger
reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.pipeline.absent.without_spark import PlainRouter, without_spark

from holdfast.admin.settings import ConnectionSettings
from holdfast.broker.server.embed import Broker
from holdfast.cli import exits
from holdfast.cli.app import run_command
from holdfast.client import Producer
from holdfast.pipeline.engine import running

PARQUET = "  - parquet:\n      path: out\n"
DEFINITION = f"""\
pipeline: orders
source:
  topics: [orders]
  value:
    format: json
    fields:
      id: long
      amount: double?
sinks:
{PARQUET}trigger: available-now
"""
MORE = DEFINITION.replace("amount: double?\n", "amount: double?\n      city: string?\n")
STEP = "steps:\n  - filter:\n      name: large\n      where: {}\nsinks:\n"
AWAY = "  - postgres:\n      url: postgresql://u@127.0.0.1:{port}/d\n      table: t\n"
MISTAKES = {
    "key": (
        ("topics:", "topisc:"),
        2,
        "3:3: source.topisc: source has no key 'topisc'; did you mean 'topics'?",
    ),
    "type": (
        ("id: long", "id: lnog"),
        2,
        "7:11: source.value.fields.id: 'lnog' is no type; did you mean 'long'?",
    ),
    "value": (
        ("available-now", "availible-now"),
        2,
        "12:10: trigger: expected 'available-now' or a duration such as 10s: ",
    ),
    "topic": (
        ("[orders]", "[order]"),
        2,
        "3:11: source.topics: there is no topic 'order' on {address}; did you mean 'orders'?",
    ),
    "variable": (
        ("path: out", "path: ${HF_NOT_SET}/out"),
        2,
        "11:13: sinks[0].parquet.path: the environment has no variable HF_NOT_SET (or it is empty); set it, or write "
        "${HF_NOT_SET:-default}",
    ),
    "sink away": (
        (PARQUET, AWAY),
        3,
        "11:7: sinks[0].postgres: PostgreSQL cannot be reached: connection failed: ",
    ),
    "broker down": (
        ("  value:", "  bootstrap: 127.0.0.1:{port}\n  value:"),
        3,
        "4:14: source.bootstrap: cannot reach the broker at 127.0.0.1:{port}: Connection refused",
    ),
    "no place": (
        ("path: out", "path: /proc/orders"),
        3,
        "11:7: sinks[0].parquet: /proc/orders cannot be written: No such file or directory; nothing was committed",
    ),
    "no home": (
        ("trigger:", "home: /proc/orders\ntrigger:"),
        3,
        "12:7: home: /proc/orders: No such file or directory",
    ),
}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the definition goes, beside a broker with a topic that has an order."""
    with Broker(str(tmp_path / "broker")) as broker:
        broker.create_topic("orders")
        broker.create_topic("orders-dlt")
        with Producer(broker.bootstrap_servers) as producer:
            producer.send("orders", json.dumps({"id": 1, "amount": 2.5}).encode()).wait()
        monkeypatch.setenv("HOLDFAST_BOOTSTRAP_SERVER", broker.bootstrap_servers)
        monkeypatch.setattr(ConnectionSettings, "connect_timeout_ms", 1_000)
        monkeypatch.chdir(tmp_path)
        yield tmp_path


@pytest.fixture
def run(directory: Path, port: int, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`pipeline run` of a definition, in a session that is there: the exit code and what it said."""

    def run_once(text: str, session: Any) -> tuple[int, str]:
        (directory / "p.yaml").write_text(text)
        capfd.readouterr()
        with patch.object(running, "open_session", lambda *given: contextlib.nullcontext(session)):
            code = exits.run(lambda: run_command(("pipeline", "run", "p.yaml")))
        return code, "".join(
            line for line in capfd.readouterr().err.splitlines(True) if not is_of_another(line)
        )

    def is_of_another(line: str) -> bool:
        """Clients that earlier tests of this process left open speak of brokers that are gone."""
        return line.startswith("%") and not any(address in line for address in (own, f"127.0.0.1:{port}"))

    own = os.environ["HOLDFAST_BOOTSTRAP_SERVER"]
    return run_once


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where nobody listens, nor anybody else can."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_says_where_and_what(
    run: Callable[..., tuple[int, str]], port: int, mistake: str
) -> None:
    (old, new), code, expected = MISTAKES[mistake]
    text = DEFINITION.replace(old, new.replace("{port}", str(port)))
    with without_spark(PlainRouter) as session:
        found = run(text, session)
    for name, value in {"port": str(port), "address": os.environ["HOLDFAST_BOOTSTRAP_SERVER"]}.items():
        expected = expected.replace(f"{{{name}}}", value)
    assert found[0] == code
    assert found[1].startswith(f"p.yaml:{expected}")
    assert found[1].count("\n") == 1, found[1]


def test_other_columns_than_the_sink_holds_are_named_with_its_line(
    run: Callable[..., tuple[int, str]], directory: Path
) -> None:
    with without_spark(PlainRouter) as session:
        assert run(DEFINITION, session)[0] == 0
        with Producer(os.environ["HOLDFAST_BOOTSTRAP_SERVER"]) as producer:
            producer.send("orders", json.dumps({"id": 2, "amount": 1, "city": "Riga"}).encode()).wait()
        code, said = run(MORE, session)
    assert code == 1
    assert said.splitlines() == [
        "p.yaml:9:13: source.value.fields.city: new column. Sink parquet takes rows with the columns it holds and no "
        "others (`schema: fail`). Write `schema: add-columns` in the sink: what it lacks is added, what is gone is "
        "stored as null.",
        "holdfast: The definition cannot take over from the one that ran last. Nothing was read or written; "
        "`holdfast pipeline check FILE --against-running` lists every change.",
    ]
    (directory / ".holdfast" / "orders" / "definition.json").unlink()
    with without_spark(PlainRouter) as session:
        code, said = run(MORE, session)
    assert code == 2
    assert said.splitlines()[-1] == (
        "p.yaml:12:7: sinks[0].parquet: the rows do not have the columns that sink 'parquet' holds: new 'city'. "
        "Allow it with `schema: add-columns` in the sink, or give the rows the columns it has"
    )


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("amonut > 1", "there is no column 'amonut'; did you mean 'amount'?"),
        ("uper(id) = '1'", "Spark has no function 'uper'; did you mean 'upper'?"),
        ("amount > > 1", "this is not SQL: Spark cannot read on at '>'"),
        ("amount > array(1)", "[DATATYPE_MISMATCH"),
    ],
)
def test_wrong_sql_is_told_in_words(
    run: Callable[..., tuple[int, str]], spark: Any, where: str, expected: str
) -> None:
    code, said = run(DEFINITION.replace("sinks:\n", STEP.format(where)), spark)
    assert code == 2
    (line,) = said.splitlines()
    assert line.startswith(f"p.yaml:12:14: steps[0].filter.where: {expected}")

"""The flags of `holdfast audit` for what is no pipeline: which go together, and what comes out."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.audit.model import AuditError
from holdfast.cli.audit_other import Other, audit_other, check_flags, mode_of
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import World

CHECKPOINT = {"checkpoint": "c", "sink": "parquet:x", "match": "a = key"}


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        (CHECKPOINT, "--checkpoint"),
        (
            {**CHECKPOINT, "where": "key = 'x'", "is_distinct": True, "source": 0, "dead_letters": "d"},
            "--checkpoint",
        ),
        ({"group": "g", "sink": "delta:x", "topics": ["t"], "start": "earliest"}, "--group"),
        ({"topics": ["a", "b"], "key": "key", "with_values": True, "to_bootstrap": "h:1"}, "--key"),
        ({"topics": ["a", "b", "c"]}, "--spool"),
        ({"spools": ["d"]}, "--spool"),
    ],
)
def test_flags_that_go_together(flags: dict[str, Any], mode: str) -> None:
    other = Other(**flags)
    assert other.is_asked_for
    check_flags(other, None)
    assert mode_of(other) == mode


@pytest.mark.parametrize(
    ("flags", "pipeline", "complaint"),
    [
        ({}, None, "name a pipeline, or what else to audit"),
        ({"sink": "parquet:x"}, None, "name a pipeline, or what else to audit"),
        ({"group": "g"}, "orders.yaml", "--group is about something else than a pipeline"),
        ({"where": "key = 'x'"}, "orders.yaml", "--where is about something else"),
        ({"checkpoint": "c"}, None, "--checkpoint needs --sink"),
        ({"checkpoint": "c", "sink": "parquet:x"}, None, "--checkpoint needs --match"),
        ({**CHECKPOINT, "key": "key"}, None, "--key means nothing with --checkpoint"),
        ({**CHECKPOINT, "start": "earliest"}, None, "--from means nothing with --checkpoint"),
        ({"group": "g"}, None, "--group needs --sink"),
        ({"topics": ["a"], "key": "key"}, None, "--key compares two topics"),
        ({"topics": ["a", "b"], "key": "key", "sink": "topic:b"}, None, "--sink means nothing with --key"),
        ({"topics": ["a"], "match": "a = key"}, None, "--match means nothing with --spool"),
    ],
)
def test_flags_that_do_not_are_refused(flags: dict[str, Any], pipeline: str | None, complaint: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_flags(Other(**flags), pipeline)
    assert complaint in str(refused.value)


def test_a_pipeline_may_begin_somewhere_and_have_spools() -> None:
    check_flags(Other(start="earliest", spools=["d"]), "orders.yaml")


def test_a_properties_file_says_how_to_get_there(world: World, tmp_path: Path) -> None:
    world.send_orders(range(3), topic="a")
    world.send_orders(range(3), topic="b")
    config = tmp_path / "client.properties"
    config.write_text(
        f"bootstrap.servers={world.settings['bootstrap.servers']}\nsecurity.protocol=PLAINTEXT\n"
    )
    other = Other(topics=["a", "b"], key="value.id", to_config=str(config))
    assert audit_other(other, None, str(config)).verdict == "proven"
    config.write_text("socket.connection.setup.timeout.ms=200\n")
    elsewhere = Other(topics=["a", "b"], key="value.id", to_bootstrap="127.0.0.1:1", to_config=str(config))
    with pytest.raises(AuditError, match=r"127\.0\.0\.1:1"):
        audit_other(elsewhere, world.settings["bootstrap.servers"], None)


def test_what_is_not_there_is_no_failed_audit(world: World) -> None:
    world.send_orders(range(3), topic="a")
    with pytest.raises(AuditError, match="there is no topic 'none'") as refused:
        audit_other(Other(topics=["a", "none"], key="key"), world.settings["bootstrap.servers"], None)
    assert refused.value.exit_code == 3


def test_the_command_prints_the_report_and_ends_with_the_verdict(world: World, tmp_path: Path) -> None:
    world.send_orders(range(6))
    world.batches({0: 6}, start={0: 0})
    world.rows([0, 1, 2, 4, 5, 5])
    flags = [
        "--checkpoint",
        str(world.checkpoint),
        "--sink",
        f"parquet:{world.out}",
        "--match",
        "id = value.id",
    ]
    page = tmp_path / "audit.html"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "holdfast.cli", "audit", *flags),
            *("--bootstrap-server", world.settings["bootstrap.servers"]),
            *("--output", "json", "--html", str(page)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert (report["mode"], report["verdict"]) == ("checkpoint", "failed")
    assert {(each["fate"], *each["ranges"][0]) for each in report["findings"]} == {
        ("lost", 3, 3),
        ("duplicated", 5, 5),
    }
    assert "duplicated" in page.read_text()

"""Fixes that work: a file that takes the fix of a finding no longer has it. And words that say what counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.doctor.client_defaults import Client, Role
from holdfast.doctor.client_settings import Setting, make_settings
from holdfast.doctor.files import Asked, examine_files
from holdfast.doctor.findings import Finding, Location
from holdfast.doctor.rules import check_settings

CASES: list[dict[str, Any]] = [
    case
    for case in yaml.safe_load((Path(__file__).parent / "corpus" / "settings.yaml").read_text("utf-8"))
    if case.get("expect")
    and "broker" not in case
    and ("producer" in case) != ("consumer" in case)
    and not (case.get("producer") or case["consumer"])["file"].endswith((".json", ".yml"))
]
"""Files to which a line can simply be added."""


def findings(path: Path, role: Role, client: Client | None) -> list[Finding]:
    asked = Asked([str(path)], client=client) if role == "producer" else Asked((), [str(path)], client=client)
    return examine_files(asked).examination.findings


def is_plain(found: Finding) -> bool:
    if found.fix is None or found.fix.kind != "settings":
        return False
    return "spring." not in found.fix.text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_fix_removes_its_finding(case: dict[str, Any], tmp_path: Path) -> None:
    role: Role = "producer" if "producer" in case else "consumer"
    part = case[role]
    client = Client(part["client"]) if "client" in part else None
    path = tmp_path / part["file"]
    path.write_text(part["text"], encoding="utf-8")
    for found in [each for each in findings(path, role, client) if is_plain(each)]:
        assert found.fix is not None
        fix = found.fix.text.splitlines()[0]
        name = fix.partition("=" if "=" in fix else ":")[0].strip()
        kept = [line for line in part["text"].splitlines() if line and not line.startswith(name)]
        path.write_text("\n".join([*kept, fix]) + "\n", encoding="utf-8")
        after = findings(path, role, client)
        assert found.id not in {each.id for each in after if each.id != "HF000"} or found.id == "HF000", fix
        assert found.found not in {each.found for each in after}


def test_most_findings_have_such_a_fix(tmp_path: Path) -> None:
    plain = 0
    for case in CASES:
        role: Role = "producer" if "producer" in case else "consumer"
        path = tmp_path / case[role]["file"]
        path.write_text(case[role]["text"], encoding="utf-8")
        plain += any(map(is_plain, findings(path, role, None)))
    assert plain > len(CASES) // 2


def settings(client: Client, role: Role = "producer", **written: Any) -> list[Finding]:
    pairs = [
        Setting(name.replace("__", "."), value, Location("f", line))
        for line, (name, value) in enumerate(written.items(), 1)
    ]
    return list(check_settings(make_settings(role, client, Location("f"), pairs)))


def test_a_default_is_called_one() -> None:
    (reset,) = [each for each in settings(Client.JAVA, "consumer") if each.id == "HF305"]
    assert "auto.offset.reset=latest (the default of the Java client)" in reset.found
    (written,) = [
        each
        for each in settings(Client.AIOKAFKA, "consumer", auto_offset_reset="latest")
        if each.id == "HF305"
    ]
    assert "auto_offset_reset=latest:" in written.found


def test_idempotence_that_is_off_in_silence_is_said() -> None:
    (found,) = settings(Client.JAVA, acks="1")
    assert "idempotence is off with it, without an error" in found.found


@pytest.mark.parametrize(
    ("client", "name", "meant"),
    [
        (Client.LIBRDKAFKA, "enable.idempotance", "enable.idempotence"),
        (Client.LIBRDKAFKA, "buffer.memory", "queue.buffering.max.kbytes"),
        (Client.LIBRDKAFKA, "max.request.size", "message.max.bytes"),
        (Client.JAVA, "message.timeout.ms", "delivery.timeout.ms"),
        (Client.JAVA, "request.required.acks", "acks"),
        (Client.KAFKA_PYTHON, "enable.idempotence", "enable_idempotence"),
        (Client.AIOKAFKA, "batch_size", "max_batch_size"),
    ],
)
def test_an_unknown_name_comes_with_the_one_that_was_meant(client: Client, name: str, meant: str) -> None:
    made = make_settings("producer", client, Location("f"), [Setting(name, "1", Location("f", 1))])
    said = [
        each.found for each in check_settings(made) if each.id == "HF000" and "did you mean" in each.found
    ]
    assert said
    assert f"did you mean {meant}?" in said[0]

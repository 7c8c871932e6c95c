"""docs/CONFIGURATION.md names exactly the settings that holdfast acts on; importing settings stays cheap."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from holdfast.config.catalog import BROKER, DYNAMIC_ONLY, TOPIC
from holdfast.config.descriptions import reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "CONFIGURATION.md"


def test_document_ends_with_the_tables_of_the_catalogue() -> None:
    text = DOCUMENT.read_text()
    assert text.endswith(reference()), "run: python -m holdfast.config.descriptions"


def test_tables_name_exactly_what_is_acted_on() -> None:
    _, _, tables = DOCUMENT.read_text().partition("## Settings that holdfast adds")
    named = re.findall(r"^\| `([^`]+)` \|", tables, re.MULTILINE)
    broker = [name for name, setting in BROKER.items() if setting.acted_on]
    topic = [name for name, setting in TOPIC.items() if setting.acted_on]
    assert sorted(named) == sorted(broker + topic)


def test_every_setting_the_prose_mentions_exists() -> None:
    prose = DOCUMENT.read_text().removesuffix(reference())
    mentioned = re.findall(r"`([a-z]+(?:\.[a-z]+)+)(?:=[^`]*)?`", prose)
    assert mentioned
    unknown = [
        name for name in mentioned if name not in {*BROKER, *TOPIC, *DYNAMIC_ONLY, "server.properties"}
    ]
    assert unknown == []


def test_importing_settings_loads_nothing_heavy() -> None:
    program = (
        "import sys, holdfast.errors; before = set(sys.modules);"
        "import holdfast.config, holdfast.config.describe, holdfast.config.dynamic;"
        "print(*sorted(name for name in set(sys.modules) - before if not name.startswith('holdfast.config')))"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert finished.stdout.split() == []

"""The tables of docs/CONFIGURATION.md, written from the catalogue so that they cannot disagree with it.

`python -m holdfast.config.reference` prints them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from holdfast.config.catalog import BROKER, OUR_DEFAULTS, SYNONYMS, TOPIC
from holdfast.config.definitions import Setting
from holdfast.config.descriptions import DESCRIPTIONS
from holdfast.config.values import format_value


def reference() -> str:
    """Three tables in Markdown: our settings, Kafka's broker settings we act on, and the topic settings."""
    acted_on = [setting for _, setting in sorted(BROKER.items()) if setting.acted_on]
    topic = [setting for _, setting in sorted(TOPIC.items()) if setting.acted_on]
    ours = [setting for setting in acted_on if setting.is_ours]
    kafkas = [setting for setting in acted_on if not setting.is_ours]
    return "\n".join(
        (
            "## Settings that holdfast adds",
            "",
            *_table(ours, "Can be altered", lambda setting: setting.scope.value),
            "",
            "## Kafka's broker settings that holdfast acts on",
            "",
            *_table(kafkas, "Can be altered", lambda setting: setting.scope.value),
            "",
            "## Topic settings that holdfast acts on",
            "",
            *_table(topic, "Falls back to", lambda setting: _fallbacks(setting.name)),
            "",
        )
    )


def _fallbacks(name: str) -> str:
    return ", ".join(f"`{synonym.name}`" for synonym in SYNONYMS.get(name, ()))


def _table(settings: Iterable[Setting], heading: str, cell: Callable[[Setting], str]) -> list[str]:
    lines = [f"| Name | Type | Default | Allowed | {heading} | What it does |", "|---|---|---|---|---|---|"]
    for setting in settings:
        default = format_value(setting.default)
        shown = "" if default in (None, "") else f"`{default}`"
        if setting.name in OUR_DEFAULTS:
            shown += " (Kafka's differs)"
        allowed = "" if setting.rule is None else setting.rule.allowed
        cells = (
            f"`{setting.name}`",
            setting.type.name.lower(),
            shown.strip(),
            allowed,
            cell(setting),
            DESCRIPTIONS[setting.name],
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    print(reference(), end="")

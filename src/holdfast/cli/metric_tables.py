"""The tables of docs/METRICS.md, written from the tables of families so that they cannot disagree with them.

`python -m holdfast.cli.metric_tables` prints them.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.audit import metrics as audit
from holdfast.broker.node import metrics as broker
from holdfast.client import metrics as client
from holdfast.doctor import exporting as exporter
from holdfast.exposition import Families
from holdfast.pipeline.engine import metrics as pipeline

COMPONENTS: dict[str, Families] = {
    "The broker": broker.FAMILIES,
    "The exporter": exporter.FAMILIES,
    "Clients": client.FAMILIES,
    "Pipelines": pipeline.FAMILIES,
    "Continuous audits": audit.FAMILIES,
}


def reference() -> str:
    return "\n".join(line for title, families in COMPONENTS.items() for line in _section(title, families))


def _section(title: str, families: Families) -> Iterator[str]:
    yield f"## {title}\n"
    yield "| name | kind | labels | what it tells |"
    yield "|---|---|---|---|"
    for family in families.values():
        labels = ", ".join(f"`{label}`" for label in family.labels)
        yield f"| `{family.name}` | {family.kind} | {labels} | {family.meaning} |"
    yield ""


if __name__ == "__main__":
    print(reference(), end="")

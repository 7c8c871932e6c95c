"""Every command of holdfast, imported: what the suite's nursery does once for all processes that it forks."""

from __future__ import annotations

import importlib

import confluent_kafka.admin  # noqa: F401
import pydantic.type_adapter  # noqa: F401
import typer.rich_utils  # noqa: F401

import holdfast.broker.server.run
import holdfast.cli.serve  # noqa: F401
from holdfast.cli.app import COMMANDS

for place in COMMANDS.values():
    importlib.import_module(f"holdfast.cli.{place.module}")

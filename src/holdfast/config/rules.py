"""Rules that bind several broker settings, or one in a way its type and range cannot say.

They are Kafka's, as far as they concern what holdfast acts on, so that a file that starts the one starts
the other; stricter only where Kafka takes what means nothing (a negative flush interval, a shortest
compaction lag above the longest).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.config.definitions import Value
from holdfast.config.values import format_value
from holdfast.errors import ConfigError

_MEBIBYTE = 1 << 20


def check_broker_values(values: Mapping[str, Value], where: Mapping[str, str]) -> None:
    """ConfigError that lists every rule the typed values of the broker's settings break."""
    mistakes = [*_log_mistakes(values), *_server_mistakes(values)]
    if mistakes:
        raise ConfigError("\n".join(_at(name, values, where) + ": " + what for name, what in mistakes))


def _at(name: str, values: Mapping[str, Value], where: Mapping[str, str]) -> str:
    place = f" ({where[name]})" if name in where else ""
    return f"{name}={format_value(values[name])}{place}"


def _log_mistakes(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    mistakes: list[tuple[str, str]] = []
    retention = ("log.retention.ms", "log.retention.minutes", "log.retention.hours")
    counts = next(name for name in retention if values[name] is not None)
    if values[counts] == 0:
        mistakes.append((counts, "allowed is -1 for no limit, or 1 or more"))
    mistakes += [
        (name, "allowed is 0 or more")
        for name in ("log.flush.interval.ms", "log.flush.scheduler.interval.ms", "log.roll.jitter.ms")
        if values[name] is not None and values[name] < 0
    ]
    if values["log.roll.ms"] is not None and values["log.roll.ms"] < 1:
        mistakes.append(("log.roll.ms", "allowed is 1 or more"))
    shortest = values["log.cleaner.min.compaction.lag.ms"]
    longest = values["log.cleaner.max.compaction.lag.ms"]
    if shortest > longest:
        name = "log.cleaner.min.compaction.lag.ms"
        mistakes.append((name, f"allowed is at most log.cleaner.max.compaction.lag.ms, {longest}"))
    threads = max(1, values["log.cleaner.threads"])
    if values["log.cleaner.dedupe.buffer.size"] <= threads * _MEBIBYTE:
        name = "log.cleaner.dedupe.buffer.size"
        mistakes.append((name, f"allowed is more than one MiB for each of {threads} log.cleaner.threads"))
    if values["remote.log.storage.system.enable"]:
        name = "remote.log.storage.system.enable"
        mistakes.append((name, "holdfast keeps every segment on its own disk"))
    return mistakes


def _server_mistakes(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    mistakes: list[tuple[str, str]] = []
    if "broker" not in values["process.roles"]:
        mistakes.append(("process.roles", "holdfast serves clients, so the roles must include broker"))
    if values["authorizer.class.name"]:
        # Ignoring it would open to everybody what its owner meant to be closed.
        mistakes.append(
            ("authorizer.class.name", "access control is not served yet; remove it to go without")
        )
    largest_request = values["socket.request.max.bytes"]
    if 0 < (values["queued.max.request.bytes"] or -1) < largest_request:
        name = "queued.max.request.bytes"
        mistakes.append((name, f"allowed is at least socket.request.max.bytes, {largest_request}, or -1"))
    delay_ms = values["connection.failed.authentication.delay.ms"]
    if 0 <= values["connections.max.idle.ms"] <= delay_ms:
        name = "connections.max.idle.ms"
        what = f"allowed is more than connection.failed.authentication.delay.ms, {delay_ms}, or -1"
        mistakes.append((name, what))
    return mistakes

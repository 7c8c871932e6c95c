"""Settings of the underlying client: safe unless somebody says otherwise, by name.

Every dotted setting of librdkafka passes through. Those that decide whether a message can be lost have our default,
and a value that opens a way to lose or duplicate one is refused with the risk it takes (HFnnn), unless its name stands
in the argument `unsafe`. A name in `unsafe` that is not given, or is harmless, is refused too: an old exception must
not outlive its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from holdfast.client.errors import UnsafeSetting
from holdfast.errors import ConfigError

Settings: TypeAlias = dict[str, Any]

INFINITE: Final = 0
"""librdkafka's word for a message time-out that never comes."""
DELIVERY_TIMEOUT_MS: Final = 300_000
DELIVERY_TIMEOUT_MIN_MS: Final = 60_000
"""A restart of a broker takes this long with a large log; giving up earlier loses what was waiting."""
RECOVERY: Final[Mapping[str, Any]] = {"metadata.recovery.strategy": "none"}
"""librdkafka 2.16, when every broker is away, drops those it knew, and may then wait for ever on one it has dropped:
send_offsets_to_transaction does, after the one broker was killed, and a consumer's heartbeats stop until its session is
over. `none` is what librdkafka did before it had the setting. In storms in which the broker is killed, frozen and cut
off, clients with `none` always came back, of both group protocols, transactional or not (tests/crash).
"""
SESSION_TIMEOUT_MS: Final = 45_000
SPOOL_BOUND: Final = "spool.max.bytes"
SPOOL_BOUND_MIN: Final = 4096

ALIASES: Final[Mapping[str, str]] = {
    "request.required.acks": "acks",
    "delivery.timeout.ms": "message.timeout.ms",
    "message.send.max.retries": "retries",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "metadata.broker.list": "bootstrap.servers",
    "compression.codec": "compression.type",
    "queue.buffering.max.ms": "linger.ms",
}
"""Two names of one setting: ours is checked under the name on the right."""


_SHARED: Final = (
    "bootstrap.",
    "security.",
    "sasl.",
    "ssl.",
    "enable.ssl.certificate.verification",
    "socket.",
    "client.",
    "broker.",
    "reconnect.",
    "log",
    "oauth",
)


class Danger(NamedTuple):
    """What one setting can do to messages."""

    setting: str
    is_dangerous: Callable[[Any], bool]
    risk: str
    explanation: str


def _is_false(value: Any) -> bool:
    return str(value).strip().lower() in ("false", "0", "no", "off")


def _is_true(value: Any) -> bool:
    return str(value).strip().lower() in ("true", "1", "yes", "on")


def _below(limit: int) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        number = int(value)
        return 0 < number < limit

    return check


PRODUCER_DANGERS: Final = (
    Danger(
        "acks",
        lambda value: str(value).strip() not in ("all", "-1"),
        "HF102",
        "a message is confirmed before it is safe, and dies with the leader",
    ),
    Danger(
        "enable.idempotence",
        _is_false,
        "HF106",
        "a retry may store a message twice or behind a later one",
    ),
    Danger(
        "message.timeout.ms",
        _below(DELIVERY_TIMEOUT_MIN_MS),
        "HF103",
        f"messages are given up on while a broker restarts; {DELIVERY_TIMEOUT_MIN_MS} or more, or 0 for never",
    ),
    Danger("retries", lambda value: int(value) < 3, "HF103", "a passing fault of a broker fails the message"),
)

CONSUMER_DANGERS: Final = (
    Danger(
        "enable.auto.commit",
        _is_true,
        "HF301",
        "offsets are committed by time, before the work is done",
    ),
    Danger(
        "enable.auto.offset.store",
        _is_true,
        "HF301",
        "a message counts as done when it is handed out, not when it was worked on",
    ),
    Danger(
        "auto.offset.reset",
        lambda value: str(value).strip().lower() in ("latest", "largest", "end"),
        "HF305",
        "a group without a valid committed offset, and new partitions (HF304), skip what is already there",
    ),
    Danger(
        "isolation.level",
        lambda value: str(value).strip().lower() == "read_uncommitted",
        "HF310",
        "messages of transactions that were taken back are handed out",
    ),
    Danger(
        "check.crcs",
        _is_false,
        "HF205",
        "a message damaged on its way is handed out as if it were whole",
    ),
)


def producer_settings(
    bootstrap: str,
    config: Mapping[str, Any],
    unsafe: Collection[str] = (),
    *,
    message_timeout_ms: int = DELIVERY_TIMEOUT_MS,
) -> Settings:
    """What a producer is made with."""
    defaults: Settings = {
        "bootstrap.servers": bootstrap,
        "acks": "all",
        "enable.idempotence": True,
        "message.timeout.ms": message_timeout_ms,
        **RECOVERY,
    }
    return _merged(defaults, config, unsafe, PRODUCER_DANGERS)


def shared_settings(settings: Mapping[str, Any]) -> Settings:
    """Those that any client of the same brokers needs: where they are, and how to be let in."""
    return {name: value for name, value in settings.items() if name.startswith(_SHARED)}


def admin_settings(settings: Mapping[str, Any]) -> Settings:
    """For an admin client beside another one: it logs warnings, not that it is closed before all is served."""
    return {"log_level": 4, **shared_settings(settings)}


def spool_settings(bootstrap: str, config: Mapping[str, Any], unsafe: Collection[str] = ()) -> Settings:
    """What the producer behind a spool is made with: it never gives a message up."""
    for name in ("message.timeout.ms", "delivery.timeout.ms"):
        if str(config.get(name, INFINITE)) != str(INFINITE):
            raise ConfigError(f"{name}={config[name]}: what a spool holds is never given up; leave it out")
    return producer_settings(bootstrap, config, unsafe, message_timeout_ms=INFINITE)


def spool_bound(value: Any) -> int:
    """How much a spool may hold, in bytes."""
    try:
        bound = int(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{SPOOL_BOUND}={value!r} is not a number") from error
    if bound < SPOOL_BOUND_MIN:
        raise ConfigError(f"{SPOOL_BOUND}={bound}: {SPOOL_BOUND_MIN} is the least that is of use")
    return bound


def consumer_settings(
    bootstrap: str, group: str | None, config: Mapping[str, Any], unsafe: Collection[str] = ()
) -> Settings:
    """What a consumer is made with. It commits nothing by itself and stops where its committed offset has vanished."""
    defaults: Settings = {
        "bootstrap.servers": bootstrap,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "isolation.level": "read_committed",
        "check.crcs": True,
        **RECOVERY,
        "enable.partition.eof": False,
    }
    if group is not None:
        defaults["group.id"] = group
    return _merged(defaults, config, unsafe, CONSUMER_DANGERS)


def is_incremental(settings: Mapping[str, Any]) -> bool:
    """Whether a consumer made with these gives up and gets partitions one by one in a rebalance."""
    strategies = str(settings.get("partition.assignment.strategy", ""))
    return str(settings.get("group.protocol", "classic")).lower() == "consumer" or "cooperative" in strategies


def _merged(
    defaults: Settings, config: Mapping[str, Any], unsafe: Collection[str], dangers: Iterable[Danger]
) -> Settings:
    given = _under_one_name(config)
    settings = {**defaults, **given}
    wanted = {ALIASES.get(name, name) for name in unsafe}
    for danger in dangers:
        value = given.get(danger.setting)
        if value is None or not _dangerous(danger, value):
            continue
        if danger.setting not in wanted:
            raise UnsafeSetting(
                f"{danger.setting}={value}: {danger.explanation} ({danger.risk}). "
                f"If that is wanted, say so: unsafe=({danger.setting!r},)"
            )
        wanted.discard(danger.setting)
    if wanted:
        raise ConfigError(
            f"unsafe names {', '.join(sorted(wanted))}, and nothing unsafe is set there: leave it out"
        )
    return settings


def _dangerous(danger: Danger, value: Any) -> bool:
    try:
        return danger.is_dangerous(value)
    except ValueError as error:
        raise ConfigError(f"{danger.setting}={value!r} is not a number") from error


def _under_one_name(config: Mapping[str, Any]) -> Settings:
    settings: Settings = {}
    for name, value in config.items():
        known = ALIASES.get(name, name)
        if known in settings and settings[known] != value:
            raise ConfigError(
                f"{name} and {known} are one setting and have two values: {value}, {settings[known]}"
            )
        settings[known] = value
    return settings

"""What can be lost with the settings of one client alone.

Each rule looks at one client's settings and yields findings. A rule fires on what the client will do, defaults
included, and says which of it was written and which was not. It stays silent where a value is not known.

Thresholds are few, and each has its reason beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from holdfast.doctor.client_defaults import Client, own_name
from holdfast.doctor.client_settings import ClientSettings, check_names, check_values
from holdfast.doctor.findings import Finding, Fix, Severity, finding

Rule = Callable[[ClientSettings], Iterator[Finding]]

DELIVERY_TIMEOUT_MS_MIN: Final = 30_000
"""A broker that dies is missed after 9 s (broker.session.timeout.ms), then a leader is elected; thrice that."""
MAX_BLOCK_MS_MIN: Final = 1_000
"""Less than the first request for metadata may take."""
POLL_INTERVAL_MS_MIN: Final = 30_000
"""A poll brings up to 500 records: less leaves under 60 ms for each."""
SESSION_TIMEOUT_MS_MIN: Final = 6_000
"""group.min.session.timeout.ms of a broker: less is refused."""
TRANSACTION_TIMEOUT_MS_MAX: Final = 900_000
"""transaction.max.timeout.ms of a broker: more is refused."""
IN_FLIGHT_MAX: Final = 5
"""Batches a broker remembers for each idempotent producer and partition."""


def check_settings(client: ClientSettings) -> Iterator[Finding]:
    """Everything one client's settings say: names, values, and what can be lost."""
    yield from check_names(client)
    yield from check_values(client)
    for rule in PRODUCER_RULES if client.role == "producer" else CONSUMER_RULES:
        yield from rule(client)


# Producers


def is_idempotent(client: ClientSettings) -> bool | None:
    """Whether the producer will number its batches; None when it cannot be known or would refuse to start."""
    if client.written("transactional.id"):
        return True
    wanted = client.flag("enable.idempotence")
    if not wanted:
        return wanted
    if client.written("enable.idempotence"):
        return None if any(_against_idempotence(client)) else True
    return not any(_against_idempotence(client))


def _against_idempotence(client: ClientSettings) -> Iterator[str]:
    """Settings that were written and with which no producer can be idempotent."""
    if client.written("acks") and client.text("acks") in ("0", "1"):
        yield client.said("acks")
    if client.written("retries") and client.number("retries") == 0:
        yield client.said("retries")
    in_flight = client.number("max.in.flight.requests.per.connection")
    written = client.written("max.in.flight.requests.per.connection")
    if written and in_flight is not None and in_flight > IN_FLIGHT_MAX:
        yield client.said("max.in.flight.requests.per.connection")


def refused_idempotence(client: ClientSettings) -> Iterator[Finding]:
    explicit = client.written("enable.idempotence") and client.flag("enable.idempotence")
    against = list(_against_idempotence(client))
    if against and (explicit or client.written("transactional.id")):
        name = "enable.idempotence" if explicit else "transactional.id"
        yield client.finding(
            "HF000",
            name,
            f" cannot be had with {' and '.join(against)}: the producer refuses to start",
            severity=Severity.ERROR,
            fix=Fix(f"remove {' and '.join(against)}", "advice"),
            related=("HF102", "HF106"),
        )
    elif client.written("transactional.id") and client.written("enable.idempotence") and explicit is False:
        yield finding(
            "HF000",
            client.place_of("enable.idempotence"),
            f"{client.said('transactional.id')} cannot be had with {client.said('enable.idempotence')}",
            severity=Severity.ERROR,
            fix=client.set_to("enable.idempotence", "true"),
        )


def acks(client: ClientSettings) -> Iterator[Finding]:
    asked = client.text("acks")
    if asked not in ("0", "1"):
        return
    if client.client is Client.AIOKAFKA and not client.written("acks") and is_idempotent(client) is not False:
        return  # its default is all as soon as idempotence is asked for
    who = "nobody is waited for" if asked == "0" else "the leader alone is waited for"
    silently = (
        "; idempotence is off with it, without an error"
        if client.client in (Client.JAVA, Client.KAFKA_PYTHON) and not client.written("enable.idempotence")
        else ""
    )
    related = ("HF101", "HF209") if asked == "0" else ("HF209",)
    loses = "messages the leader never stored, without any error" if asked == "0" else None
    yield client.finding("HF102", "acks", f": {who}{silently}", "all", loses=loses, related=related)


def gives_up_early(client: ClientSettings) -> Iterator[Finding]:
    # In aiokafka the time-out of a request is the life of a batch.
    name = "request.timeout.ms" if client.client is Client.AIOKAFKA else "delivery.timeout.ms"
    timeout_ms = client.number(name)
    endless = client.client is Client.LIBRDKAFKA and timeout_ms == 0
    if timeout_ms is not None and timeout_ms < DELIVERY_TIMEOUT_MS_MIN and not endless:
        why = f": given up after {timeout_ms / 1000:g} s, sooner than a broker is replaced"
        yield client.finding("HF103", name, why, str(_delivery_timeout_ms(client)))
    retries = client.number("retries")
    if client.written("retries") and retries is not None and 0 <= retries < 3:
        attempts = f"{retries + 1} attempt{'s' * (retries > 0)}"
        bound = own_name(client.client, "delivery.timeout.ms")
        yield client.finding(
            "HF103",
            "retries",
            f": a message is given up after {attempts}, within a second of a leader's change",
            fix=Fix(f"remove {client.said('retries')}: {bound} bounds them", "advice"),
        )


def _delivery_timeout_ms(client: ClientSettings) -> int:
    """Two minutes, or as long as a transaction lasts where librdkafka allows no more."""
    longest = client.number("transaction.timeout.ms")
    if client.client is Client.LIBRDKAFKA and client.written("transactional.id") and longest is not None:
        return min(120_000, longest)
    return 120_000


def outlives_transaction(client: ClientSettings) -> Iterator[Finding]:
    delivery, transaction = client.number("delivery.timeout.ms"), client.number("transaction.timeout.ms")
    if client.client is not Client.LIBRDKAFKA or not client.written("transactional.id"):
        return
    if not client.written("delivery.timeout.ms") or delivery is None or transaction is None:
        return
    if delivery > transaction:
        why = f" is more than {client.said('transaction.timeout.ms')}: the producer refuses to start"
        yield client.finding("HF000", "delivery.timeout.ms", why, str(transaction), severity=Severity.ERROR)


def contradictory_times(client: ClientSettings) -> Iterator[Finding]:
    if client.client not in (Client.JAVA, Client.KAFKA_PYTHON):
        return
    delivery, linger, request = (
        client.number(name) for name in ("delivery.timeout.ms", "linger.ms", "request.timeout.ms")
    )
    if delivery is None or linger is None or request is None or delivery >= linger + request:
        return
    if not client.written("delivery.timeout.ms"):
        return  # raised by itself when only the other two were given
    together = f"{client.said('linger.ms')} and {client.said('request.timeout.ms')} together"
    yield client.finding(
        "HF000",
        "delivery.timeout.ms",
        f" is less than {together}: the producer refuses to start",
        "120000",
        severity=Severity.ERROR,
        related=("HF103",),
    )


def lingering(client: ClientSettings) -> Iterator[Finding]:
    """librdkafka drops a message whose time is over while it still lingers."""
    linger, timeout_ms = client.number("linger.ms"), client.number("delivery.timeout.ms")
    if client.client is not Client.LIBRDKAFKA or linger is None or not timeout_ms or linger < timeout_ms:
        return
    yield client.finding(
        "HF000",
        "linger.ms",
        f" is not less than {client.said('delivery.timeout.ms')}: a message's time is over before it is sent",
        at=("linger.ms", "delivery.timeout.ms"),
        severity=Severity.ERROR,
        related=("HF103",),
    )


def full_buffer(client: ClientSettings) -> Iterator[Finding]:
    max_block_ms = client.number("max.block.ms")
    if max_block_ms is not None and client.written("max.block.ms") and max_block_ms < MAX_BLOCK_MS_MIN:
        why = ": send fails at once when the buffer is full or a leader is unknown"
        yield client.finding("HF105", "max.block.ms", why, "60000")


def unnumbered(client: ClientSettings) -> Iterator[Finding]:
    if is_idempotent(client) is not False or client.text("acks") in ("0", None):
        return
    if client.number("retries") == 0:
        return
    acks_named = client.client is Client.AIOKAFKA and client.text("acks") == "1"
    switched_off = not client.written("enable.idempotence") and list(_against_idempotence(client))
    if switched_off and client.client in (Client.JAVA, Client.KAFKA_PYTHON) and client.text("acks") == "1":
        return  # told by HF102
    if switched_off and client.client in (Client.JAVA, Client.KAFKA_PYTHON):
        what = f"{' and '.join(switched_off)} turns idempotence off, without an error"
    else:
        what = client.said("enable.idempotence")
    in_flight = client.number("max.in.flight.requests.per.connection")
    reorders = in_flight is not None and in_flight > 1 and client.client is not Client.AIOKAFKA
    effect = "duplicates and reorders" if reorders else "duplicates"
    yield finding(
        "HF106",
        client.place_of("enable.idempotence", "max.in.flight.requests.per.connection"),
        f"{what}: a batch that is sent again {effect}",
        fix=client.set_to("enable.idempotence", "true"),
        related=("HF102",) if acks_named else (),
    )


def transaction_times(client: ClientSettings) -> Iterator[Finding]:
    timeout_ms = client.number("transaction.timeout.ms")
    if timeout_ms is None or not client.written("transaction.timeout.ms"):
        return
    if timeout_ms > TRANSACTION_TIMEOUT_MS_MAX:
        yield client.finding(
            "HF411",
            "transaction.timeout.ms",
            " is more than a broker allows by default (900000): it is refused, or a producer that hangs holds readers "
            "back that long",
            "60000",
            severity=Severity.WARNING,
        )


# Consumers


def auto_commit(client: ClientSettings) -> Iterator[Finding]:
    if client.flag("enable.auto.commit") is not True:
        return
    if client.client is Client.LIBRDKAFKA and client.flag("enable.auto.offset.store") is not True:
        return  # only what the program stored is committed
    if client.client in (Client.LIBRDKAFKA, Client.AIOKAFKA):
        severity = Severity.ERROR
        how = "offsets are committed in the background while the message is still being handled"
    else:
        severity = Severity.WARNING
        how = "the next poll commits what the last one returned, handled or not"
    instead = "commit() after handling"
    if client.client is Client.LIBRDKAFKA:
        instead += "; or enable.auto.offset.store=false instead, and store_offsets() after handling"
    yield client.finding(
        "HF301",
        "enable.auto.commit",
        f": {how}",
        severity=severity,
        fix=Fix(
            client.line("enable.auto.commit", "false") + "\n# and " + instead,
            "code" if client.style == "python" else "settings",
        ),
        related=("HF302", "HF303"),
    )


def starts_at_the_end(client: ClientSettings) -> Iterator[Finding]:
    reset = client.text("auto.offset.reset")
    if reset not in ("latest", "by_duration"):
        return
    why = ": where there is no valid committed offset, what is in the topic is skipped"
    yield client.finding("HF305", "auto.offset.reset", why, "earliest", related=("HF304",))


def reads_aborted(client: ClientSettings) -> Iterator[Finding]:
    if client.written("isolation.level") and client.text("isolation.level") == "read_uncommitted":
        why = ": messages of aborted transactions are delivered"
        yield client.finding("HF310", "isolation.level", why, "read_committed", severity=Severity.NOTE)


def membership_times(client: ClientSettings) -> Iterator[Finding]:
    session, heartbeat, interval = (
        client.number(name)
        for name in ("session.timeout.ms", "heartbeat.interval.ms", "max.poll.interval.ms")
    )
    if session is not None and client.written("session.timeout.ms") and session < SESSION_TIMEOUT_MS_MIN:
        why = " is less than a broker allows by default (6000): refused"
        yield client.finding("HF000", "session.timeout.ms", why, "45000", related=("HF307",))
    if session is not None and heartbeat is not None and heartbeat * 3 > session:
        refused = heartbeat >= session
        what = (
            "no heartbeat arrives in time" if refused else "one heartbeat that is late loses the partitions"
        )
        yield client.finding(
            "HF307",
            "heartbeat.interval.ms",
            f" with {client.said('session.timeout.ms')}: {what}",
            str(max(1, session // 3)),
            at=("heartbeat.interval.ms", "session.timeout.ms"),
            severity=Severity.ERROR if refused else Severity.WARNING,
        )
    if interval is None or not client.written("max.poll.interval.ms"):
        return
    if interval < POLL_INTERVAL_MS_MIN:
        why = f": handling that takes {interval / 1000:g} s loses the partitions"
        yield client.finding("HF308", "max.poll.interval.ms", why, "300000", related=("HF307",))
    if client.client is Client.LIBRDKAFKA and session is not None and interval < session:
        yield client.finding(
            "HF000",
            "max.poll.interval.ms",
            f" is less than {client.said('session.timeout.ms')}: the consumer refuses to start",
            severity=Severity.ERROR,
            related=("HF308",),
        )


def fetch_sizes(client: ClientSettings) -> Iterator[Finding]:
    receive, fetch = client.number("receive.message.max.bytes"), client.number("fetch.max.bytes")
    if not client.written("receive.message.max.bytes") or receive is None or fetch is None:
        return
    if client.client is Client.LIBRDKAFKA and receive < fetch + 512:
        why = f" is not 512 above {client.said('fetch.max.bytes')}: the consumer refuses to start"
        yield client.finding(
            "HF208", "receive.message.max.bytes", why, str(fetch + 512), severity=Severity.ERROR
        )


PRODUCER_RULES: Final[tuple[Rule, ...]] = (
    refused_idempotence,
    acks,
    gives_up_early,
    contradictory_times,
    lingering,
    outlives_transaction,
    full_buffer,
    unnumbered,
    transaction_times,
)
CONSUMER_RULES: Final[tuple[Rule, ...]] = (
    auto_commit,
    starts_at_the_end,
    reads_aborted,
    membership_times,
    fetch_sizes,
)

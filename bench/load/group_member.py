"""A member's way to its first message, and a successor's: from bare sockets, and with confluent-kafka.

Each walk is made by a group of its own, on a topic of one partition that has records. The clock of a join runs from
the first request about the group, on a connection that is there already, to the first batch. The clock of a
succession starts when the session of the member that died is over, which a bare socket knows to the moment: it is
the last heartbeat plus the session's time-out.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from confluent_kafka import Consumer

from bench.group_protocol import REBALANCE_IN_PROGRESS, ClassicMember, ConsumerMember, assignment
from bench.protocol import ProtocolError

HEARTBEAT_S = 0.002
"""Between two heartbeats of a member that waits: short beside what is measured, and no load."""
TIMEOUT_S = 60.0
SESSION_TIMEOUT_MS = 10_000


def join(spec: dict[str, Any]) -> dict[str, Any]:
    """`count` members one after the other, each joining a new group; bare sockets."""
    host, port = _address(spec)
    walk = _classic_join if spec["protocol"] == "classic" else _consumer_join
    wait_for_coordinators(host, port, spec["topic"])
    return {"seconds": [walk(host, port, spec["topic"]) for _ in range(spec["count"])]}


def _classic_join(host: str, port: int, topic: str) -> float:
    member = ClassicMember(host, port, _group(), topic, session_timeout_ms=SESSION_TIMEOUT_MS)
    try:
        begun_at = time.monotonic()
        member.find_coordinator()
        (partition,) = member.join_alone()
        member.read_first(partition)
        return time.monotonic() - begun_at
    finally:
        member.die()


def _consumer_join(host: str, port: int, topic: str) -> float:
    member = ConsumerMember(host, port, _group(), topic)
    try:
        begun_at = time.monotonic()
        member.find_coordinator()
        _beat_until_given(member)
        member.read_first(0)
        return time.monotonic() - begun_at
    finally:
        member.die()


def wait_for_coordinators(host: str, port: int, topic: str) -> None:
    """Join groups until one lets us: the first request about a group makes the coordinators' topic."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        member = ConsumerMember(host, port, _group(), topic)
        try:
            member.find_coordinator()
            member.heartbeat()
        except ProtocolError:
            _not_after(deadline)
            time.sleep(0.1)
        else:
            return
        finally:
            member.die()


def client_join(spec: dict[str, Any]) -> dict[str, Any]:
    """The same with confluent-kafka, from `subscribe()` to the first message `poll()` returns."""
    wait_for_coordinators(*_address(spec), spec["topic"])
    return {"seconds": [_client_join(spec) for _ in range(spec["count"])]}


def _client_join(spec: dict[str, Any]) -> float:
    consumer = Consumer(
        {
            "bootstrap.servers": spec["bootstrap_servers"],
            "group.id": _group(),
            "group.protocol": spec["protocol"],
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "socket.nagle.disable": True,
        }
    )
    consumer.list_topics(spec["topic"], timeout=TIMEOUT_S)
    begun_at = time.monotonic()
    consumer.subscribe([spec["topic"]])
    message = consumer.poll(TIMEOUT_S)
    seconds = time.monotonic() - begun_at
    if message is None or message.error() is not None:
        raise SystemExit(f"no first message: {message and message.error()}")
    consumer.close()
    return seconds


def succeed(spec: dict[str, Any]) -> dict[str, Any]:
    """`count` successions one after the other, beyond the session's time-out; bare sockets."""
    host, port = _address(spec)
    walk = _classic_succession if spec["protocol"] == "classic" else _consumer_succession
    session_timeout_ms = spec["session_timeout_ms"]
    wait_for_coordinators(host, port, spec["topic"])
    return {"seconds": [walk(host, port, spec["topic"], session_timeout_ms) for _ in range(spec["count"])]}


def _classic_succession(host: str, port: int, topic: str, session_timeout_ms: int) -> float:
    group = _group()
    first = ClassicMember(host, port, group, topic, session_timeout_ms)
    second = ClassicMember(host, port, group, topic, session_timeout_ms)
    try:
        first.find_coordinator()
        first.join_alone()
        second.send_join()
        while first.heartbeat() != REBALANCE_IN_PROGRESS:
            time.sleep(HEARTBEAT_S)
        first.send_join()
        members = first.receive_join().members
        second.receive_join()
        if set(members) != {first.member_id, second.member_id}:
            raise SystemExit(f"the group has members {members}")
        given = first.sync({first.member_id: assignment(topic, [0]), second.member_id: b""})
        if given != [0] or second.sync({}):
            raise SystemExit("the leader's assignment was not handed out")
        last_heartbeat_at = time.monotonic()
        first.heartbeat()
        first.die()
        while second.heartbeat() != REBALANCE_IN_PROGRESS:
            time.sleep(HEARTBEAT_S)
        (partition,) = second.join_alone()
        second.read_first(partition)
        return time.monotonic() - last_heartbeat_at - session_timeout_ms / 1000
    finally:
        first.die()
        second.die()


def _consumer_succession(host: str, port: int, topic: str, session_timeout_ms: int) -> float:
    group = _group()
    first = ConsumerMember(host, port, group, topic)
    second = ConsumerMember(host, port, group, topic)
    try:
        first.find_coordinator()
        _beat_until_given(first)
        alone = first.epoch
        second.heartbeat()
        deadline = time.monotonic() + TIMEOUT_S
        while not first.epoch == second.epoch > alone:
            _not_after(deadline)
            time.sleep(HEARTBEAT_S)
            first.heartbeat()
            second.heartbeat()
        if first.partitions != [0] or second.partitions:
            raise SystemExit("the first member lost its partition to the second")
        last_heartbeat_at = time.monotonic()
        first.heartbeat()
        first.die()
        _beat_until_given(second)
        second.read_first(0)
        return time.monotonic() - last_heartbeat_at - session_timeout_ms / 1000
    finally:
        first.die()
        second.die()


def _beat_until_given(member: ConsumerMember) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    member.heartbeat()
    while member.partitions != [0]:
        _not_after(deadline)
        time.sleep(HEARTBEAT_S)
        member.heartbeat()


def _not_after(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise SystemExit(f"the group did not settle within {TIMEOUT_S:.0f} s")


def _address(spec: dict[str, Any]) -> tuple[str, int]:
    host, port = spec["bootstrap_servers"].rsplit(":", 1)
    return host, int(port)


def _group() -> str:
    return f"bench-{uuid.uuid4()}"

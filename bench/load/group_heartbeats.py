"""Thousands of members that have joined and do nothing but say that they are alive, from one process.

Members have a connection each, as real ones do, and are spread over many groups. They stay from one window to the
next: after `ready` the generator reads a line per window, runs the heartbeats at a fixed rate, evenly spread, and
answers with a line that counts those answered within it. An empty line ends it.
"""

from __future__ import annotations

import json
import resource
import select
import socket
import struct
import sys
import time
import uuid
from typing import Any

from bench.group_protocol import (
    NO_ERROR,
    REBALANCE_IN_PROGRESS,
    consumer_heartbeat_frame,
    heartbeat_error,
    heartbeat_frame,
    join_frame,
    read_beat,
    read_join,
    subscription,
    sync_frame,
)
from bench.load.group_member import wait_for_coordinators
from bench.protocol import Connection

SESSION_TIMEOUT_MS = 600_000
"""Members must live through the windows of the other side."""
JOIN_TIMEOUT_S = 300.0
QUIET_S = 3.0
"""Longer than `group.consumer.assignment.interval.ms`, within which an assignment may still be due."""
ROUND_S = 0.2
TICK_S = 0.001


class _Member:
    def __init__(self, host: str, port: int, group: str) -> None:
        self.connection = Connection(host, port, timeout_s=120.0)
        self.group = group
        self.member_id = str(uuid.uuid4())
        self.epoch = 0
        self.owned: list[tuple[bytes, list[int]]] = []
        self.heartbeat = b""


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Join `members` members to `groups` groups and serve windows until told to end."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    host, port = spec["bootstrap_servers"].rsplit(":", 1)
    wait_for_coordinators(host, int(port), spec["topic"])
    names = [f"bench-{uuid.uuid4()}" for _ in range(spec["groups"])]
    members = [_Member(host, int(port), names[index % len(names)]) for index in range(spec["members"])]
    is_classic = spec["protocol"] == "classic"
    if is_classic:
        _join_classic(members, spec["topic"])
    else:
        _join_consumer(members, spec["topic"])
    for each in members:
        each.connection.socket.setblocking(False)
    print("ready", flush=True)
    for line in sys.stdin:
        if not line.strip():
            break
        found = _window(members, spec["heartbeats_per_s"], json.loads(line), is_classic)
        print(json.dumps(found), flush=True)
    return {}


def _join_classic(members: list[_Member], topic: str) -> None:
    """All ask before any waits, so that the first rebalance has them all."""
    for each in members:
        each.connection.send(join_frame(each.group, "", SESSION_TIMEOUT_MS, subscription(topic), version=3))
    for each in members:
        joined = read_join(each.connection.receive(), version=3)
        if joined.error != NO_ERROR:
            raise SystemExit(f"JoinGroup was answered with error {joined.error}")
        each.member_id, each.epoch = joined.member_id, joined.generation
        each.connection.send(sync_frame(each.group, each.epoch, each.member_id, {}))
    for each in members:
        if (error := heartbeat_error(each.connection.receive())) != NO_ERROR:
            hint = ": not all had joined in time" if error == REBALANCE_IN_PROGRESS else ""
            raise SystemExit(f"SyncGroup was answered with error {error}{hint}")
        each.heartbeat = heartbeat_frame(each.group, each.epoch, each.member_id)


def _join_consumer(members: list[_Member], topic: str) -> None:
    """Heartbeats in rounds until for a while nothing changes for anyone."""
    changed_at = begun_at = time.monotonic()
    while time.monotonic() < changed_at + QUIET_S:
        if time.monotonic() > begun_at + JOIN_TIMEOUT_S:
            raise SystemExit(f"the groups did not settle within {JOIN_TIMEOUT_S:.0f} s")
        for each in members:
            subscribed = topic if each.epoch == 0 else None
            each.connection.send(
                consumer_heartbeat_frame(each.group, each.member_id, each.epoch, subscribed, each.owned)
            )
        for each in members:
            if _took_answer(each):
                changed_at = time.monotonic()
        time.sleep(ROUND_S)
    for each in members:
        each.heartbeat = consumer_heartbeat_frame(each.group, each.member_id, each.epoch, None, None)


def _took_answer(member: _Member) -> bool:
    """Take over what the answer says; whether that is something new."""
    beat = read_beat(member.connection.receive())
    if beat.error != NO_ERROR:
        raise SystemExit(f"a heartbeat was answered with error {beat.error}: {beat.message}")
    before = member.epoch, member.owned
    member.epoch = beat.epoch
    if beat.assigned is not None:
        member.owned = beat.assigned
    return before != (member.epoch, member.owned)


def _window(
    members: list[_Member], rate_per_s: float, times: dict[str, float], is_classic: bool
) -> dict[str, float]:
    """Heartbeats from now to the end of the window; those answered in it count."""
    poll = select.epoll()
    by_number = {each.connection.socket.fileno(): each for each in members}
    for number in by_number:
        poll.register(number, select.EPOLLIN)
    begin_at, end_at = times["begin_at"], times["end_at"]
    begun_at = time.monotonic()
    sent = answered = counted = 0
    while (now := time.monotonic()) < end_at:
        while sent < (now - begun_at) * rate_per_s:
            member = members[sent % len(members)]
            member.connection.socket.send(member.heartbeat)
            sent += 1
        for number, _ in poll.poll(TICK_S):
            found = _answers(by_number[number].connection.socket, is_classic)
            answered += found
            counted += found if begin_at <= time.monotonic() < end_at else 0
    deadline = time.monotonic() + 10.0
    while answered < sent:
        if time.monotonic() > deadline:
            raise SystemExit(f"{sent - answered} of {sent} heartbeats were not answered")
        for number, _ in poll.poll(1.0):
            answered += _answers(by_number[number].connection.socket, is_classic)
    poll.close()
    return {"heartbeats": counted, "window_s": end_at - begin_at}


def _answers(connection: socket.socket, is_classic: bool) -> int:
    """How many answers came; all of them whole, being far smaller than a packet, and without error."""
    data = connection.recv(65_536)
    if not data:
        raise SystemExit("the broker closed a member's connection")
    place = found = 0
    while place < len(data):
        (size,) = struct.unpack_from(">i", data, place)
        answer = data[place + 4 : place + 4 + size]
        place += 4 + size
        found += 1
        error = heartbeat_error(answer) if is_classic else read_beat(answer).error
        if error != NO_ERROR:
            raise SystemExit(f"a heartbeat was answered with error {error}")
    return found

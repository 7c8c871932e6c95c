"""How groups are printed: Kafka's columns for people, stable keys for programs."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from holdfast.cli.groups_admin import LATEST, Group, GroupAdmin, Place
from holdfast.cli.groups_reset import Reset
from holdfast.cli.output import print_table

NONE = "-"


def read_offsets(admin: GroupAdmin, group: Group) -> list[dict[str, Any]]:
    """Every partition that has a committed offset or an owner, by topic and number, as JSON has it."""
    offsets = admin.offsets(group.group)
    owners = {place: member for member in group.members for place in member.assignment}
    places = sorted({*offsets, *owners})
    log_ends = admin.log_offsets(places, LATEST)
    documents = []
    for place in places:
        committed, log_end, member = offsets.get(place), log_ends.get(place), owners.get(place)
        documents.append(
            {
                "topic": place[0],
                "partition": place[1],
                "current_offset": committed.offset if committed else None,
                "log_end_offset": log_end,
                "lag": log_end - committed.offset if committed and log_end is not None else None,
                "leader_epoch": committed.leader_epoch if committed else None,
                "member_id": member.member_id if member else None,
                "host": member.host if member else None,
                "client_id": member.client_id if member else None,
            }
        )
    return documents


def print_offsets(group: Group, documents: Sequence[dict[str, Any]], *, verbose: bool) -> None:
    keys = ["topic", "partition", "current_offset", "log_end_offset", "lag", "member_id", "host", "client_id"]
    if verbose:
        keys.insert(2, "leader_epoch")
    columns = ["CONSUMER-ID" if key == "member_id" else key.upper().replace("_", "-") for key in keys]
    rows = [(group.group, *(_text(document[key]) for key in keys)) for document in documents]
    print_table(("GROUP", *columns), rows)


def offsets_as_json(group: Group, documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {**_head(group), "offsets": documents}


def print_members(group: Group, *, verbose: bool) -> None:
    static = any(member.instance_id for member in group.members)
    columns = ["GROUP", "CONSUMER-ID", "HOST", "CLIENT-ID", "#PARTITIONS"]
    if static:
        columns.insert(2, "GROUP-INSTANCE-ID")
    if verbose:
        columns += ["CURRENT-EPOCH", "CURRENT-ASSIGNMENT", "TARGET-EPOCH", "TARGET-ASSIGNMENT"]
    migrating = verbose and any(member.speaks_new_protocol is False for member in group.members)
    if migrating:
        columns.append("UPGRADED")
    table = []
    for member in group.members:
        cells = [
            group.group,
            member.member_id,
            member.host,
            member.client_id,
            str(len(member.assignment)),
        ]
        if static:
            cells.insert(2, member.instance_id or NONE)
        if verbose:
            cells += [_text(member.epoch), _assignment(member.assignment)]
            cells += [_text(group.assignment_epoch), _assignment(member.target_assignment or ())]
        if migrating:
            cells.append("true" if member.speaks_new_protocol else "false")
        table.append(cells)
    print_table(columns, table)


def members_as_json(group: Group) -> dict[str, Any]:
    return {
        **_head(group),
        "members": [
            {
                "member_id": member.member_id,
                "group_instance_id": member.instance_id,
                "host": member.host,
                "client_id": member.client_id,
                "upgraded": member.speaks_new_protocol,
                "epoch": member.epoch,
                "assignment": _assignment_as_json(member.assignment),
                "target_epoch": group.assignment_epoch,
                "target_assignment": None
                if member.target_assignment is None
                else _assignment_as_json(member.target_assignment),
            }
            for member in group.members
        ],
    }


def print_state(group: Group, *, verbose: bool) -> None:
    columns = ["GROUP", "COORDINATOR (ID)", "ASSIGNMENT-STRATEGY", "STATE", "#MEMBERS"]
    cells = [
        group.group,
        f"{group.coordinator_address} ({group.coordinator_id})",
        group.assignor or NONE,
        group.state,
        str(len(group.members)),
    ]
    if verbose:
        columns[4:4] = ["GROUP-EPOCH", "TARGET-ASSIGNMENT-EPOCH"]
        cells[4:4] = [_text(group.epoch), _text(group.assignment_epoch)]
    print_table(columns, [cells])


def state_as_json(group: Group) -> dict[str, Any]:
    return {
        **_head(group),
        "coordinator": {"id": group.coordinator_id, "address": group.coordinator_address},
        "assignment_strategy": group.assignor or None,
        "group_epoch": group.epoch,
        "target_assignment_epoch": group.assignment_epoch,
        "member_count": len(group.members),
    }


def print_resets(resets: Sequence[Reset]) -> None:
    rows = [
        (each.group, move.topic, move.partition, move.new_offset, _text(move.old_offset))
        for each in resets
        for move in each.moves
        if move.error is None
    ]
    if rows:
        print_table(("GROUP", "TOPIC", "PARTITION", "NEW-OFFSET", "OLD-OFFSET"), rows)


def export_resets(resets: Sequence[Reset], *, with_group: bool) -> None:
    """CSV as `--from-file` reads it."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for each in resets:
        for move in each.moves:
            row = (move.topic, move.partition, move.new_offset)
            writer.writerow((each.group, *row) if with_group else row)


def _head(group: Group) -> dict[str, Any]:
    return {"group": group.group, "type": group.type, "state": group.state}


def _text(value: int | str | None) -> str:
    return NONE if value is None else str(value)


def _by_topic(places: Iterable[Place]) -> list[tuple[str, list[int]]]:
    return [
        (topic, [partition for _, partition in group])
        for topic, group in groupby(sorted(places), key=lambda place: place[0])
    ]


def _assignment(places: Iterable[Place]) -> str:
    """`orders:0,1;payments:2`, as Kafka writes it."""
    return ";".join(f"{topic}:{','.join(map(str, numbers))}" for topic, numbers in _by_topic(places)) or NONE


def _assignment_as_json(places: Iterable[Place]) -> list[dict[str, Any]]:
    return [{"topic": topic, "partitions": numbers} for topic, numbers in _by_topic(places)]

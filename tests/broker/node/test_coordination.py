"""The partitions of an internal topic: one that cannot be rebuilt takes no other down."""

from __future__ import annotations

import pytest
from kio.schema.errors import ErrorCode

from holdfast.broker.groups.coordinator import GroupCoordinator
from holdfast.broker.node.coordination import partition_for
from holdfast.errors import CorruptLog
from holdfast.testing.bare_node import BareClient, BareNode

SETTINGS = {"offsets.topic.num.partitions": "3"}
OFFSET_COMMIT, OFFSET_FETCH = 8, 9


def commit(client: BareClient, group: str, offset: int) -> ErrorCode:
    answer = client.ask(
        OFFSET_COMMIT,
        8,
        group_id=group,
        generation_id_or_member_epoch=-1,
        member_id="",
        topics=[
            {
                "name": "orders",
                "partitions": [
                    {"partition_index": 0, "committed_offset": offset, "committed_metadata": None}
                ],
            }
        ],
    )
    code: ErrorCode = answer.topics[0].partitions[0].error_code
    return code


def position(client: BareClient, group: str) -> tuple[ErrorCode, int]:
    answer = client.ask(
        OFFSET_FETCH, 5, group_id=group, topics=[{"name": "orders", "partition_indexes": [0]}]
    )
    return answer.error_code, answer.topics[0].partitions[0].committed_offset if answer.topics else -1


def groups_of_two_shards() -> tuple[str, str]:
    names = [f"group-{number}" for number in range(20)]
    first = names[0]
    other = next(name for name in names if partition_for(name, 3) != partition_for(first, 3))
    return first, other


def test_a_partition_of_an_internal_topic_that_cannot_be_rebuilt_is_not_available_and_the_others_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken, sound = groups_of_two_shards()
    node = BareNode(SETTINGS)
    client = node.connect()
    client.create_topic("orders")
    assert commit(client, broken, 5) == ErrorCode.none
    assert commit(client, sound, 7) == ErrorCode.none
    replay = GroupCoordinator.replay

    def damaged(self: GroupCoordinator, header: object, records: object) -> None:
        if any(broken.encode() in (record.key or b"") for record in records):  # type: ignore[attr-defined]
            raise CorruptLog("nonsense")
        replay(self, header, records)  # type: ignore[arg-type]

    monkeypatch.setattr(GroupCoordinator, "replay", damaged)
    node = node.kill()
    client = node.connect()
    assert any("coordinates nothing" in line for line in node.said)
    assert commit(client, broken, 1) == ErrorCode.coordinator_not_available
    assert position(client, sound) == (ErrorCode.none, 7)
    monkeypatch.undo()
    assert position(node.kill().connect(), broken) == (ErrorCode.none, 5)

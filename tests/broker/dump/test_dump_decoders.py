"""Records of the coordinators' topics are shown as Kafka's tools show them."""

from __future__ import annotations

import json
from uuid import UUID

import pytest

from holdfast.broker.dump.decoders import Undecodable, decode_offsets, decode_transactions
from holdfast.cli.dump_log import as_line
from holdfast.wire.consumer_protocol import ConsumerAssignment, ConsumerSubscription, OwnedPartitions
from holdfast.wire.coordinator_records import (
    ClassicMemberMetadata,
    ClassicProtocol,
    ConsumerGroupCurrentMemberAssignmentKey,
    ConsumerGroupCurrentMemberAssignmentValue,
    ConsumerGroupMemberMetadataKey,
    ConsumerGroupMemberMetadataValue,
    ConsumerGroupMetadataKey,
    ConsumerGroupMetadataValue,
    ConsumerGroupRegularExpressionKey,
    ConsumerGroupRegularExpressionValue,
    CoordinatorKey,
    CoordinatorValue,
    CurrentTopicPartitions,
    GroupMetadataKey,
    GroupMetadataValue,
    MemberMetadata,
    OffsetCommitKey,
    OffsetCommitValue,
    TransactionLogKey,
    TransactionLogValue,
)

TOPIC_ID = UUID("700e96a0-5218-4241-bf75-cd1784325f26")

# What Kafka 4.3.1's DumpLogSegments printed for such records.
SHOWN: list[tuple[CoordinatorKey, CoordinatorValue, str, str]] = [
    (
        OffsetCommitKey("g", "t", 1),
        OffsetCommitValue(offset=4, leader_epoch=0, commit_timestamp=10, topic_id=TOPIC_ID),
        '{"type":"1","data":{"group":"g","topic":"t","partition":1}}',
        '{"version":"4","data":{"offset":4,"leaderEpoch":0,"metadata":"","commitTimestamp":10,'
        '"topicId":"cA6WoFIYQkG_dc0XhDJfJg"}}',
    ),
    (
        ConsumerGroupMetadataKey("g"),
        ConsumerGroupMetadataValue(epoch=5),
        '{"type":"3","data":{"groupId":"g"}}',
        '{"version":"0","data":{"epoch":5}}',
    ),
    (
        ConsumerGroupMemberMetadataKey("g", "m"),
        ConsumerGroupMemberMetadataValue(
            client_id="c", client_host="/127.0.0.1", subscribed_topic_names=("t",), rebalance_timeout_ms=300
        ),
        '{"type":"5","data":{"groupId":"g","memberId":"m"}}',
        '{"version":"0","data":{"instanceId":null,"rackId":null,"clientId":"c","clientHost":"/127.0.0.1",'
        '"subscribedTopicNames":["t"],"subscribedTopicRegex":null,"rebalanceTimeoutMs":300,'
        '"serverAssignor":null,"classicMemberMetadata":null}}',
    ),
    (
        ConsumerGroupMemberMetadataKey("g", "m"),
        ConsumerGroupMemberMetadataValue(
            client_id="c",
            client_host="h",
            subscribed_topic_regex="",
            classic_member_metadata=ClassicMemberMetadata(45, (ClassicProtocol("range", b"\0\3"),)),
        ),
        '{"type":"5","data":{"groupId":"g","memberId":"m"}}',
        '{"version":"0","data":{"instanceId":null,"rackId":null,"clientId":"c","clientHost":"h",'
        '"subscribedTopicNames":[],"subscribedTopicRegex":"","rebalanceTimeoutMs":-1,"serverAssignor":null,'
        '"classicMemberMetadata":{"sessionTimeoutMs":45,"supportedProtocols":[{"name":"range","metadata":"AAM="}]}}}',
    ),
    (
        ConsumerGroupCurrentMemberAssignmentKey("g", "m"),
        ConsumerGroupCurrentMemberAssignmentValue(
            member_epoch=2,
            previous_member_epoch=1,
            state=0,
            assigned_partitions=(CurrentTopicPartitions(TOPIC_ID, (0, 1), (2, 2)),),
        ),
        '{"type":"8","data":{"groupId":"g","memberId":"m"}}',
        '{"version":"0","data":{"memberEpoch":2,"previousMemberEpoch":1,"state":0,"assignedPartitions":['
        '{"topicId":"cA6WoFIYQkG_dc0XhDJfJg","partitions":[0,1],"assignmentEpochs":[2,2]}],'
        '"partitionsPendingRevocation":[]}}',
    ),
    (
        ConsumerGroupRegularExpressionKey("g", "t.*"),
        ConsumerGroupRegularExpressionValue(topics=("t",), version=9, timestamp=10),
        '{"type":"16","data":{"groupId":"g","regularExpression":"t.*"}}',
        '{"version":"0","data":{"topics":["t"],"version":9,"timestamp":10}}',
    ),
    (
        TransactionLogKey("tx"),
        TransactionLogValue(
            producer_id=1000,
            previous_producer_id=1000,
            producer_epoch=0,
            transaction_timeout_ms=12345,
            transaction_status=0,
            transaction_partitions=None,
            transaction_last_update_timestamp_ms=10,
        ),
        '{"type":"0","data":{"transactionalId":"tx"}}',
        '{"version":"1","data":{"producerId":1000,"previousProducerId":1000,"producerEpoch":0,'
        '"transactionTimeoutMs":12345,"transactionStatus":0,"transactionPartitions":null,'
        '"transactionLastUpdateTimestampMs":10,"transactionStartTimestampMs":-1}}',
    ),
]


def compact(document: object) -> str:
    return json.dumps(document, separators=(",", ":"))


@pytest.mark.parametrize(("key", "value", "named", "said"), SHOWN)
def test_records_are_shown_as_kafka_shows_them(
    key: CoordinatorKey, value: CoordinatorValue, named: str, said: str
) -> None:
    decode = decode_transactions if isinstance(key, TransactionLogKey) else decode_offsets
    decoded = decode(key.encode(), value.encode())
    assert compact(decoded.key) == named
    assert compact(decoded.value) == said
    assert decode(key.encode(), None) == (decoded.key, None)


def group(protocol_type: str, subscription: bytes, assignment: bytes) -> GroupMetadataValue:
    member = MemberMetadata(
        member_id="m",
        client_id="c",
        client_host="h",
        rebalance_timeout=300,
        session_timeout=45,
        subscription=subscription,
        assignment=assignment,
    )
    return GroupMetadataValue(
        protocol_type=protocol_type, generation=1, protocol="range", leader="m", members=(member,)
    )


def test_subscriptions_and_assignments_of_consumers_are_opened() -> None:
    subscription = ConsumerSubscription(topics=("t",), user_data=b"", rack_id="")
    assignment = ConsumerAssignment(assigned_partitions=(OwnedPartitions("t", (0,)),), user_data=b"")
    value = group("consumer", subscription.encode(), assignment.encode(0))
    shown = decode_offsets(GroupMetadataKey("g").encode(), value.encode()).value
    assert shown is not None
    assert compact(shown["data"]["members"]) == (
        '[{"memberId":"m","groupInstanceId":null,"clientId":"c","clientHost":"h","rebalanceTimeout":300,'
        '"sessionTimeout":45,"subscription":{"topics":["t"],"userData":"","ownedPartitions":[],"generationId":-1,'
        '"rackId":""},"assignment":{"assignedPartitions":[{"topic":"t","partitions":[0]}],"userData":""}}]'
    )


@pytest.mark.parametrize("protocol_type", ["connect", "consumer"])
def test_what_members_say_in_other_words_stays_as_it_is(protocol_type: str) -> None:
    value = group(protocol_type, b"\xff\xff", b"\xff")
    shown = decode_offsets(GroupMetadataKey("g").encode(), value.encode()).value
    assert shown is not None
    member = shown["data"]["members"][0]
    assert (member["subscription"], member["assignment"]) == ("//8=", "/w==")


def test_kinds_and_versions_not_known_are_named() -> None:
    with pytest.raises(Undecodable, match="records of type 11 are not known"):
        decode_offsets(b"\x00\x0bshare", b"\0\0")
    with pytest.raises(Undecodable, match="version 7 of a record of type 3 is not known"):
        decode_offsets(ConsumerGroupMetadataKey("g").encode(), b"\0\7")
    with pytest.raises(Undecodable, match="no number in front"):
        decode_transactions(None, None)


def test_a_record_that_removes_is_shown_as_such() -> None:
    decoded = decode_offsets(GroupMetadataKey("g").encode(), None)
    event = {"type": "record", "key": decoded.key, "value": decoded.value}
    line = as_line(event, skip_record_metadata=True)
    assert line == 'key: {"type":"2","data":{"group":"g"}} payload: <DELETE>'

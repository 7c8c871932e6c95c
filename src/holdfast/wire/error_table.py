"""The protocol's errors: name, code, whether asking again can help, and what it means.

*Retriable* is the Java client's notion: the same request may succeed later, perhaps after refreshing
metadata. It says nothing about safety; a producer without idempotence that repeats a write may write it
twice.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode


class ProtocolError(NamedTuple):
    """One error code of the protocol."""

    name: str
    """Kafka's name for it."""
    code: int
    retriable: bool
    meaning: str


_RETRIABLE: Final = True
_FINAL: Final = False

ERRORS: Final = (
    ProtocolError(
        "UNKNOWN_SERVER_ERROR", -1, _FINAL, "the broker failed in a way it has no code for; its log tells"
    ),
    ProtocolError("NONE", 0, _FINAL, "no error"),
    ProtocolError(
        "OFFSET_OUT_OF_RANGE",
        1,
        _FINAL,
        "no record has this offset here: it is before the log's start or after its end",
    ),
    ProtocolError(
        "CORRUPT_MESSAGE", 2, _RETRIABLE, "the batch does not match its checksum or breaks the record format"
    ),
    ProtocolError(
        "UNKNOWN_TOPIC_OR_PARTITION",
        3,
        _RETRIABLE,
        "this broker has no such topic or partition, or may not say",
    ),
    ProtocolError("INVALID_FETCH_SIZE", 4, _FINAL, "the fetch asks for a size that makes no sense"),
    ProtocolError("LEADER_NOT_AVAILABLE", 5, _RETRIABLE, "the partition has no leader at the moment"),
    ProtocolError(
        "NOT_LEADER_OR_FOLLOWER",
        6,
        _RETRIABLE,
        "another broker leads this partition, or this one holds no replica of it",
    ),
    ProtocolError(
        "REQUEST_TIMED_OUT", 7, _RETRIABLE, "the time the request allowed ran out before it was done"
    ),
    ProtocolError("BROKER_NOT_AVAILABLE", 8, _FINAL, "the broker is not there"),
    ProtocolError(
        "REPLICA_NOT_AVAILABLE", 9, _RETRIABLE, "this broker has no usable replica of the partition"
    ),
    ProtocolError("MESSAGE_TOO_LARGE", 10, _FINAL, "a batch is larger than the topic's max.message.bytes"),
    ProtocolError(
        "STALE_CONTROLLER_EPOCH", 11, _FINAL, "the request comes from a controller that has been replaced"
    ),
    ProtocolError(
        "OFFSET_METADATA_TOO_LARGE", 12, _FINAL, "the text committed with an offset is longer than allowed"
    ),
    ProtocolError("NETWORK_EXCEPTION", 13, _RETRIABLE, "the connection broke before the answer came"),
    ProtocolError(
        "COORDINATOR_LOAD_IN_PROGRESS",
        14,
        _RETRIABLE,
        "the coordinator has not yet read its state; ask again",
    ),
    ProtocolError("COORDINATOR_NOT_AVAILABLE", 15, _RETRIABLE, "there is no coordinator at the moment"),
    ProtocolError("NOT_COORDINATOR", 16, _RETRIABLE, "another broker coordinates this group or transaction"),
    ProtocolError(
        "INVALID_TOPIC_EXCEPTION",
        17,
        _FINAL,
        "the topic's name is illegal, or nobody may write to this topic",
    ),
    ProtocolError("RECORD_LIST_TOO_LARGE", 18, _FINAL, "the batch does not fit a segment of the log"),
    ProtocolError(
        "NOT_ENOUGH_REPLICAS",
        19,
        _RETRIABLE,
        "too few replicas are in sync to accept the write; nothing was written",
    ),
    ProtocolError(
        "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
        20,
        _RETRIABLE,
        "the write happened, but fewer replicas than required have it",
    ),
    ProtocolError("INVALID_REQUIRED_ACKS", 21, _FINAL, "acks must be 0, 1 or -1"),
    ProtocolError(
        "ILLEGAL_GENERATION", 22, _FINAL, "the group is no longer in the generation the member speaks of"
    ),
    ProtocolError(
        "INCONSISTENT_GROUP_PROTOCOL", 23, _FINAL, "the member shares no assignment protocol with the group"
    ),
    ProtocolError("INVALID_GROUP_ID", 24, _FINAL, "the group's name is empty or illegal"),
    ProtocolError("UNKNOWN_MEMBER_ID", 25, _FINAL, "the group has no such member; join again"),
    ProtocolError(
        "INVALID_SESSION_TIMEOUT", 26, _FINAL, "the session time-out lies outside what the broker allows"
    ),
    ProtocolError("REBALANCE_IN_PROGRESS", 27, _FINAL, "the group is redistributing partitions; join again"),
    ProtocolError(
        "INVALID_COMMIT_OFFSET_SIZE",
        28,
        _FINAL,
        "the offsets to commit do not fit one batch of the offsets topic",
    ),
    ProtocolError("TOPIC_AUTHORIZATION_FAILED", 29, _FINAL, "the principal may not do this with the topic"),
    ProtocolError("GROUP_AUTHORIZATION_FAILED", 30, _FINAL, "the principal may not do this with the group"),
    ProtocolError(
        "CLUSTER_AUTHORIZATION_FAILED", 31, _FINAL, "the principal may not do this with the cluster"
    ),
    ProtocolError(
        "INVALID_TIMESTAMP",
        32,
        _FINAL,
        "a record's timestamp is further from the broker's clock than the topic allows",
    ),
    ProtocolError("UNSUPPORTED_SASL_MECHANISM", 33, _FINAL, "the broker does not offer this SASL mechanism"),
    ProtocolError(
        "ILLEGAL_SASL_STATE", 34, _FINAL, "this request may not come at this point of the SASL exchange"
    ),
    ProtocolError("UNSUPPORTED_VERSION", 35, _FINAL, "the broker does not serve this version of the API"),
    ProtocolError("TOPIC_ALREADY_EXISTS", 36, _FINAL, "there is a topic of this name already"),
    ProtocolError(
        "INVALID_PARTITIONS",
        37,
        _FINAL,
        "the number of partitions is not positive, or not more than there are",
    ),
    ProtocolError(
        "INVALID_REPLICATION_FACTOR",
        38,
        _FINAL,
        "the replication factor is not positive, or there are too few brokers for it",
    ),
    ProtocolError(
        "INVALID_REPLICA_ASSIGNMENT", 39, _FINAL, "the replicas named for a partition cannot be its replicas"
    ),
    ProtocolError("INVALID_CONFIG", 40, _FINAL, "a setting's name or value is wrong"),
    ProtocolError("NOT_CONTROLLER", 41, _RETRIABLE, "another node is the controller"),
    ProtocolError("INVALID_REQUEST", 42, _FINAL, "the request contradicts itself or lacks something"),
    ProtocolError(
        "UNSUPPORTED_FOR_MESSAGE_FORMAT", 43, _FINAL, "the records are in a format too old for this request"
    ),
    ProtocolError("POLICY_VIOLATION", 44, _FINAL, "a policy of the cluster forbids what was asked"),
    ProtocolError(
        "OUT_OF_ORDER_SEQUENCE_NUMBER", 45, _FINAL, "batches of this producer are missing before this one"
    ),
    ProtocolError(
        "DUPLICATE_SEQUENCE_NUMBER",
        46,
        _FINAL,
        "this batch was written before and its offset is no longer remembered",
    ),
    ProtocolError("INVALID_PRODUCER_EPOCH", 47, _FINAL, "a newer instance of this producer has taken over"),
    ProtocolError("INVALID_TXN_STATE", 48, _FINAL, "the transaction is in a state that does not allow this"),
    ProtocolError(
        "INVALID_PRODUCER_ID_MAPPING", 49, _FINAL, "the transactional id belongs to another producer id"
    ),
    ProtocolError(
        "INVALID_TRANSACTION_TIMEOUT", 50, _FINAL, "the transaction time-out is longer than the broker allows"
    ),
    ProtocolError(
        "CONCURRENT_TRANSACTIONS",
        51,
        _RETRIABLE,
        "the previous operation on this transaction is still under way; ask again",
    ),
    ProtocolError(
        "TRANSACTION_COORDINATOR_FENCED",
        52,
        _FINAL,
        "the marker comes from a transaction coordinator that has been replaced",
    ),
    ProtocolError(
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED", 53, _FINAL, "the principal may not use this transactional id"
    ),
    ProtocolError(
        "SECURITY_DISABLED", 54, _FINAL, "the broker runs without the security this request is about"
    ),
    ProtocolError(
        "OPERATION_NOT_ATTEMPTED",
        55,
        _FINAL,
        "the operation was skipped because another one of the same request failed",
    ),
    ProtocolError("KAFKA_STORAGE_ERROR", 56, _RETRIABLE, "the disk under this log failed"),
    ProtocolError("LOG_DIR_NOT_FOUND", 57, _FINAL, "the broker has no such log directory"),
    ProtocolError("SASL_AUTHENTICATION_FAILED", 58, _FINAL, "the credentials were refused"),
    ProtocolError(
        "UNKNOWN_PRODUCER_ID",
        59,
        _FINAL,
        "the broker remembers nothing of this producer id, although it should",
    ),
    ProtocolError("REASSIGNMENT_IN_PROGRESS", 60, _FINAL, "the partition's replicas are being moved"),
    ProtocolError("DELEGATION_TOKEN_AUTH_DISABLED", 61, _FINAL, "delegation tokens are switched off"),
    ProtocolError("DELEGATION_TOKEN_NOT_FOUND", 62, _FINAL, "there is no such delegation token"),
    ProtocolError(
        "DELEGATION_TOKEN_OWNER_MISMATCH",
        63,
        _FINAL,
        "the principal is neither the owner of the token nor one who may renew it",
    ),
    ProtocolError(
        "DELEGATION_TOKEN_REQUEST_NOT_ALLOWED",
        64,
        _FINAL,
        "delegation tokens cannot be asked for over this kind of connection",
    ),
    ProtocolError(
        "DELEGATION_TOKEN_AUTHORIZATION_FAILED", 65, _FINAL, "the principal may not do this with the token"
    ),
    ProtocolError("DELEGATION_TOKEN_EXPIRED", 66, _FINAL, "the delegation token has expired"),
    ProtocolError("INVALID_PRINCIPAL_TYPE", 67, _FINAL, "principals of this type are not supported"),
    ProtocolError("NON_EMPTY_GROUP", 68, _FINAL, "the group still has members"),
    ProtocolError("GROUP_ID_NOT_FOUND", 69, _FINAL, "there is no such group"),
    ProtocolError(
        "FETCH_SESSION_ID_NOT_FOUND",
        70,
        _RETRIABLE,
        "the broker has forgotten this fetch session; start a new one",
    ),
    ProtocolError(
        "INVALID_FETCH_SESSION_EPOCH",
        71,
        _RETRIABLE,
        "requests of this fetch session came out of order; start a new one",
    ),
    ProtocolError(
        "LISTENER_NOT_FOUND", 72, _RETRIABLE, "the leader has no listener of the kind the client came through"
    ),
    ProtocolError(
        "TOPIC_DELETION_DISABLED", 73, _FINAL, "topics may not be deleted: delete.topic.enable is false"
    ),
    ProtocolError(
        "FENCED_LEADER_EPOCH",
        74,
        _RETRIABLE,
        "the client's leader epoch is older than the broker's; refresh the metadata",
    ),
    ProtocolError(
        "UNKNOWN_LEADER_EPOCH",
        75,
        _RETRIABLE,
        "the client's leader epoch is newer than the broker's; ask again",
    ),
    ProtocolError(
        "UNSUPPORTED_COMPRESSION_TYPE",
        76,
        _FINAL,
        "the batch names a codec that does not exist, or that this request's version may not carry",
    ),
    ProtocolError("STALE_BROKER_EPOCH", 77, _FINAL, "the broker has registered again since this epoch"),
    ProtocolError(
        "OFFSET_NOT_AVAILABLE",
        78,
        _RETRIABLE,
        "a new leader does not yet know how far the partition is committed; ask again",
    ),
    ProtocolError("MEMBER_ID_REQUIRED", 79, _FINAL, "join again with the member id given in this answer"),
    ProtocolError(
        "PREFERRED_LEADER_NOT_AVAILABLE", 80, _RETRIABLE, "the preferred leader cannot lead at the moment"
    ),
    ProtocolError("GROUP_MAX_SIZE_REACHED", 81, _FINAL, "the group has as many members as it may have"),
    ProtocolError("FENCED_INSTANCE_ID", 82, _FINAL, "another member has taken over this group.instance.id"),
    ProtocolError("ELIGIBLE_LEADERS_NOT_AVAILABLE", 83, _RETRIABLE, "no replica that may lead is available"),
    ProtocolError("ELECTION_NOT_NEEDED", 84, _RETRIABLE, "the partition already has the leader asked for"),
    ProtocolError("NO_REASSIGNMENT_IN_PROGRESS", 85, _FINAL, "the partition's replicas are not being moved"),
    ProtocolError(
        "GROUP_SUBSCRIBED_TO_TOPIC",
        86,
        _FINAL,
        "the group is subscribed to this topic, so its offsets must stay",
    ),
    ProtocolError("INVALID_RECORD", 87, _FINAL, "a record breaks the format or a rule of the topic"),
    ProtocolError(
        "UNSTABLE_OFFSET_COMMIT", 88, _RETRIABLE, "offsets of an open transaction are pending; ask again"
    ),
    ProtocolError("THROTTLING_QUOTA_EXCEEDED", 89, _RETRIABLE, "a quota is used up; ask again later"),
    ProtocolError(
        "PRODUCER_FENCED", 90, _FINAL, "a newer producer with this transactional id has taken over"
    ),
    ProtocolError("RESOURCE_NOT_FOUND", 91, _FINAL, "the request names something that does not exist"),
    ProtocolError("DUPLICATE_RESOURCE", 92, _FINAL, "the request names the same thing twice"),
    ProtocolError("UNACCEPTABLE_CREDENTIAL", 93, _FINAL, "the new credential is weaker than allowed"),
    ProtocolError("INCONSISTENT_VOTER_SET", 94, _FINAL, "the two nodes do not agree on who votes"),
    ProtocolError("INVALID_UPDATE_VERSION", 95, _FINAL, "the feature cannot take this level"),
    ProtocolError("FEATURE_UPDATE_FAILED", 96, _FINAL, "the feature levels could not be changed"),
    ProtocolError(
        "PRINCIPAL_DESERIALIZATION_FAILURE", 97, _FINAL, "a forwarded request's principal could not be read"
    ),
    ProtocolError("SNAPSHOT_NOT_FOUND", 98, _FINAL, "there is no such snapshot"),
    ProtocolError("POSITION_OUT_OF_RANGE", 99, _FINAL, "the position lies outside the snapshot"),
    ProtocolError("UNKNOWN_TOPIC_ID", 100, _RETRIABLE, "this broker has no topic with this id"),
    ProtocolError("DUPLICATE_BROKER_REGISTRATION", 101, _FINAL, "another broker uses this id"),
    ProtocolError("BROKER_ID_NOT_REGISTERED", 102, _FINAL, "no broker with this id has registered"),
    ProtocolError("INCONSISTENT_TOPIC_ID", 103, _RETRIABLE, "the topic with this name has another id"),
    ProtocolError("INCONSISTENT_CLUSTER_ID", 104, _FINAL, "the node belongs to another cluster"),
    ProtocolError("TRANSACTIONAL_ID_NOT_FOUND", 105, _FINAL, "there is no such transactional id"),
    ProtocolError(
        "FETCH_SESSION_TOPIC_ID_ERROR",
        106,
        _RETRIABLE,
        "the fetch session mixes topic names and ids; start a new one",
    ),
    ProtocolError("INELIGIBLE_REPLICA", 107, _FINAL, "a replica named as in sync may not be"),
    ProtocolError(
        "NEW_LEADER_ELECTED", 108, _FINAL, "the change was made and the partition has a new leader"
    ),
    ProtocolError("OFFSET_MOVED_TO_TIERED_STORAGE", 109, _FINAL, "the offset is only in tiered storage"),
    ProtocolError(
        "FENCED_MEMBER_EPOCH",
        110,
        _FINAL,
        "the member was removed from the group; give up its partitions and join again",
    ),
    ProtocolError("UNRELEASED_INSTANCE_ID", 111, _FINAL, "another member still uses this group.instance.id"),
    ProtocolError("UNSUPPORTED_ASSIGNOR", 112, _FINAL, "the group cannot use this assignor"),
    ProtocolError(
        "STALE_MEMBER_EPOCH",
        113,
        _FINAL,
        "the member's epoch is old; ask again with the one from the last heartbeat",
    ),
    ProtocolError(
        "MISMATCHED_ENDPOINT_TYPE",
        114,
        _FINAL,
        "a request for controllers came to a broker, or the other way round",
    ),
    ProtocolError("UNSUPPORTED_ENDPOINT_TYPE", 115, _FINAL, "the node knows no endpoints of this type"),
    ProtocolError("UNKNOWN_CONTROLLER_ID", 116, _FINAL, "there is no controller with this id"),
    ProtocolError(
        "UNKNOWN_SUBSCRIPTION_ID", 117, _FINAL, "the telemetry subscription is unknown or outdated"
    ),
    ProtocolError("TELEMETRY_TOO_LARGE", 118, _FINAL, "the telemetry report is larger than allowed"),
    ProtocolError("INVALID_REGISTRATION", 119, _FINAL, "the controller refuses this broker's registration"),
    ProtocolError(
        "TRANSACTION_ABORTABLE", 120, _FINAL, "the transaction cannot be completed; abort it and go on"
    ),
    ProtocolError(
        "INVALID_RECORD_STATE", 121, _FINAL, "the record is not in a state that can be acknowledged"
    ),
    ProtocolError(
        "SHARE_SESSION_NOT_FOUND",
        122,
        _RETRIABLE,
        "the broker has forgotten this share session; start a new one",
    ),
    ProtocolError(
        "INVALID_SHARE_SESSION_EPOCH",
        123,
        _RETRIABLE,
        "requests of this share session came out of order; start a new one",
    ),
    ProtocolError("FENCED_STATE_EPOCH", 124, _FINAL, "the share group's state has moved on since this epoch"),
    ProtocolError("INVALID_VOTER_KEY", 125, _FINAL, "the voter's id and directory do not match this node's"),
    ProtocolError("DUPLICATE_VOTER", 126, _FINAL, "the node already votes"),
    ProtocolError("VOTER_NOT_FOUND", 127, _FINAL, "the node does not vote"),
    ProtocolError("INVALID_REGULAR_EXPRESSION", 128, _FINAL, "the regular expression cannot be read"),
    ProtocolError(
        "REBOOTSTRAP_REQUIRED",
        129,
        _FINAL,
        "the client must forget its metadata and begin with the bootstrap servers",
    ),
    ProtocolError("STREAMS_INVALID_TOPOLOGY", 130, _FINAL, "the streams topology contradicts itself"),
    ProtocolError(
        "STREAMS_INVALID_TOPOLOGY_EPOCH", 131, _FINAL, "the epoch of the streams topology is not valid"
    ),
    ProtocolError("STREAMS_TOPOLOGY_FENCED", 132, _FINAL, "a newer streams topology has replaced this one"),
    ProtocolError(
        "SHARE_SESSION_LIMIT_REACHED",
        133,
        _RETRIABLE,
        "the broker keeps as many share sessions as it may; ask again later",
    ),
)

BY_CODE: Final = {error.code: error for error in ERRORS}
BY_NAME: Final = {error.name: error for error in ERRORS}


def is_retriable(code: ErrorCode | int) -> bool:
    """Whether the same request may succeed later; False for a code we do not know."""
    error = BY_CODE.get(int(code))
    return error is not None and error.retriable


def describe(code: ErrorCode | int) -> str:
    """Name and meaning, for people."""
    error = BY_CODE.get(int(code))
    return f"{error.name}: {error.meaning}" if error is not None else f"unknown error code {int(code)}"

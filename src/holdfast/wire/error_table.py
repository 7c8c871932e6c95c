"""The protocol's errors: name, code, whether asking again can help, and what each means in our words.

*Retriable* is the Java client's notion: the same request may succeed later, perhaps after refreshing
metadata. It says nothing about safety; a producer without idempotence that repeats a write may write it
twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode

_MEANINGS: Final = {
    ErrorCode.unknown_server_error: "the broker failed in a way it has no code for; its log tells",
    ErrorCode.none: "no error",
    ErrorCode.offset_out_of_range: "no record has this offset here: it is before the log's start or after its end",
    ErrorCode.corrupt_message: "the batch does not match its checksum or breaks the record format",
    ErrorCode.unknown_topic_or_partition: "this broker has no such topic or partition, or may not say",
    ErrorCode.invalid_fetch_size: "the fetch asks for a size that makes no sense",
    ErrorCode.leader_not_available: "the partition has no leader at the moment",
    ErrorCode.not_leader_or_follower: "another broker leads this partition, or this one holds no replica of it",
    ErrorCode.request_timed_out: "the time the request allowed ran out before it was done",
    ErrorCode.broker_not_available: "the broker is not there",
    ErrorCode.replica_not_available: "this broker has no usable replica of the partition",
    ErrorCode.message_too_large: "a batch is larger than the topic's max.message.bytes",
    ErrorCode.stale_controller_epoch: "the request comes from a controller that has been replaced",
    ErrorCode.offset_metadata_too_large: "the text committed with an offset is longer than allowed",
    ErrorCode.network_exception: "the connection broke before the answer came",
    ErrorCode.coordinator_load_in_progress: "the coordinator has not yet read its state; ask again",
    ErrorCode.coordinator_not_available: "there is no coordinator at the moment",
    ErrorCode.not_coordinator: "another broker coordinates this group or transaction",
    ErrorCode.invalid_topic_exception: "the topic's name is illegal, or nobody may write to this topic",
    ErrorCode.record_list_too_large: "the batch does not fit a segment of the log",
    ErrorCode.not_enough_replicas: "too few replicas are in sync to accept the write; nothing was written",
    ErrorCode.not_enough_replicas_after_append: "the write happened, but fewer replicas than required have it",
    ErrorCode.invalid_required_acks: "acks must be 0, 1 or -1",
    ErrorCode.illegal_generation: "the group is no longer in the generation the member speaks of",
    ErrorCode.inconsistent_group_protocol: "the member shares no assignment protocol with the group",
    ErrorCode.invalid_group_id: "the group's name is empty or illegal",
    ErrorCode.unknown_member_id: "the group has no such member; join again",
    ErrorCode.invalid_session_timeout: "the session time-out lies outside what the broker allows",
    ErrorCode.rebalance_in_progress: "the group is redistributing partitions; join again",
    ErrorCode.invalid_commit_offset_size: "the offsets to commit do not fit one batch of the offsets topic",
    ErrorCode.topic_authorization_failed: "the principal may not do this with the topic",
    ErrorCode.group_authorization_failed: "the principal may not do this with the group",
    ErrorCode.cluster_authorization_failed: "the principal may not do this with the cluster",
    ErrorCode.invalid_timestamp: "a record's timestamp is further from the broker's clock than the topic allows",
    ErrorCode.unsupported_sasl_mechanism: "the broker does not offer this SASL mechanism",
    ErrorCode.illegal_sasl_state: "this request may not come at this point of the SASL exchange",
    ErrorCode.unsupported_version: "the broker does not serve this version of the API",
    ErrorCode.topic_already_exists: "there is a topic of this name already",
    ErrorCode.invalid_partitions: "the number of partitions is not positive, or not more than there are",
    ErrorCode.invalid_replication_factor: "the replication factor is not positive, or there are too few brokers for it",
    ErrorCode.invalid_replica_assignment: "the replicas named for a partition cannot be its replicas",
    ErrorCode.invalid_config: "a setting's name or value is wrong",
    ErrorCode.not_controller: "another node is the controller",
    ErrorCode.invalid_request: "the request contradicts itself or lacks something",
    ErrorCode.unsupported_for_message_format: "the records are in a format too old for this request",
    ErrorCode.policy_violation: "a policy of the cluster forbids what was asked",
    ErrorCode.out_of_order_sequence_number: "batches of this producer are missing before this one",
    ErrorCode.duplicate_sequence_number: "this batch was written before and its offset is no longer remembered",
    ErrorCode.invalid_producer_epoch: "a newer instance of this producer has taken over",
    ErrorCode.invalid_txn_state: "the transaction is in a state that does not allow this",
    ErrorCode.invalid_producer_id_mapping: "the transactional id belongs to another producer id",
    ErrorCode.invalid_transaction_timeout: "the transaction time-out is longer than the broker allows",
    ErrorCode.concurrent_transactions: "the previous operation on this transaction is still under way; ask again",
    ErrorCode.transaction_coordinator_fenced: "the marker comes from a transaction coordinator that has been replaced",
    ErrorCode.transactional_id_authorization_failed: "the principal may not use this transactional id",
    ErrorCode.security_disabled: "the broker runs without the security this request is about",
    ErrorCode.operation_not_attempted: "the operation was skipped because another one of the same request failed",
    ErrorCode.kafka_storage_error: "the disk under this log failed",
    ErrorCode.log_dir_not_found: "the broker has no such log directory",
    ErrorCode.sasl_authentication_failed: "the credentials were refused",
    ErrorCode.unknown_producer_id: "the broker remembers nothing of this producer id, although it should",
    ErrorCode.reassignment_in_progress: "the partition's replicas are being moved",
    ErrorCode.delegation_token_auth_disabled: "delegation tokens are switched off",
    ErrorCode.delegation_token_not_found: "there is no such delegation token",
    ErrorCode.delegation_token_owner_mismatch: "the principal neither owns the token nor may renew it",
    ErrorCode.delegation_token_request_not_allowed: "no delegation token is given over this kind of connection",
    ErrorCode.delegation_token_authorization_failed: "the principal may not do this with the token",
    ErrorCode.delegation_token_expired: "the delegation token has expired",
    ErrorCode.invalid_principal_type: "principals of this type are not supported",
    ErrorCode.non_empty_group: "the group still has members",
    ErrorCode.group_id_not_found: "there is no such group",
    ErrorCode.fetch_session_id_not_found: "the broker has forgotten this fetch session; start a new one",
    ErrorCode.invalid_fetch_session_epoch: "requests of this fetch session came out of order; start a new one",
    ErrorCode.listener_not_found: "the leader has no listener of the kind the client came through",
    ErrorCode.topic_deletion_disabled: "topics may not be deleted: delete.topic.enable is false",
    ErrorCode.fenced_leader_epoch: "the client's leader epoch is older than the broker's; refresh the metadata",
    ErrorCode.unknown_leader_epoch: "the client's leader epoch is newer than the broker's; ask again",
    ErrorCode.unsupported_compression_type: "no such codec exists, or this version of the request may not carry it",
    ErrorCode.stale_broker_epoch: "the broker has registered again since this epoch",
    ErrorCode.offset_not_available: "a new leader does not yet know how far the partition is committed; ask again",
    ErrorCode.member_id_required: "join again with the member id given in this answer",
    ErrorCode.preferred_leader_not_available: "the preferred leader cannot lead at the moment",
    ErrorCode.group_max_size_reached: "the group has as many members as it may have",
    ErrorCode.fenced_instance_id: "another member has taken over this group.instance.id",
    ErrorCode.eligible_leaders_not_available: "no replica that may lead is available",
    ErrorCode.election_not_needed: "the partition already has the leader asked for",
    ErrorCode.no_reassignment_in_progress: "the partition's replicas are not being moved",
    ErrorCode.group_subscribed_to_topic: "the group is subscribed to this topic, so its offsets must stay",
    ErrorCode.invalid_record: "a record breaks the format or a rule of the topic",
    ErrorCode.unstable_offset_commit: "offsets of an open transaction are pending; ask again",
    ErrorCode.throttling_quota_exceeded: "a quota is used up; ask again later",
    ErrorCode.producer_fenced: "a newer producer with this transactional id has taken over",
    ErrorCode.resource_not_found: "the request names something that does not exist",
    ErrorCode.duplicate_resource: "the request names the same thing twice",
    ErrorCode.unacceptable_credential: "the new credential is weaker than allowed",
    ErrorCode.inconsistent_voter_set: "the two nodes do not agree on who votes",
    ErrorCode.invalid_update_version: "the feature cannot take this level",
    ErrorCode.feature_update_failed: "the feature levels could not be changed",
    ErrorCode.principal_deserialization_failure: "a forwarded request's principal could not be read",
    ErrorCode.snapshot_not_found: "there is no such snapshot",
    ErrorCode.position_out_of_range: "the position lies outside the snapshot",
    ErrorCode.unknown_topic_id: "this broker has no topic with this id",
    ErrorCode.duplicate_broker_registration: "another broker uses this id",
    ErrorCode.broker_id_not_registered: "no broker with this id has registered",
    ErrorCode.inconsistent_topic_id: "the topic with this name has another id",
    ErrorCode.inconsistent_cluster_id: "the node belongs to another cluster",
    ErrorCode.transactional_id_not_found: "there is no such transactional id",
    ErrorCode.fetch_session_topic_id_error: "the fetch session mixes topic names and ids; start a new one",
    ErrorCode.ineligible_replica: "a replica named as in sync may not be",
    ErrorCode.new_leader_elected: "the change was made and the partition has a new leader",
    ErrorCode.offset_moved_to_tiered_storage: "the offset is only in tiered storage",
    ErrorCode.fenced_member_epoch: "the member was removed from the group; give up its partitions and join again",
    ErrorCode.unreleased_instance_id: "another member still uses this group.instance.id",
    ErrorCode.unsupported_assignor: "the group cannot use this assignor",
    ErrorCode.stale_member_epoch: "the member's epoch is old; ask again with the one from the last heartbeat",
    ErrorCode.mismatched_endpoint_type: "a request for controllers came to a broker, or the other way round",
    ErrorCode.unsupported_endpoint_type: "the node knows no endpoints of this type",
    ErrorCode.unknown_controller_id: "there is no controller with this id",
    ErrorCode.unknown_subscription_id: "the telemetry subscription is unknown or outdated",
    ErrorCode.telemetry_too_large: "the telemetry report is larger than allowed",
    ErrorCode.invalid_registration: "the controller refuses this broker's registration",
    ErrorCode.transaction_abortable: "the transaction cannot be completed; abort it and go on",
    ErrorCode.invalid_record_state: "the record is not in a state that can be acknowledged",
    ErrorCode.share_session_not_found: "the broker has forgotten this share session; start a new one",
    ErrorCode.invalid_share_session_epoch: "requests of this share session came out of order; start a new one",
    ErrorCode.fenced_state_epoch: "the share group's state has moved on since this epoch",
    ErrorCode.invalid_voter_key: "the voter's id and directory do not match this node's",
    ErrorCode.duplicate_voter: "the node already votes",
    ErrorCode.voter_not_found: "the node does not vote",
    ErrorCode.invalid_regular_expression: "the regular expression cannot be read",
    ErrorCode.rebootstrap_required: "the client must forget its metadata and begin with the bootstrap servers",
    ErrorCode.streams_invalid_topology: "the streams topology contradicts itself",
    ErrorCode.streams_invalid_topology_epoch: "the epoch of the streams topology is not valid",
    ErrorCode.streams_topology_fenced: "a newer streams topology has replaced this one",
    ErrorCode.share_session_limit_reached: "the broker keeps as many share sessions as it may; ask again later",
}


class ProtocolError(NamedTuple):
    """One error code of the protocol."""

    name: str
    """Kafka's name for it."""
    code: int
    retriable: bool
    meaning: str


BY_CODE: Final[Mapping[int, ProtocolError]] = {
    int(code): ProtocolError(code.name.upper(), int(code), code.retriable, meaning)
    for code, meaning in _MEANINGS.items()
}


def is_retriable(code: ErrorCode | int) -> bool:
    """Whether the same request may succeed later; False for a code we do not know."""
    error = BY_CODE.get(int(code))
    return error is not None and error.retriable


def describe(code: ErrorCode | int) -> str:
    """Name and meaning, for people."""
    error = BY_CODE.get(int(code))
    return f"{error.name}: {error.meaning}" if error is not None else f"unknown error code {int(code)}"

"""Which APIs a Kafka 4.3 broker offers its clients, at which versions, and the features it names.

One table, in the order of the keys, so that our ApiVersions answer can be compared with Apache Kafka's line
by line. APIs that only brokers and controllers speak among themselves are not in it.

Two facts hide in the numbers. `Produce` is *advertised* from version 0 because librdkafka refuses brokers
that do not offer it, but it is *served* from version 3: older ones carry record formats that no longer exist.
And `flexible_from` decides the shape of a request's header before its body is looked at: from that version
on, header and body carry tagged fields. A version above `max` still has a header of that shape, which is what
lets a broker answer "unsupported version" to a client from the future.
"""

from __future__ import annotations

from typing import Final, NamedTuple

PRODUCE: Final = 0
API_VERSIONS: Final = 18
"""ApiVersions, whose response header never carries tagged fields: its reader does not know our version
yet."""

FEATURES_FROM_ZERO: Final = 4
"""The first version of ApiVersions whose readers understand a feature that may be at level 0."""


class Api(NamedTuple):
    """One API as advertised to clients."""

    key: int
    name: str
    min: int
    """The lowest version advertised."""
    max: int
    """The highest version advertised and served."""
    served_from: int
    """The lowest version served; above `min` for Produce alone."""
    flexible_from: int | None
    """The first version with tagged fields; None when no version has them."""

    def is_served(self, version: int) -> bool:
        return self.served_from <= version <= self.max


class Feature(NamedTuple):
    """A feature the broker can run at, and the level a new cluster settles on."""

    name: str
    min: int
    max: int
    finalized: int


APIS: Final = (
    Api(0, "Produce", 0, 13, 3, 9),
    Api(1, "Fetch", 4, 18, 4, 12),
    Api(2, "ListOffsets", 1, 11, 1, 6),
    Api(3, "Metadata", 0, 13, 0, 9),
    Api(8, "OffsetCommit", 2, 10, 2, 8),
    Api(9, "OffsetFetch", 1, 10, 1, 6),
    Api(10, "FindCoordinator", 0, 6, 0, 3),
    Api(11, "JoinGroup", 0, 9, 0, 6),
    Api(12, "Heartbeat", 0, 4, 0, 4),
    Api(13, "LeaveGroup", 0, 5, 0, 4),
    Api(14, "SyncGroup", 0, 5, 0, 4),
    Api(15, "DescribeGroups", 0, 6, 0, 5),
    Api(16, "ListGroups", 0, 5, 0, 3),
    Api(17, "SaslHandshake", 0, 1, 0, None),
    Api(18, "ApiVersions", 0, 4, 0, 3),
    Api(19, "CreateTopics", 2, 7, 2, 5),
    Api(20, "DeleteTopics", 1, 6, 1, 4),
    Api(21, "DeleteRecords", 0, 2, 0, 2),
    Api(22, "InitProducerId", 0, 5, 0, 2),
    Api(23, "OffsetForLeaderEpoch", 2, 4, 2, 4),
    Api(24, "AddPartitionsToTxn", 0, 5, 0, 3),
    Api(25, "AddOffsetsToTxn", 0, 4, 0, 3),
    Api(26, "EndTxn", 0, 5, 0, 3),
    Api(27, "WriteTxnMarkers", 1, 2, 1, 1),
    Api(28, "TxnOffsetCommit", 0, 5, 0, 3),
    Api(29, "DescribeAcls", 1, 3, 1, 2),
    Api(30, "CreateAcls", 1, 3, 1, 2),
    Api(31, "DeleteAcls", 1, 3, 1, 2),
    Api(32, "DescribeConfigs", 1, 4, 1, 4),
    Api(33, "AlterConfigs", 0, 2, 0, 2),
    Api(34, "AlterReplicaLogDirs", 1, 2, 1, 2),
    Api(35, "DescribeLogDirs", 1, 5, 1, 2),
    Api(36, "SaslAuthenticate", 0, 2, 0, 2),
    Api(37, "CreatePartitions", 0, 3, 0, 2),
    Api(38, "CreateDelegationToken", 1, 3, 1, 2),
    Api(39, "RenewDelegationToken", 1, 2, 1, 2),
    Api(40, "ExpireDelegationToken", 1, 2, 1, 2),
    Api(41, "DescribeDelegationToken", 1, 3, 1, 2),
    Api(42, "DeleteGroups", 0, 2, 0, 2),
    Api(43, "ElectLeaders", 0, 2, 0, 2),
    Api(44, "IncrementalAlterConfigs", 0, 1, 0, 1),
    Api(45, "AlterPartitionReassignments", 0, 1, 0, 0),
    Api(46, "ListPartitionReassignments", 0, 0, 0, 0),
    Api(47, "OffsetDelete", 0, 0, 0, None),
    Api(48, "DescribeClientQuotas", 0, 1, 0, 1),
    Api(49, "AlterClientQuotas", 0, 1, 0, 1),
    Api(50, "DescribeUserScramCredentials", 0, 0, 0, 0),
    Api(51, "AlterUserScramCredentials", 0, 0, 0, 0),
    Api(55, "DescribeQuorum", 0, 2, 0, 0),
    Api(57, "UpdateFeatures", 0, 2, 0, 0),
    Api(60, "DescribeCluster", 0, 2, 0, 0),
    Api(61, "DescribeProducers", 0, 0, 0, 0),
    Api(64, "UnregisterBroker", 0, 0, 0, 0),
    Api(65, "DescribeTransactions", 0, 0, 0, 0),
    Api(66, "ListTransactions", 0, 2, 0, 0),
    Api(68, "ConsumerGroupHeartbeat", 0, 1, 0, 0),
    Api(69, "ConsumerGroupDescribe", 0, 1, 0, 0),
    Api(74, "ListConfigResources", 0, 1, 0, 0),
    Api(75, "DescribeTopicPartitions", 0, 0, 0, 0),
    Api(76, "ShareGroupHeartbeat", 1, 1, 1, 1),
    Api(77, "ShareGroupDescribe", 1, 1, 1, 1),
    Api(78, "ShareFetch", 1, 2, 1, 1),
    Api(79, "ShareAcknowledge", 1, 2, 1, 1),
    Api(80, "AddRaftVoter", 0, 1, 0, 0),
    Api(81, "RemoveRaftVoter", 0, 0, 0, 0),
    Api(83, "InitializeShareGroupState", 0, 0, 0, 0),
    Api(84, "ReadShareGroupState", 0, 0, 0, 0),
    Api(85, "WriteShareGroupState", 0, 1, 0, 0),
    Api(86, "DeleteShareGroupState", 0, 0, 0, 0),
    Api(87, "ReadShareGroupStateSummary", 0, 1, 0, 0),
    Api(88, "StreamsGroupHeartbeat", 0, 0, 0, 0),
    Api(89, "StreamsGroupDescribe", 0, 0, 0, 0),
    Api(90, "DescribeShareGroupOffsets", 0, 1, 0, 0),
    Api(91, "AlterShareGroupOffsets", 0, 0, 0, 0),
    Api(92, "DeleteShareGroupOffsets", 0, 0, 0, 0),
)

FEATURES: Final = (
    Feature("group.version", 0, 1, 1),
    Feature("kraft.version", 0, 1, 1),
    Feature("metadata.version", 7, 30, 30),
    Feature("share.version", 0, 1, 1),
    Feature("streams.version", 0, 1, 1),
    Feature("transaction.version", 0, 2, 2),
    Feature("eligible.leader.replicas.version", 0, 1, 1),
)

BY_KEY: Final = {api.key: api for api in APIS}
NEVER: Final = 1 << 16
FLEXIBLE_FROM: Final = {api.key: NEVER if api.flexible_from is None else api.flexible_from for api in APIS}
"""From which version on an API's header and body carry tagged fields."""
BY_NAME: Final = {api.name: api for api in APIS}


def is_served(api_key: int, version: int) -> bool:
    """Whether a client may call this API at this version."""
    api = BY_KEY.get(api_key)
    return api is not None and api.is_served(version)


def request_header_version(api_key: int, version: int) -> int:
    """2 when the request's header carries tagged fields, else 1."""
    return 2 if version >= FLEXIBLE_FROM.get(api_key, NEVER) else 1


def response_header_version(api_key: int, version: int) -> int:
    """1 when the response's header carries tagged fields, else 0."""
    if api_key == API_VERSIONS:
        return 0
    return 1 if version >= FLEXIBLE_FROM.get(api_key, NEVER) else 0


def supported_features(api_versions_version: int) -> tuple[Feature, ...]:
    """The features to name in an ApiVersions answer of this version.

    Readers of versions before 4 refuse a range that begins at 0, so those features are not named to them.
    """
    if api_versions_version >= FEATURES_FROM_ZERO:
        return FEATURES
    return tuple(feature for feature in FEATURES if feature.min > 0)

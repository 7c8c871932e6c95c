"""A cluster with every kind of thing in it, and all that clients can see of it: equal before and after a change of
engine, a backup or a restore."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
INTERNAL: Final = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})
TIMEOUT_S: Final = 60.0
NOT_YET: Final = frozenset({5, 6, 14, 15, 16, 74, 75})
"""Errors of a broker that has just started."""
EARLIEST: Final = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
LATEST: Final = OffsetSpec.latest()  # type: ignore[no-untyped-call]
T = TypeVar("T")
Row = tuple[str, int, int, bytes | None, bytes | None, int, Any]


class WholeCluster:
    """Fills a cluster. The producer of the open transaction lives until `close`."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.admin = AdminClient({"bootstrap.servers": bootstrap})
        self.open_producer: Producer | None = None

    def create(self, name: str, partitions: int = 1, **settings: str) -> None:
        config = {setting.replace("_", "."): value for setting, value in settings.items()}
        self.admin.create_topics([NewTopic(name, partitions, 1, config=config)])[name].result(TIMEOUT_S)

    def send(self, topic: str, count: int, first: int = 0, partitions: int = 1, **options: str) -> None:
        settings = {name.replace("_", "."): value for name, value in options.items()}
        producer = Producer({"bootstrap.servers": self.bootstrap, "linger.ms": "5", **settings})
        for number in range(first, first + count):
            key, value = f"k{number % 5}".encode(), f"{topic}-{number}".encode() * 3
            producer.produce(topic, value, key, number % partitions, headers=[("n", str(number).encode())])
        assert producer.flush(TIMEOUT_S) == 0

    def ends(self) -> dict[str, int]:
        """Where every partition ends, of internal topics too."""
        topics = self.admin.list_topics(timeout=TIMEOUT_S).topics
        partitions = [TopicPartition(name, index) for name in topics for index in topics[name].partitions]
        return offsets_of(self.admin, partitions, LATEST)

    def fill(self) -> None:
        for codec in CODECS:
            self.create(f"codec-{codec}", 2)
            self.send(f"codec-{codec}", 40, partitions=2, compression_type=codec)
        self.create("segments", 1, segment_bytes=str(1 << 20), retention_ms="-1")
        for first in range(4):
            self.send("segments", 12_000, first * 12_000)
        self.admin.delete_records([TopicPartition("segments", 0, 100)])
        self.create("compacted", 1, cleanup_policy="compact", segment_ms="60000")
        self.send("compacted", 50)
        self.create("recreated", 2)
        self.send("recreated", 10, partitions=2)
        self.admin.delete_topics(["recreated"])["recreated"].result(TIMEOUT_S)
        self._create_again("recreated")
        self.send("recreated", 6, 100)
        self._transactions()
        self._groups()
        self._settings()

    def _create_again(self, name: str) -> None:
        for _ in range(100):
            try:
                self.create(name)
                return
            except KafkaException as error:  # the name is not free yet
                if "TOPIC_ALREADY_EXISTS" not in str(error):
                    raise
        raise AssertionError(f"{name} is not free")

    def transactional(self, name: str) -> Producer:
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "transactional.id": name,
                "transaction.timeout.ms": "600000",
            }
        )
        producer.init_transactions(TIMEOUT_S)
        return producer

    def _transactions(self) -> None:
        self.create("transactions", 2)
        producer = self.transactional("ends")
        for number in range(6):
            producer.begin_transaction()
            for partition in range(2):
                producer.produce("transactions", f"{number}".encode(), partition=partition)
            producer.flush(TIMEOUT_S)
            if number % 2:
                producer.abort_transaction(TIMEOUT_S)
            else:
                producer.commit_transaction(TIMEOUT_S)
        self.open_producer = self.transactional("open")
        self.open_producer.begin_transaction()
        self.open_producer.produce("transactions", b"open", partition=0)
        self.open_producer.flush(TIMEOUT_S)
        self.send("transactions", 3, 1000)

    def _groups(self) -> None:
        for protocol in ("classic", "consumer"):
            consumer = Consumer(
                {
                    "bootstrap.servers": self.bootstrap,
                    "group.id": f"{protocol}-group",
                    "group.protocol": protocol,
                    "auto.offset.reset": "earliest",
                    "enable.auto.commit": False,
                }
            )
            consumer.subscribe(["codec-none", "codec-gzip"])
            seen = 0
            while seen < 80:
                seen += len(consumer.consume(80 - seen, 1.0))
            consumer.commit(asynchronous=False)
            consumer.close()
        producer = self.transactional("offsets")
        producer.begin_transaction()
        producer.produce("transactions", b"with offsets", partition=1)
        reader = Consumer({"bootstrap.servers": self.bootstrap, "group.id": "transactional-group"})
        producer.send_offsets_to_transaction(
            [TopicPartition("codec-lz4", 0, 7), TopicPartition("codec-lz4", 1, 8)],
            reader.consumer_group_metadata(),
            TIMEOUT_S,
        )
        producer.commit_transaction(TIMEOUT_S)
        reader.close()

    def add_user(self) -> None:
        """SCRAM credentials, which Kafka keeps among its metadata."""
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
        alteration = UserScramCredentialUpsertion("somebody", info, b"secret")
        self.admin.alter_user_scram_credentials([alteration])["somebody"].result(TIMEOUT_S)

    def users(self) -> list[str]:
        found = self.admin.describe_user_scram_credentials()
        assert not isinstance(found, dict)
        return sorted(found.result(TIMEOUT_S))

    def _settings(self) -> None:
        resources = [
            ConfigResource(
                ResourceType.TOPIC,
                "compacted",
                incremental_configs=[
                    ConfigEntry(
                        "min.cleanable.dirty.ratio", "0.9", incremental_operation=AlterConfigOpType.SET
                    )
                ],
            ),
            ConfigResource(
                ResourceType.BROKER,
                "1",
                incremental_configs=[
                    ConfigEntry("log.retention.ms", "8640000000", incremental_operation=AlterConfigOpType.SET)
                ],
            ),
        ]
        for future in self.admin.incremental_alter_configs(resources).values():
            future.result(TIMEOUT_S)


def seen_by_clients(bootstrap: str, expected: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Everything of a cluster that clients can ask for, but for epochs and timestamps of elections.

    A broker that has just started may not know its groups yet: those that are `expected` are waited for.
    """
    known = set(expected["groups"]) if expected is not None else set()
    admin = AdminClient({"bootstrap.servers": bootstrap})
    metadata = admin.list_topics(timeout=TIMEOUT_S)
    names = sorted(set(metadata.topics) - INTERNAL)
    described = admin.describe_topics(TopicCollection(names))
    partitions = [
        TopicPartition(name, index) for name in names for index in sorted(metadata.topics[name].partitions)
    ]
    resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
    resources.append(ConfigResource(ResourceType.BROKER, "1"))
    altered = {
        f"{resource.restype} {resource.name}": {
            name: entry.value
            for name, entry in future.result(TIMEOUT_S).items()
            if entry.source in (1, 2, 3) and not name.startswith("holdfast.")
        }
        for resource, future in admin.describe_configs(resources).items()
    }
    groups = patiently(lambda: _group_names(admin, known))
    return {
        "cluster": metadata.cluster_id,
        "topics": {name: str(described[name].result(TIMEOUT_S).topic_id) for name in names},
        "settings": altered,
        "starts": patiently(lambda: offsets_of(admin, partitions, EARLIEST)),
        "ends": patiently(lambda: offsets_of(admin, partitions, LATEST)),
        "uncommitted": rows(bootstrap, partitions, "read_uncommitted"),
        "committed": rows(bootstrap, partitions, "read_committed"),
        "groups": {group: positions_of(admin, group) for group in groups},
    }


def assert_same(seen: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if isinstance(value, dict):
            differences = {
                key: (seen[name].get(key), value.get(key))
                for key in seen[name].keys() | value.keys()
                if seen[name].get(key) != value.get(key)
            }
        else:
            differences = {} if seen[name] == value else {"seen, expected": (seen[name], value)}
        assert not differences, f"{name}: {differences}"


def patiently(ask: Callable[[], T]) -> T:
    """Ask again while the broker, which has just started, still loads what is asked for."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return ask()
        except KafkaException as error:
            if time.monotonic() > deadline or error.args[0].code() not in NOT_YET:
                raise
            time.sleep(0.1)


def _group_names(admin: AdminClient, known: set[str]) -> list[str]:
    found = admin.list_consumer_groups().result(TIMEOUT_S)
    names = sorted(group.group_id for group in found.valid)
    if found.errors or not known <= set(names):
        raise KafkaException(KafkaError(KafkaError.COORDINATOR_LOAD_IN_PROGRESS))
    return names


def offsets_of(
    admin: AdminClient,
    partitions: list[TopicPartition],
    spec: OffsetSpec,
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
) -> dict[str, int]:
    futures = admin.list_offsets(dict.fromkeys(partitions, spec), isolation_level=isolation)
    return {
        f"{each.topic}-{each.partition}": future.result(TIMEOUT_S).offset for each, future in futures.items()
    }


def positions_of(admin: AdminClient, group: str) -> dict[str, tuple[int, str | None]]:
    request = [ConsumerGroupTopicPartitions(group)]
    found = admin.list_consumer_group_offsets(request)[group].result(TIMEOUT_S).topic_partitions
    return {f"{each.topic}-{each.partition}": (each.offset, each.metadata or "") for each in found}


def rows(bootstrap: str, partitions: list[TopicPartition], isolation: str) -> list[Row]:
    """Every record that readers of this isolation level are shown."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "nobody",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": isolation,
            "check.crcs": True,
            "auto.offset.reset": "error",
        }
    )
    consumer.assign([TopicPartition(each.topic, each.partition, OFFSET_BEGINNING) for each in partitions])
    found: list[Row] = []
    left = {(each.topic, each.partition) for each in partitions}
    while left:
        for message in consumer.consume(5000, 0.2):
            topic, partition, offset = message.topic(), message.partition(), message.offset()
            assert topic is not None
            assert partition is not None
            assert offset is not None
            if (error := message.error()) is not None:
                assert error.name() == "_PARTITION_EOF", error
                left.discard((topic, partition))
                continue
            found.append(
                (
                    topic,
                    partition,
                    offset,
                    message.key(),
                    message.value(),
                    message.timestamp()[1],
                    tuple(message.headers() or ()),
                )
            )
    consumer.close()
    return sorted(found, key=lambda row: row[:3])

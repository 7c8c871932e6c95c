"""The same administration through confluent-kafka's AdminClient: what a program sees of either broker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import IsolationLevel, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)
from tests.support.differential import Script, Side

from holdfast.wire.batch import make_batch

Compare = Callable[[Script], None]
PLACE: Any = OffsetSpec
"""It has no types."""


def admin_of(side: Side) -> AdminClient:
    return AdminClient({"bootstrap.servers": side.bootstrap_servers, "log_level": 0})


def outcomes(
    futures: Mapping[Any, Future[Any]], show: Callable[[Any], Any] = lambda result: "done"
) -> dict[str, Any]:
    """What each future holds: its result as shown, or the name of its error."""
    found = {}
    for key, future in futures.items():
        try:
            found[str(key)] = show(future.result(30))
        except KafkaException as error:
            found[str(key)] = error.args[0].name()
    return found


def topics_of_a_program(side: Side) -> None:
    admin = admin_of(side)
    new = [
        NewTopic("admin-a", 2, 1, config={"retention.ms": "60000"}),
        NewTopic("admin-b", 1, 1),
        NewTopic("admin/bad", 1, 1),
        NewTopic("admin-replicated", 1, 3),
        NewTopic("admin-configured", 1, 1, config={"retention.ms": "x"}),
    ]
    side.note("create", outcomes(admin.create_topics(new)))
    side.note("create again", outcomes(admin.create_topics(new[:2])))
    side.await_leaders("admin-a", 2)
    side.await_leaders("admin-b", 1)
    listed = admin.list_topics(timeout=30).topics
    side.note("listed", {name: sorted(listed[name].partitions) for name in ("admin-a", "admin-b")})
    described = admin.describe_topics(TopicCollection(["admin-a", "admin-none"]))
    side.note(
        "describe",
        outcomes(
            described, lambda topic: [(p.id, p.leader.id, [n.id for n in p.isr]) for p in topic.partitions]
        ),
    )
    side.note(
        "enlarge",
        outcomes(admin.create_partitions([NewPartitions("admin-b", 3), NewPartitions("admin-a", 1)])),
    )
    side.await_leaders("admin-b", 3)
    side.note("delete", outcomes(admin.delete_topics(["admin-b", "admin-none"])))


def settings_of_a_program(side: Side) -> None:
    admin = admin_of(side)
    side.create_topic("admin-settings")
    resource = ConfigResource(ResourceType.TOPIC, "admin-settings")
    resource.add_incremental_config(
        ConfigEntry("retention.ms", "77000", incremental_operation=AlterConfigOpType.SET)
    )
    side.note("alter", outcomes(admin.incremental_alter_configs([resource])))
    wanted = ConfigResource(ResourceType.TOPIC, "admin-settings")

    def settings() -> dict[str, str]:
        [future] = admin.describe_configs([wanted]).values()
        return {
            name: entry.value for name, entry in future.result(30).items() if not name.startswith("holdfast.")
        }

    side.wait_until(lambda: settings()["retention.ms"] == "77000")
    side.note("all values", settings())
    missing = ConfigResource(ResourceType.TOPIC, "admin-none")
    side.note("of no topic", list(outcomes(admin.describe_configs([missing])).values()))
    bad = ConfigResource(ResourceType.TOPIC, "admin-settings")
    bad.add_incremental_config(ConfigEntry("no.such", "1", incremental_operation=AlterConfigOpType.SET))
    side.note("unknown setting", list(outcomes(admin.incremental_alter_configs([bad])).values()))


def offsets_of_a_program(side: Side) -> None:
    admin = admin_of(side)
    side.create_topic("admin-offsets", 2)
    for number in range(3):
        side.produce(
            f"batch {number}", "admin-offsets", make_batch([b"a", b"b"], timestamp=1000 * (number + 1))
        )

    def listed(label: str, spec: Any, partition: int = 0) -> None:
        wanted = {TopicPartition("admin-offsets", partition): spec}
        futures = admin.list_offsets(wanted, isolation_level=IsolationLevel.READ_UNCOMMITTED)
        side.note(label, list(outcomes(futures, lambda found: (found.offset, found.timestamp)).values()))

    listed("earliest", PLACE.earliest())
    listed("latest", PLACE.latest())
    listed("largest time", PLACE.max_timestamp())
    listed("by time", PLACE.for_timestamp(1500))
    listed("empty", PLACE.latest(), 1)
    listed("no such partition", PLACE.latest(), 7)
    cut = admin.delete_records([TopicPartition("admin-offsets", 0, 3)])
    side.note("delete", list(outcomes(cut, lambda found: found.low_watermark).values()))
    listed("earliest after it", PLACE.earliest())


def cluster_of_a_program(side: Side) -> None:
    admin = admin_of(side)
    cluster = admin.describe_cluster().result(30)
    side.note("nodes", [(node.id, node.rack) for node in cluster.nodes])
    side.note("controller", cluster.controller.id)
    side.note("cluster_id", {"cluster_id": cluster.cluster_id})


SCRIPTS = (topics_of_a_program, settings_of_a_program, offsets_of_a_program, cluster_of_a_program)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_an_admin_client_sees_no_other_broker(script: Script, compare: Compare) -> None:
    compare(script)

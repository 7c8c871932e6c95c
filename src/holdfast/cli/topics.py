"""`holdfast topics create|list|describe|alter|delete`, with the flags of kafka-topics.

Topics as the commands see them: matching names, descriptions, and the flags that need parsing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Annotated, Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (
    AdminClient,
    ConfigResource,
    ConfigSource,
    NewPartitions,
    NewTopic,
    TopicDescription,
)
from typer.exceptions import Exit

from holdfast.cli.client import (
    REQUEST_TIMEOUT_S,
    describe_error,
    failure,
    no_such_topic,
    no_topic_to_change,
    parse_assignments,
    result_of,
)
from holdfast.cli.exits import CommandFailed, complain
from holdfast.cli.options import SERVER, CommandGroup, OutputOption, ServerFlags, examples, flag, option
from holdfast.cli.output import Output, print_json, print_table
from holdfast.errors import ExitCode, UsageError

app = CommandGroup(no_args_is_help=True, help="Create, list, describe, alter and delete topics.")

TopicName = Annotated[str, option("NAME", "The topic's name.")]
TopicToChange = Annotated[
    str,
    option(
        "NAME|REGEX",
        "The topic; or, with characters no name may have, a regular expression over whole names.",
    ),
]
TopicFilter = Annotated[
    str | None, option("REGEX", "Only topics whose whole name matches; a comma means 'or'.")
]
ExcludeInternal = Annotated[bool, flag("Leave out internal topics such as __consumer_offsets.")]
IfExists = Annotated[bool, flag("Do nothing when there is no such topic.")]
ReplicaAssignment = Annotated[
    str | None, option("B:B,B:B…", "Brokers of each partition: partitions by comma, replicas by colon.")
]


@app.command(
    epilog=examples(
        "holdfast topics create --topic orders --partitions 6",
        "holdfast topics create --topic state --config cleanup.policy=compact --if-not-exists",
    )
)
def create(
    topic: TopicName,
    partitions: Annotated[int | None, option("N", "How many partitions.", min=1)] = None,
    replication_factor: Annotated[
        int | None, option("N", "How many brokers keep each partition.", min=1)
    ] = None,
    replica_assignment: ReplicaAssignment = None,
    config: Annotated[
        list[str] | None, option("NAME=VALUE", "A setting of the topic; may be repeated.")
    ] = None,
    if_not_exists: Annotated[bool, flag("Do nothing when the topic exists.")] = False,
    server: ServerFlags = SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Create a topic; partitions and replication factor default to the cluster's own."""
    settings = parse_assignments(config or [], "--config")
    arguments: dict[str, Any] = {
        "num_partitions": partitions or -1,
        "replication_factor": replication_factor or -1,
    }
    if replica_assignment is not None:
        if partitions is not None or replication_factor is not None:
            raise UsageError("--replica-assignment takes the place of --partitions and --replication-factor")
        assignment = parse_replica_assignment(replica_assignment)
        arguments = {"num_partitions": len(assignment), "replica_assignment": assignment}
    admin = _admin(server)
    try:
        new_topic = NewTopic(topic, config=settings, **arguments)
        admin.create_topics([new_topic], request_timeout=REQUEST_TIMEOUT_S)[topic].result()
        action = "created"
    except KafkaException as error:
        if not (if_not_exists and error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS):
            raise failure(error, f"cannot create topic '{topic}'", topic) from error
        action = "exists"
    _report({topic: action}, output)


@app.command(
    "list", epilog=examples("holdfast topics list", "holdfast topics list --topic 'orders.*' --output json")
)
def list_topics(
    topic: TopicFilter = None,
    exclude_internal: ExcludeInternal = False,
    server: ServerFlags = SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List topics, one name per line."""
    pattern = name_pattern(topic)
    admin = _admin(server)
    names = select_topics(_all_names(admin), pattern)
    if exclude_internal:
        described = describe_topics(admin, names)
        names = [name for name in names if name in described and not described[name].is_internal]
    if output is Output.JSON:
        print_json({"topics": names})
        return
    for name in names:
        print(name)


@app.command(
    epilog=examples(
        "holdfast topics describe --topic orders",
        "holdfast topics describe --under-replicated-partitions",
    )
)
def describe(
    topic: TopicFilter = None,
    topic_id: Annotated[str | None, option("ID", "Only the topic with this id.")] = None,
    under_replicated_partitions: Annotated[bool, flag("Only partitions with a replica out of sync.")] = False,
    unavailable_partitions: Annotated[bool, flag("Only partitions without a leader.")] = False,
    under_min_isr_partitions: Annotated[
        bool, flag("Only partitions with fewer replicas in sync than min.insync.replicas.")
    ] = False,
    at_min_isr_partitions: Annotated[
        bool, flag("Only partitions with just min.insync.replicas in sync.")
    ] = False,
    topics_with_overrides: Annotated[
        bool, flag("Only topics with settings of their own; no partitions.")
    ] = False,
    exclude_internal: ExcludeInternal = False,
    if_exists: IfExists = False,
    server: ServerFlags = SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show topics and their partitions."""
    filters = {
        "--under-replicated-partitions": under_replicated_partitions,
        "--unavailable-partitions": unavailable_partitions,
        "--under-min-isr-partitions": under_min_isr_partitions,
        "--at-min-isr-partitions": at_min_isr_partitions,
    }
    chosen = [flag for flag, given in filters.items() if given]
    if len(chosen) + topics_with_overrides > 1:
        raise UsageError("choose one of " + ", ".join([*filters, "--topics-with-overrides"]))
    pattern = name_pattern(topic)
    admin = _admin(server)
    views = [
        view
        for view in topic_views(admin, select_topics(_all_names(admin), pattern))
        if (topic_id is None or view.topic_id == topic_id) and not (exclude_internal and view.internal)
    ]
    if not views and not if_exists and (topic is not None or topic_id is not None):
        raise no_such_topic(topic) if topic is not None else CommandFailed(f"no topic has the id {topic_id}")
    if topics_with_overrides:
        views = [view for view in views if view.overrides]
    keep = PARTITION_FILTERS[chosen[0]] if chosen else None
    _show_topics(views, keep, partitions_wanted=not topics_with_overrides, output=output)


PARTITION_FILTERS: Mapping[str, Callable[[TopicView, PartitionView], bool]] = {
    "--under-replicated-partitions": lambda view, partition: len(partition.in_sync) < len(partition.replicas),
    "--unavailable-partitions": lambda view, partition: partition.leader is None,
    "--under-min-isr-partitions": lambda view, partition: (
        len(partition.in_sync) < (view.min_insync_replicas or 0)
    ),
    "--at-min-isr-partitions": lambda view, partition: len(partition.in_sync) == view.min_insync_replicas,
}


@app.command(epilog=examples("holdfast topics alter --topic orders --partitions 12"))
def alter(
    topic: TopicToChange,
    partitions: Annotated[int, option("N", "How many partitions the topic will have in all.", min=1)],
    replica_assignment: ReplicaAssignment = None,
    if_exists: IfExists = False,
    server: ServerFlags = SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Add partitions to topics. Settings are changed by 'holdfast configs alter'."""
    assignment = parse_replica_assignment(replica_assignment) if replica_assignment is not None else None
    if assignment is not None and len(assignment) != partitions:
        raise UsageError(
            f"--replica-assignment names {len(assignment)} partitions and --partitions says {partitions}: "
            "give the brokers of every partition, those that exist included"
        )
    pattern = pattern_to_change(topic)
    admin = _admin(server)
    names = select_topics(_all_names(admin), pattern)
    if not names and not if_exists:
        raise no_topic_to_change(topic)
    counts = {name: len(view.partitions) for name, view in describe_topics(admin, names).items()}
    requests = [
        NewPartitions(
            name, partitions, **({"replica_assignment": assignment[counts[name] :]} if assignment else {})
        )
        for name in names
    ]
    futures = admin.create_partitions(requests, request_timeout=REQUEST_TIMEOUT_S) if requests else {}
    _report(_outcomes(futures, "altered"), output)


@app.command(
    epilog=examples(
        "holdfast topics delete --topic orders", "holdfast topics delete --topic 'test-.*' --if-exists"
    )
)
def delete(
    topic: TopicToChange,
    if_exists: IfExists = False,
    server: ServerFlags = SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete topics and everything in them."""
    pattern = pattern_to_change(topic)
    admin = _admin(server)
    names = select_topics(_all_names(admin), pattern)
    if not names and not if_exists:
        raise no_topic_to_change(topic)
    futures = admin.delete_topics(names, request_timeout=REQUEST_TIMEOUT_S) if names else {}
    _report(_outcomes(futures, "deleted"), output)


def _admin(server: ServerFlags) -> AdminClient:
    return server.connect().admin()


def _all_names(admin: AdminClient) -> list[str]:
    return sorted(admin.list_topics(timeout=REQUEST_TIMEOUT_S).topics)


def _outcomes(futures: Mapping[str, Future[Any]], action: str) -> dict[str, str | KafkaError]:
    outcomes: dict[str, str | KafkaError] = {}
    for name, future in futures.items():
        try:
            future.result()
            outcomes[name] = action
        except KafkaException as error:
            outcomes[name] = error.args[0]
    return outcomes


def _report(outcomes: Mapping[str, str | KafkaError], output: Output) -> None:
    """One line or one entry per topic; exit code 1 when any of them failed."""
    failed = False
    results = []
    for name, outcome in outcomes.items():
        error = None
        if isinstance(outcome, KafkaError):
            failed = True
            error = {"code": outcome.name(), "message": outcome.str()}
            complain(f"topic '{name}': {describe_error(outcome, name)}")
        elif output is Output.TABLE:
            print(
                f"Topic {name} exists already."
                if outcome == "exists"
                else f"{outcome.capitalize()} topic {name}."
            )
        results.append({"topic": name, "action": "failed" if error else outcome, "error": error})
    if output is Output.JSON:
        print_json({"results": results})
    if failed:
        raise Exit(ExitCode.FINDINGS)


def _show_topics(
    views: list[TopicView],
    keep: Callable[[TopicView, PartitionView], bool] | None,
    *,
    partitions_wanted: bool,
    output: Output,
) -> None:
    shown: list[tuple[TopicView, list[PartitionView]]] = []
    for view in views:
        partitions = [part for part in view.partitions if keep is None or keep(view, part)]
        if partitions or keep is None:
            shown.append((view, partitions if partitions_wanted else []))
    if output is Output.JSON:
        print_json({"topics": [view.as_json(partitions) for view, partitions in shown]})
        return
    if keep is None and shown:
        _print_topic_table([view for view, _ in shown])
    rows = [
        (
            part.topic,
            part.partition,
            "none" if part.leader is None else part.leader,
            _brokers(part.replicas),
            _brokers(part.in_sync),
        )
        for _, partitions in shown
        for part in partitions
    ]
    if rows:
        if keep is None:
            print()
        print_table(("Topic", "Partition", "Leader", "Replicas", "Isr"), rows)


def _print_topic_table(views: list[TopicView]) -> None:
    rows = [
        (
            view.name,
            view.topic_id,
            len(view.partitions),
            view.replication_factor,
            ", ".join(f"{name}={value}" for name, value in view.overrides.items()) or "-",
        )
        for view in views
    ]
    print_table(("Topic", "TopicId", "PartitionCount", "ReplicationFactor", "Configs"), rows)


def _brokers(ids: tuple[int, ...]) -> str:
    return ",".join(map(str, ids)) or "-"


_LITERAL_NAME = re.compile(r"[a-zA-Z0-9._-]+")


def name_pattern(expression: str | None) -> re.Pattern[str]:
    """Kafka's topic filter: a regular expression over the whole name, where a comma means "or"."""
    if expression is None:
        return re.compile(".*")
    text = re.sub(r"\s+", "", expression.strip().strip("\"'")).replace(",", "|")
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"--topic {expression!r} is not a regular expression: {error}") from error


def pattern_to_change(expression: str) -> re.Pattern[str]:
    """What `alter` and `delete` mean by an expression.

    What could be a topic's name is taken literally: the dot in "orders.v1" must not delete "orders-v1".
    """
    return name_pattern(re.escape(expression) if _LITERAL_NAME.fullmatch(expression) else expression)


def select_topics(names: Iterable[str], pattern: re.Pattern[str]) -> list[str]:
    return sorted(name for name in names if pattern.fullmatch(name))


def parse_replica_assignment(text: str) -> list[list[int]]:
    """Kafka's `0:1,1:2`: partitions by comma, the replicas of each by colon, the preferred leader first."""
    try:
        assignment = [[int(broker) for broker in part.split(":")] for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--replica-assignment {text!r} is not broker ids like 0:1,1:2 (partitions by comma)"
        ) from None
    for partition, replicas in enumerate(assignment):
        if len(set(replicas)) != len(replicas):
            raise UsageError(
                f"--replica-assignment names a broker twice for partition {partition}: {replicas}"
            )
        if len(replicas) != len(assignment[0]):
            raise UsageError("--replica-assignment gives partitions different numbers of replicas")
    return assignment


@dataclass(frozen=True)
class PartitionView:
    topic: str
    partition: int
    leader: int | None
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "partition": self.partition,
            "leader": self.leader,
            "replicas": list(self.replicas),
            "isr": list(self.in_sync),
        }


@dataclass(frozen=True)
class TopicView:
    name: str
    topic_id: str
    internal: bool
    partitions: tuple[PartitionView, ...]
    overrides: Mapping[str, str]
    """The settings that differ from the brokers' defaults because somebody set them on the topic."""
    min_insync_replicas: int | None

    @property
    def replication_factor(self) -> int:
        return len(self.partitions[0].replicas) if self.partitions else 0

    def as_json(self, partitions: Sequence[PartitionView]) -> dict[str, Any]:
        return {
            "topic": self.name,
            "topic_id": self.topic_id,
            "internal": self.internal,
            "partition_count": len(self.partitions),
            "replication_factor": self.replication_factor,
            "configs": dict(self.overrides),
            "partitions": [partition.as_json() for partition in partitions],
        }


def describe_topics(admin: AdminClient, names: Sequence[str]) -> dict[str, TopicDescription]:
    """Descriptions by name; topics that do not exist are left out."""
    found: dict[str, TopicDescription] = {}
    if not names:
        return found
    futures = admin.describe_topics(TopicCollection(list(names)), request_timeout=REQUEST_TIMEOUT_S)
    for name, future in futures.items():
        try:
            found[name] = future.result()
        except KafkaException as error:
            if error.args[0].name() != "UNKNOWN_TOPIC_OR_PART":
                raise failure(error, f"cannot describe topic '{name}'", name) from error
    return found


def topic_views(admin: AdminClient, names: Sequence[str]) -> list[TopicView]:
    descriptions = describe_topics(admin, names)
    configs = topic_configs(admin, list(descriptions))
    return [_view(description, configs[name]) for name, description in sorted(descriptions.items())]


def topic_configs(admin: AdminClient, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Every setting of each topic, as confluent-kafka's ConfigEntry by name."""
    if not names:
        return {}
    resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in names]
    configs: dict[str, dict[str, Any]] = {}
    for resource, future in admin.describe_configs(resources, request_timeout=REQUEST_TIMEOUT_S).items():
        subject = f"cannot read the settings of topic '{resource.name}'"
        configs[resource.name] = result_of(future, subject, resource.name)
    return configs


def _view(description: TopicDescription, configs: Mapping[str, Any]) -> TopicView:
    minimum = configs.get("min.insync.replicas")
    return TopicView(
        name=description.name,
        # As Kafka's tools write it.
        topic_id=str(description.topic_id).translate(str.maketrans("+/", "-_")).rstrip("="),
        internal=bool(description.is_internal),
        partitions=tuple(
            PartitionView(
                topic=description.name,
                partition=partition.id,
                leader=partition.leader.id
                if partition.leader is not None and partition.leader.id >= 0
                else None,
                replicas=tuple(node.id for node in partition.replicas),
                in_sync=tuple(node.id for node in partition.isr),
            )
            for partition in sorted(description.partitions, key=lambda partition: partition.id)
        ),
        overrides={
            name: entry.value
            for name, entry in sorted(configs.items())
            if entry.source == ConfigSource.DYNAMIC_TOPIC_CONFIG.value
        },
        min_insync_replicas=int(minimum.value) if minimum is not None and minimum.value else None,
    )

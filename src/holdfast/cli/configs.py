"""`holdfast configs describe|alter`, with the flags of kafka-configs, for topics and brokers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
)

from holdfast.cli.advice import failure, no_such_topic
from holdfast.cli.broker_defaults import change_defaults, read_defaults
from holdfast.cli.client import REQUEST_TIMEOUT_S, Connection
from holdfast.cli.config_flags import Entity, choose_entity, parse_additions, parse_removals
from holdfast.cli.exits import CommandFailed
from holdfast.cli.options import SERVER, CommandGroup, OutputOption, ServerFlags, examples, flag, option
from holdfast.cli.output import Output, print_json, print_table
from holdfast.errors import UsageError

app = CommandGroup(no_args_is_help=True, help="Show and change the settings of topics and brokers.")

EntityType = Annotated[str | None, option("topics|brokers", "What kind of thing is meant.")]
EntityName = Annotated[str | None, option("NAME", "A topic's name or a broker's id.")]
EntityDefault = Annotated[bool, flag("The dynamic default of all brokers, with --entity-type brokers.")]
TopicName = Annotated[str | None, option("NAME", "Short for --entity-type topics --entity-name NAME.")]
BrokerId = Annotated[str | None, option("ID", "Short for --entity-type brokers --entity-name ID.")]
BrokerDefaults = Annotated[bool, flag("Short for --entity-type brokers --entity-default.")]

SHOWN_WITHOUT_ALL: Mapping[str, frozenset[int]] = {
    "topics": frozenset({ConfigSource.DYNAMIC_TOPIC_CONFIG.value}),
    "brokers": frozenset(
        {ConfigSource.DYNAMIC_BROKER_CONFIG.value, ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG.value}
    ),
}
"""Where the settings come from that somebody set while the cluster ran, as kafka-configs shows them."""


@app.command(
    epilog=examples(
        "holdfast configs describe --topic orders --all",
        "holdfast configs describe --entity-type brokers --entity-name 1 --output json",
    )
)
def describe(
    entity_type: EntityType = None,
    entity_name: EntityName = None,
    entity_default: EntityDefault = False,
    topic: TopicName = None,
    broker: BrokerId = None,
    broker_defaults: BrokerDefaults = False,
    show_all: Annotated[bool, flag("Every setting, defaults and static ones included.", "--all")] = False,
    server: ServerFlags = SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show settings: those set on the entity itself, or with --all every one and where it comes from."""
    entity = choose_entity(entity_type, entity_name, entity_default, topic, broker, broker_defaults)
    connection = server.connect()
    admin = connection.admin()
    documents = []
    for each in _entities(admin, entity):
        entries = [
            entry
            for _, entry in sorted(_read(connection, admin, each).items())
            if show_all or entry.source in SHOWN_WITHOUT_ALL[each.kind]
        ]
        documents.append(_as_json(each, entries))
        if output is Output.TABLE:
            _print_entity(each, entries, show_all)
    if output is Output.JSON:
        print_json({"entities": documents})


@app.command(
    epilog=examples(
        "holdfast configs alter --topic t --add-config segment.ms=60000,cleanup.policy=[compact,delete]",
        "holdfast configs alter --topic orders --delete-config retention.ms",
    )
)
def alter(
    entity_type: EntityType = None,
    entity_name: EntityName = None,
    entity_default: EntityDefault = False,
    topic: TopicName = None,
    broker: BrokerId = None,
    broker_defaults: BrokerDefaults = False,
    add_config: Annotated[
        list[str] | None, option("K=V,K=[A,B]", "Settings to set; brackets keep commas together.")
    ] = None,
    add_config_file: Annotated[str | None, option("FILE", "A properties file with settings to set.")] = None,
    delete_config: Annotated[
        list[str] | None, option("K,K", "Settings to give back to their default.")
    ] = None,
    server: ServerFlags = SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Change settings while the broker runs; all changes of one command happen or none does."""
    entity = choose_entity(entity_type, entity_name, entity_default, topic, broker, broker_defaults)
    if entity.name is None:
        raise UsageError("alter changes one entity: pass --entity-name, or --topic or --broker")
    additions = parse_additions(add_config or [], add_config_file)
    removals = parse_removals(delete_config or [])
    if not additions and not removals:
        raise UsageError("nothing to change: pass --add-config, --add-config-file or --delete-config")
    if both := sorted(additions.keys() & set(removals)):
        raise UsageError(f"cannot both set and delete {', '.join(both)}")
    connection = server.connect()
    admin = connection.admin()
    if removals:
        _check_set_here(entity, _read(connection, admin, entity), removals)
    if entity.is_broker_default:
        change_defaults(connection, additions, removals)
    else:
        _change(admin, entity, additions, removals)
    if output is Output.JSON:
        document = {
            "entity_type": entity.kind,
            "entity_name": entity.name,
            "set": additions,
            "deleted": removals,
        }
        print_json(document)
    else:
        print(f"Updated the settings of {entity}.")


def _entities(admin: AdminClient, entity: Entity) -> list[Entity]:
    if entity.name is not None:
        return [entity]
    cluster = admin.list_topics(timeout=REQUEST_TIMEOUT_S)
    names = sorted(cluster.topics) if entity.kind == "topics" else list(map(str, sorted(cluster.brokers)))
    return [Entity(entity.kind, name) for name in names]


def _resource(entity: Entity, changes: list[ConfigEntry] | None = None) -> ConfigResource:
    kind = ConfigResource.Type.TOPIC if entity.kind == "topics" else ConfigResource.Type.BROKER
    return ConfigResource(kind, entity.name or "", incremental_configs=changes)


def _read(connection: Connection, admin: AdminClient, entity: Entity) -> dict[str, Any]:
    if entity.is_broker_default:
        return read_defaults(connection)
    _check_exists(admin, entity)
    (future,) = admin.describe_configs([_resource(entity)], request_timeout=REQUEST_TIMEOUT_S).values()
    try:
        entries: dict[str, Any] = future.result()
    except KafkaException as error:
        raise failure(error, f"cannot read the settings of {entity}", entity.name or "") from error
    return entries


def _check_exists(admin: AdminClient, entity: Entity) -> None:
    """A missing broker would be waited for; a missing topic deserves a better message than the broker's."""
    cluster = admin.list_topics(timeout=REQUEST_TIMEOUT_S)
    if entity.kind == "topics" and entity.name not in cluster.topics:
        raise no_such_topic(entity.name or "")
    if entity.kind == "brokers" and entity.name and int(entity.name) not in cluster.brokers:
        ids = ", ".join(map(str, sorted(cluster.brokers)))
        raise CommandFailed(f"broker {entity.name} is not in the cluster; its brokers are {ids}")


def _check_set_here(entity: Entity, entries: Mapping[str, Any], removals: list[str]) -> None:
    own = ConfigSource.DYNAMIC_TOPIC_CONFIG if entity.kind == "topics" else ConfigSource.DYNAMIC_BROKER_CONFIG
    if entity.is_broker_default:
        own = ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG
    present = {name for name, entry in entries.items() if entry.source == own.value}
    if missing := [name for name in removals if name not in present]:
        raise CommandFailed(
            f"{entity} has no setting of its own named {', '.join(missing)}; "
            f"it has {', '.join(sorted(present)) or 'none'}"
        )


def _change(admin: AdminClient, entity: Entity, additions: Mapping[str, str], removals: list[str]) -> None:
    _check_exists(admin, entity)
    changes = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in additions.items()
    ] + [ConfigEntry(name, None, incremental_operation=AlterConfigOpType.DELETE) for name in removals]
    resources = [_resource(entity, changes)]
    (future,) = admin.incremental_alter_configs(resources, request_timeout=REQUEST_TIMEOUT_S).values()
    try:
        future.result()
    except KafkaException as error:
        raise failure(error, f"cannot change the settings of {entity}", entity.name or "") from error


def _source_name(source: int) -> str:
    return ConfigSource(source).name


def _as_json(entity: Entity, entries: list[Any]) -> dict[str, Any]:
    return {
        "entity_type": entity.kind,
        "entity_name": entity.name,
        "configs": [
            {
                "name": entry.name,
                "value": entry.value,
                "source": _source_name(entry.source),
                "read_only": entry.is_read_only,
                "sensitive": entry.is_sensitive,
                "synonyms": [
                    {"name": other.name, "value": other.value, "source": _source_name(other.source)}
                    for other in entry.synonyms.values()
                ],
            }
            for entry in entries
        ],
    }


def _print_entity(entity: Entity, entries: list[Any], show_all: bool) -> None:
    title = f"{'All' if show_all else 'Dynamic'} settings of {entity}:"
    if not entries:
        print(f"{title} none")
        return
    rows = [
        (
            entry.name,
            "(hidden)" if entry.is_sensitive else entry.value or "",
            _source_name(entry.source),
            "yes" if entry.is_read_only else "no",
        )
        for entry in entries
    ]
    print_table(("Name", "Value", "Source", "Read-only"), rows, title=title)

"""`holdfast configs describe|alter`, with the flags of kafka-configs, for topics, brokers and their loggers.

The flags of kafka-configs that need more than a type: which entity, which settings to add and remove.

The dynamic default of all brokers, which librdkafka has no way to address.

Kafka names it by an empty broker name; librdkafka refuses that before anything is sent. So these two requests
are said directly, to any bootstrap server: brokers of a cluster pass them on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
)

from holdfast.admin.errors import check
from holdfast.cli.client import (
    REQUEST_TIMEOUT_S,
    Connection,
    no_such_topic,
    read_properties,
    result_of,
)
from holdfast.cli.exits import CommandFailed
from holdfast.cli.options import SERVER, CommandGroup, OutputOption, ServerFlags, examples, flag, option
from holdfast.cli.output import Output, print_json, print_table
from holdfast.errors import ConfigError, UsageError
from holdfast.wire.api_keys import DESCRIBE_CONFIGS, INCREMENTAL_ALTER_CONFIGS

app = CommandGroup(no_args_is_help=True, help="Show and change the settings of topics and brokers.")

LOGGERS = "broker-loggers"
LOGGER_SOURCE = 6
"""Where a level comes from, which librdkafka does not know."""
ENTITY_TYPES = ("topics", "brokers", LOGGERS)


class Entity(NamedTuple):
    """What the settings belong to; `name` None is every entity of the kind, "" the default of all brokers."""

    kind: str
    name: str | None

    @property
    def is_broker_default(self) -> bool:
        return self.name == ""

    @property
    def is_unknown_to_librdkafka(self) -> bool:
        return self.is_broker_default or self.kind == LOGGERS

    def __str__(self) -> str:
        if self.is_broker_default:
            return "the default of all brokers"
        if self.kind == LOGGERS:
            return f"the loggers of broker {self.name}"
        return f"{self.kind.removesuffix('s')} {self.name}"


@dataclass(frozen=True)
class EntityFlags:
    """Kafka's two ways to name an entity: --entity-type with a name, or --topic and --broker."""

    entity_type: Annotated[
        str | None, option("topics|brokers|broker-loggers", "What kind of thing is meant.")
    ] = None
    entity_name: Annotated[str | None, option("NAME", "A topic's name or a broker's id.")] = None
    entity_default: Annotated[
        bool, flag("The dynamic default of all brokers, with --entity-type brokers.")
    ] = False
    topic: Annotated[str | None, option("NAME", "Short for --entity-type topics --entity-name NAME.")] = None
    broker: Annotated[str | None, option("ID", "Short for --entity-type brokers --entity-name ID.")] = None
    broker_defaults: Annotated[bool, flag("Short for --entity-type brokers --entity-default.")] = False

    def chosen(self) -> Entity:
        """The one that is meant."""
        short = [
            Entity(kind, name)
            for kind, name in (
                ("topics", self.topic),
                ("brokers", self.broker),
                ("brokers", "" if self.broker_defaults else None),
            )
            if name is not None
        ]
        if len(short) + (self.entity_type is not None) != 1:
            raise UsageError(
                "name one entity: --topic, --broker, --broker-defaults, or --entity-type with --entity-name"
            )
        if short:
            if self.entity_name is not None or self.entity_default:
                raise UsageError("--entity-name and --entity-default belong to --entity-type")
            entity = short[0]
        else:
            assert self.entity_type is not None
            if self.entity_type not in ENTITY_TYPES:
                raise UsageError(
                    f"--entity-type {self.entity_type!r} is not one of {', '.join(ENTITY_TYPES)}"
                )
            if self.entity_default and (self.entity_name is not None or self.entity_type != "brokers"):
                raise UsageError("--entity-default goes with --entity-type brokers and without --entity-name")
            entity = Entity(self.entity_type, "" if self.entity_default else self.entity_name)
        if entity.kind != "topics" and entity.name and not entity.name.isdecimal():
            raise UsageError(f"a broker is named by its id, a number, not {entity.name!r}")
        return entity


ENTITY: Final = EntityFlags()


SHOWN_WITHOUT_ALL: Mapping[str, frozenset[int]] = {
    "topics": frozenset({ConfigSource.DYNAMIC_TOPIC_CONFIG.value}),
    "brokers": frozenset(
        {ConfigSource.DYNAMIC_BROKER_CONFIG.value, ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG.value}
    ),
    LOGGERS: frozenset({LOGGER_SOURCE}),
}
"""Where the settings come from that somebody set while the cluster ran, as kafka-configs shows them."""


@app.command(
    epilog=examples(
        "holdfast configs describe --topic orders --all",
        "holdfast configs describe --entity-type brokers --entity-name 1 --output json",
    )
)
def describe(
    flags: EntityFlags = ENTITY,
    show_all: Annotated[bool, flag("Every setting, defaults and static ones included.", "--all")] = False,
    server: ServerFlags = SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show settings: those set on the entity itself, or with --all every one and where it comes from."""
    entity = flags.chosen()
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
    flags: EntityFlags = ENTITY,
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
    entity = flags.chosen()
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
    if removals and entity.kind != LOGGERS:
        _check_set_here(entity, _read(connection, admin, entity), removals)
    if entity.is_unknown_to_librdkafka:
        change_directly(connection, entity, additions, removals)
    else:
        _change(admin, entity, additions, removals)
    if output is Output.JSON:
        named = {"entity_type": entity.kind, "entity_name": entity.name}
        print_json({**named, "set": additions, "deleted": removals})
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
    _check_exists(admin, entity)
    if entity.is_unknown_to_librdkafka:
        return read_directly(connection, entity)
    (future,) = admin.describe_configs([_resource(entity)], request_timeout=REQUEST_TIMEOUT_S).values()
    return result_of(future, f"cannot read the settings of {entity}", entity.name or "")


def _check_exists(admin: AdminClient, entity: Entity) -> None:
    """A missing broker would be waited for; a missing topic deserves a better message than the broker's."""
    cluster = admin.list_topics(timeout=REQUEST_TIMEOUT_S)
    if entity.kind == "topics" and entity.name not in cluster.topics:
        raise no_such_topic(entity.name or "")
    if entity.kind != "topics" and entity.name and int(entity.name) not in cluster.brokers:
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
    result_of(future, f"cannot change the settings of {entity}", entity.name or "")


def _source_name(source: int) -> str:
    return "DYNAMIC_BROKER_LOGGER_CONFIG" if source == LOGGER_SOURCE else ConfigSource(source).name


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


_COMMA_OUTSIDE_BRACKETS = re.compile(r",(?![^\[]*\])")


def parse_additions(texts: Sequence[str], config_path: str | None) -> dict[str, str]:
    """--add-config 'k1=v1,k2=[a,b]' and --add-config-file; brackets keep commas together."""
    additions = read_properties(config_path) if config_path is not None else {}
    for text in texts:
        for pair in _COMMA_OUTSIDE_BRACKETS.split(text):
            if not pair.strip():
                continue
            name, equals, value = pair.partition("=")
            if not equals or not name.strip():
                raise ConfigError(
                    f"--add-config {pair!r} is not NAME=VALUE; put values with commas in brackets, k=[a,b]"
                )
            value = value.strip()
            if value.startswith("[") and value.endswith("]"):
                value = value[1:-1]
            additions[name.strip()] = value
    return additions


def parse_removals(texts: Sequence[str]) -> list[str]:
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


BROKER: Final[int] = ConfigResource.Type.BROKER.value
BROKER_LOGGER: Final = 8


def read_directly(connection: Connection, entity: Entity) -> dict[str, ConfigEntry]:
    """The settings of what librdkafka has no name for, by name."""
    request = {"include_synonyms": True, "include_documentation": False}
    result = _ask(connection, entity, DESCRIBE_CONFIGS, {"configuration_keys": None}, request).results[0]
    check(result.error_code, f"cannot read the settings of {entity}", result.error_message)
    return {entry.name: _entry(entry) for entry in result.configs}


def change_directly(
    connection: Connection, entity: Entity, additions: Mapping[str, str], removals: Sequence[str]
) -> None:
    changes = [
        {"name": name, "config_operation": AlterConfigOpType.SET.value, "value": value}
        for name, value in additions.items()
    ]
    changes += [
        {"name": name, "config_operation": AlterConfigOpType.DELETE.value, "value": None} for name in removals
    ]
    request = {"validate_only": False}
    answer = _ask(connection, entity, INCREMENTAL_ALTER_CONFIGS, {"configs": changes}, request)
    result = answer.responses[0]
    check(result.error_code, f"cannot change the settings of {entity}", result.error_message)


def _ask(
    connection: Connection, entity: Entity, api_key: int, about: Mapping[str, Any], request: Mapping[str, Any]
) -> Any:
    kind = BROKER_LOGGER if entity.kind == LOGGERS else BROKER
    resource = {"resource_type": kind, "resource_name": entity.name, **about}
    with connection.brokers() as brokers:
        if entity.name:
            return brokers.ask_broker(int(entity.name), api_key, {"resources": [resource], **request})
        return brokers.ask_any(api_key, {"resources": [resource], **request})


def _entry(entry: Any) -> ConfigEntry:
    return ConfigEntry(
        entry.name,
        entry.value,
        source=entry.config_source,
        is_read_only=entry.read_only,
        is_sensitive=entry.is_sensitive,
        synonyms={
            synonym.name: ConfigEntry(synonym.name, synonym.value, source=synonym.source)
            for synonym in entry.synonyms
        },
    )

"""The audit of a plain consumer: what its group has committed must be in the table it writes.

    report = audit_group("billing", "postgresql://…?table=bills", settings)

The scope ends at the group's committed positions; for a `DatabaseSink`, whose positions stand in the database itself
(`holdfast_positions`), at those. It starts at the log's start, since nothing tells where a group began, or at `--from`.

Rows are matched by the columns that say which record they came from, where a table has such (`_hf_partition` and
`_hf_offset`, `kafka_partition` and `kafka_offset`, `partition` and `offset`…), or by `--match`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.admin.brokers import committed_offsets
from holdfast.admin.errors import Refused
from holdfast.audit.foreign_databases import PostgresTable, SqliteTable, split_table
from holdfast.audit.foreign_tables import column_names, open_table, parse_sink, read_dead_letters
from holdfast.audit.matched import Question, audit_matched
from holdfast.audit.matching import Match, parse_condition, quoted
from holdfast.audit.model import AuditError, Report, Unproven, gap
from holdfast.errors import UsageError
from holdfast.reader import Cluster, TopicPartition

PREFIXES = ("_hf_", "_hf.", "kafka_", "source_", "record_", "_", "")
"""Of columns that say where a row came from; the first that fits counts."""
POSITIONS = "holdfast_positions"
IN_POSTGRES = "SELECT coalesce(has_table_privilege(to_regclass(%s), 'SELECT'), false)"
IN_SQLITE = "SELECT count(*) FROM sqlite_master WHERE name = ?"
READ_POSITIONS = f"SELECT topic, partition, topic_id, position FROM {POSITIONS} WHERE group_id = {{}}"


def audit_group(
    group: str,
    sink: str,
    settings: Mapping[str, str],
    *,
    topics: Sequence[str] = (),
    match: str | None = None,
    where: str | None = None,
    is_distinct: bool = False,
    starts: Mapping[TopicPartition, int] | str | int | None = None,
    dead_letters: str | None = None,
    sink_settings: Mapping[str, str] | None = None,
) -> Report:
    """Whether the sink holds what the group has committed, once each.

    `starts` is where the scope starts: offsets, or milliseconds since the epoch; nothing: at the log's start.
    """
    conditions = () if where is None else parse_condition(where)
    standing = positions(group, sink, settings, topics)
    if match is None:
        match = lineage_match(sink, sorted({place.topic for place in standing.ends}))
    table = open_table(sink, match, sink_settings or settings)
    unproven = []
    with Cluster(settings) as cluster:
        begins, scopes = _scopes(cluster, standing.ends, starts)
    if not any(end > start for start, end in scopes.values()):
        unproven.append(gap(f"anything of group {group!r}", "nothing is committed in the scope"))
    if starts is None:
        unproven.append(
            Unproven(
                f"that group {group!r} began at the topics' first records",
                "nothing keeps where a group began; what it was never given counts as lost (--from)",
            )
        )
    return audit_matched(
        Question(
            subject=f"group {group}",
            mode="group",
            settings=settings,
            scopes=scopes,
            begins=begins,
            ends=standing.said_by,
            topic_ids=standing.topic_ids,
            table=table,
            conditions=conditions,
            is_distinct=is_distinct,
            dead_letters=read_dead_letters(dead_letters, settings, group),
            unproven=unproven,
        )
    )


# ---------------------------------------------------------------------------- positions


@dataclass(frozen=True)
class Standing:
    """Up to where a group is done."""

    ends: Mapping[TopicPartition, int]
    said_by: str
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    """Where who says it knows them."""


def positions(group: str, sink: str, settings: Mapping[str, str], topics: Sequence[str]) -> Standing:
    """What the database of a `DatabaseSink` says of the group, or Kafka does."""
    kind, place = parse_sink(sink)
    found: dict[TopicPartition, int] = {}
    ids: dict[str, str] = {}
    said_by = "the group's committed positions"
    if kind == "postgres":
        found, ids = _in_database(PostgresTable(place, Match(())), IN_POSTGRES, "%s", group)
    elif kind == "sqlite":
        found, ids = _in_database(SqliteTable(place, Match(())), IN_SQLITE, "?", group)
    if found:
        said_by = f"the positions in the database ({POSITIONS})"
    if not found:
        with Cluster(settings) as cluster:
            found = committed(cluster, group)
    wanted = {each: offset for each, offset in found.items() if not topics or each.topic in topics}
    missing = sorted(set(topics) - {each.topic for each in wanted})
    if missing or not wanted:
        known = ", ".join(sorted({each.topic for each in found})) or "none at all"
        asked = f" for {', '.join(missing)}" if missing else ""
        raise AuditError(f"group {group!r} has no committed positions{asked}; it has some for: {known}")
    return Standing(wanted, said_by, ids)


def _in_database(
    table: PostgresTable | SqliteTable, asked: str, mark: str, group: str
) -> tuple[dict[TopicPartition, int], dict[str, str]]:
    """What a `DatabaseSink` has stored; nothing where there is none, or where it may not be read."""
    with table.connected() as connection:
        there = connection.execute(asked, (POSITIONS,)).fetchone()
        rows = connection.execute(READ_POSITIONS.format(mark), (group,)).fetchall() if there[0] else []
    ends = {TopicPartition(str(topic), int(number)): int(position) for topic, number, _, position in rows}
    return ends, {str(topic): str(topic_id) for topic, _, topic_id, _ in rows}


def committed(cluster: Cluster, group: str) -> dict[TopicPartition, int]:
    """What the group has committed to Kafka."""
    try:
        found = committed_offsets(cluster, group)
    except Refused as error:
        raise AuditError(str(error)) from error
    return {TopicPartition(*place): offset for place, (offset, _) in found.items()}


def _scopes(
    cluster: Cluster,
    ends: Mapping[TopicPartition, int],
    starts: Mapping[TopicPartition, int] | str | int | None,
) -> tuple[str, dict[TopicPartition, tuple[int, int]]]:
    log_starts = {place: answer.offset for place, answer in cluster.offsets(ends, "earliest").items()}
    begins = "--from"
    if starts is None or starts == "earliest":
        begins, begin = "the log's start", log_starts
    elif isinstance(starts, int):
        found = {place: answer.offset for place, answer in cluster.offsets(ends, starts).items()}
        begin = {place: end if found[place] < 0 else found[place] for place, end in ends.items()}
    elif isinstance(starts, str):
        raise UsageError(f"--from {starts}: earliest, a time, or offsets by partition")
    else:
        begin = {**log_starts, **starts}
    return begins, {place: (min(begin[place], end), end) for place, end in ends.items()}


# ---------------------------------------------------------------------------- lineage


def lineage_match(sink: str, topics: Sequence[str]) -> str:
    """The match by columns that say which record a row came from."""
    kind, place = parse_sink(sink)
    if kind == "topic":
        raise UsageError(
            "--match is needed for a sink that is a topic: 'key = key', 'headers.hf-id = headers.hf-id'…"
        )
    columns = column_names(kind, place)
    for prefix in PREFIXES:
        roles = [role for role in ("topic", "partition", "offset") if f"{prefix}{role}" in columns]
        if not {"partition", "offset"} <= set(roles):
            continue
        if "topic" not in roles and len(topics) > 1:
            raise UsageError(
                f"{prefix}partition and {prefix}offset do not say of which topic: name one with "
                f"--topic ({', '.join(topics)}), or give --match"
            )
        return " AND ".join(f"{quoted(prefix + role)} = {role}" for role in roles)
    raise UsageError(
        f"--match is needed: no columns of {_shown(kind, place)} say which record a row came from "
        f"(it has {', '.join(columns[:12])})"
    )


def _shown(kind: str, place: str) -> str:
    """A sink in an error: an address of a database may hold a password."""
    return f"table {split_table(place)[2]}" if kind == "postgres" else place.partition("?")[0]

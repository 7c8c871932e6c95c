"""`holdfast groups list|describe|reset-offsets|delete|delete-offsets…`, with the flags of kafka-consumer-groups."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from confluent_kafka import KafkaError
from typer.exceptions import Exit

from holdfast.cli.client import describe_error
from holdfast.cli.exits import CommandFailed, complain
from holdfast.cli.groups_admin import STATE_NAMES, TYPE_NAMES, Group, GroupAdmin
from holdfast.cli.groups_output import (
    export_resets,
    members_as_json,
    offsets_as_json,
    print_members,
    print_offsets,
    print_resets,
    print_state,
    read_offsets,
    state_as_json,
)
from holdfast.cli.groups_reset import (
    Planner,
    ResetTarget,
    Scenario,
    parse_datetime,
    parse_duration,
    parse_topics,
    places_of,
    places_to_delete,
    read_plans,
)
from holdfast.cli.options import (
    CommandGroup,
    OptionalValues,
    OutputOption,
    ServerFlags,
    examples,
    flag,
    option,
)
from holdfast.cli.output import Output, print_json, print_result
from holdfast.errors import ApiError, ExitCode, UsageError

app = CommandGroup(
    no_args_is_help=True,
    help="List, describe and delete consumer groups, and reset their committed offsets.",
)

GroupNames = Annotated[list[str] | None, option("ID", "The group; may be repeated.")]
AllGroups = Annotated[bool, flag("Every group.")]
Topics = Annotated[
    list[str] | None, option("NAME[:0,1]", "A topic, or some of its partitions; may be repeated.")
]


@dataclass(frozen=True)
class GroupServer(ServerFlags):
    """Which cluster is asked about groups, and for how long."""

    timeout: Annotated[int, option("MS", "How long a request to the cluster may take.", min=1)] = 30_000

    def admin(self) -> GroupAdmin:
        return GroupAdmin(self.connect(), self.timeout)


GROUPS: Final = GroupServer()


class _ListCommand(OptionalValues):
    flags = ("--state", "--type")


@app.command(
    "list",
    cls=_ListCommand,
    epilog=examples("holdfast groups list", "holdfast groups list --state stable,empty --type consumer"),
)
def list_groups(
    state: Annotated[
        str | None, option("[STATES]", "Show the state; given some, only groups in those.")
    ] = None,
    type_: Annotated[
        str | None, option("[TYPES]", "Show the type; given some, only groups of those.", "--type")
    ] = None,
    server: GroupServer = GROUPS,
    output: OutputOption = Output.TABLE,
) -> None:
    """List groups, one name per line; with --state or --type a table."""
    states = _choices(state, STATE_NAMES, "--state")
    types = _choices(type_, TYPE_NAMES, "--type")
    found = [
        each
        for each in server.admin().listings()
        if (not states or each.state in states) and (not types or each.type in types)
    ]
    documents = [each._asdict() for each in found]
    if output is Output.TABLE and state is None and type_ is None:
        for each in found:
            print(each.group)
        return
    asked = {"group": "", "type": type_, "state": state}
    columns = [name for name, given in asked.items() if given is not None]
    rows = [[document[name] for name in columns] for document in documents]
    print_result(output, {"groups": documents}, [name.upper() for name in columns], rows)


def _choices(text: str | None, known: Sequence[str], flag: str) -> set[str]:
    by_name = {name.lower(): name for name in known}
    wanted = [each.strip() for each in (text or "").split(",") if each.strip()]
    if unknown := [each for each in wanted if each.lower() not in by_name]:
        raise UsageError(f"{flag} {', '.join(unknown)}: there are {', '.join(known)}")
    return {by_name[each.lower()] for each in wanted}


@app.command(
    epilog=examples(
        "holdfast groups describe --group billing",
        "holdfast groups describe --group billing --members --verbose",
        "holdfast groups describe --all-groups --state",
    )
)
def describe(
    group: GroupNames = None,
    all_groups: AllGroups = False,
    offsets: Annotated[bool, flag("Committed offsets and lag of every partition; the default.")] = False,
    members: Annotated[bool, flag("The members and what they own.")] = False,
    state: Annotated[bool, flag("State, coordinator and number of members.")] = False,
    verbose: Annotated[bool, flag("More columns: epochs, and assignments of members.")] = False,
    server: GroupServer = GROUPS,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show groups: the committed offsets and lag of every partition, or their members, or their state."""
    if offsets + members + state > 1:
        raise UsageError("choose one of --offsets, --members, --state")
    _check_chosen(group, all_groups)
    admin = server.admin()
    names = admin.names() if all_groups else group or []
    found = admin.describe(names, with_epochs=verbose or output is Output.JSON)
    present = [each for each in found.values() if each is not None]
    # With --all-groups nobody named those that have gone since they were listed.
    absent = [] if all_groups else [name for name, each in found.items() if each is None]
    for name in absent:
        complain(f"group '{name}' does not exist; 'holdfast groups list' shows which there are")
    for index, each in enumerate(present):
        _tell_state(each)
        if output is Output.TABLE:
            if index:
                print()
            _show(admin, each, members=members, state=state, verbose=verbose)
    if output is Output.JSON:
        print_json({"groups": [_document(admin, each, members=members, state=state) for each in present]})
    if absent:
        raise Exit(ExitCode.FINDINGS)


def _tell_state(group: Group) -> None:
    if not group.has_members:
        complain(f"group '{group.group}' has no active members")
    elif group.state != "Stable":
        complain(f"group '{group.group}' is rebalancing ({group.state})")


def _show(admin: GroupAdmin, group: Group, *, members: bool, state: bool, verbose: bool) -> None:
    if members:
        print_members(group, verbose=verbose)
    elif state:
        print_state(group, verbose=verbose)
    elif rows := read_offsets(admin, group):
        print_offsets(group, rows, verbose=verbose)
    else:
        complain(f"group '{group.group}' has no committed offsets and owns no partitions")


def _document(admin: GroupAdmin, group: Group, *, members: bool, state: bool) -> dict[str, Any]:
    if members:
        return members_as_json(group)
    if state:
        return state_as_json(group)
    return offsets_as_json(group, read_offsets(admin, group))


@dataclass(frozen=True)
class ResetGoal:
    """Where committed offsets shall go."""

    to_earliest: Annotated[bool, flag("To the first message.")] = False
    to_latest: Annotated[bool, flag("To the end of the log.")] = False
    to_current: Annotated[bool, flag("To where they are; to the end of the log where there is none.")] = False
    to_offset: Annotated[int | None, option("N", "To this offset.", min=0)] = None
    to_datetime: Annotated[
        str | None,
        option(
            "YYYY-MM-DDThh:mm:ss.sss",
            "To the first message at or after this time, UTC unless a zone follows.",
        ),
    ] = None
    by_duration: Annotated[
        str | None, option("PnDTnHnMnS", "To the first message since so long before now.")
    ] = None
    shift_by: Annotated[int | None, option("N", "Forward by N, or back by -N.")] = None
    from_file: Annotated[
        str | None,
        option("FILE", "To the offsets in a CSV file: topic,partition,offset, or with the group in front."),
    ] = None

    def target(self) -> ResetTarget:
        given = {
            Scenario.EARLIEST: 0 if self.to_earliest else None,
            Scenario.LATEST: 0 if self.to_latest else None,
            Scenario.CURRENT: 0 if self.to_current else None,
            Scenario.OFFSET: self.to_offset,
            Scenario.DATETIME: None if self.to_datetime is None else parse_datetime(self.to_datetime),
            Scenario.DURATION: None
            if self.by_duration is None
            else int(time.time() * 1000) - parse_duration(self.by_duration),
            Scenario.SHIFT: self.shift_by,
            Scenario.FILE: None if self.from_file is None else 0,
        }
        chosen = [ResetTarget(scenario, number) for scenario, number in given.items() if number is not None]
        if len(chosen) != 1:
            flags = ", ".join(scenario.value for scenario in Scenario)
            raise UsageError(f"say where to, by exactly one of {flags}")
        return chosen[0]


GOAL: Final = ResetGoal()


@app.command(
    epilog=examples(
        "holdfast groups reset-offsets --group billing --topic orders --to-earliest --execute",
        "holdfast groups reset-offsets --group billing --all-topics --by-duration PT2H --dry-run",
        "holdfast groups reset-offsets --group billing --all-topics --to-current --export > plan.csv",
        "holdfast groups reset-offsets --group billing --from-file plan.csv --execute",
    )
)
def reset_offsets(
    group: GroupNames = None,
    all_groups: AllGroups = False,
    topic: Topics = None,
    all_topics: Annotated[bool, flag("Every partition the group has a committed offset for.")] = False,
    goal: ResetGoal = GOAL,
    dry_run: Annotated[bool, flag("Only show the plan; the default.")] = False,
    execute: Annotated[bool, flag("Carry the plan out.")] = False,
    export: Annotated[bool, flag("Print the plan as CSV for --from-file.")] = False,
    server: GroupServer = GROUPS,
    output: OutputOption = Output.TABLE,
) -> None:
    """Reset the committed offsets of groups without active members. Without --execute the plan is only shown."""
    target = goal.target()
    if dry_run and execute:
        raise UsageError("choose one of --dry-run and --execute")
    if export and output is Output.JSON:
        raise UsageError("--export prints CSV: it does not go with --output json")
    _check_scope(group, all_groups, topic, all_topics, goal.from_file)
    topics = parse_topics(topic or [])
    plans = None if goal.from_file is None else read_plans(goal.from_file, group or [])
    admin = server.admin()
    names = admin.names() if all_groups else list(dict.fromkeys(group or plans or ()))
    if plans is not None and (others := sorted(plans.keys() - set(names))):
        complain(f"{goal.from_file} also has offsets for {', '.join(others)}, which were not asked for")
    planner = Planner(admin, target, places_of(admin, topics) if topics else None, plans)
    resets = [planner.reset(name, found, execute=execute) for name, found in admin.describe(names).items()]
    if output is Output.JSON:
        print_json({"executed": execute, "groups": [each.as_json() for each in resets]})
    elif export:
        export_resets(resets, with_group=len(names) != 1)
    else:
        print_resets(resets)
    if not (execute or dry_run or export) and any(each.moves for each in resets):
        complain("nothing was changed: this is the plan, --execute carries it out")
    if any(each.error for each in resets):
        raise Exit(ExitCode.FINDINGS)


def _check_scope(
    groups: list[str] | None,
    all_groups: bool,
    topics: list[str] | None,
    all_topics: bool,
    from_file: str | None,
) -> None:
    if from_file is not None:
        if topics or all_topics:
            raise UsageError(
                "--from-file names its topics itself: it goes with neither --topic nor --all-topics"
            )
        if not groups and not all_groups:
            return  # the file names its groups too
    elif bool(topics) == all_topics:
        raise UsageError("say which committed offsets to reset: --topic or --all-topics, one of them")
    _check_chosen(groups, all_groups)


@app.command(epilog=examples("holdfast groups delete --group billing --group audit"))
def delete(
    group: GroupNames = None,
    all_groups: AllGroups = False,
    server: GroupServer = GROUPS,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete groups without active members, and with them their committed offsets."""
    _check_chosen(group, all_groups)
    admin = server.admin()
    names = admin.names() if all_groups else list(dict.fromkeys(group or []))
    outcomes = admin.delete(names) if names else {}
    for name, error in outcomes.items():
        if error is not None:
            complain(f"cannot delete group '{name}': {describe_error(error, name)}")
        elif output is Output.TABLE:
            print(f"Deleted group {name}.")
    if output is Output.JSON:
        print_json({"results": [_outcome(name, error) for name, error in outcomes.items()]})
    if any(outcomes.values()):
        raise Exit(ExitCode.FINDINGS)


def _outcome(name: str, error: KafkaError | None) -> dict[str, Any]:
    return {
        "group": name,
        "action": "deleted" if error is None else "failed",
        "error": None if error is None else {"code": error.name(), "message": error.str()},
    }


@app.command(
    epilog=examples("holdfast groups delete-offsets --group billing --topic orders --topic payments:0,1")
)
def delete_offsets(
    group: Annotated[str, option("ID", "The group.")],
    topic: Annotated[list[str], option("NAME[:0,1]", "A topic, or some of its partitions; may be repeated.")],
    server: GroupServer = GROUPS,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete the committed offsets of a group for topics that none of its members is subscribed to."""
    topics = parse_topics(topic)
    admin = server.admin()
    outcomes = admin.delete_offsets(group, places_to_delete(admin, group, topics))
    for refused in filter(None, outcomes.values()):
        complain(str(refused))
    results = [
        {
            "topic": name,
            "partition": partition,
            "action": "deleted" if refused is None else "failed",
            "error": None if refused is None else {"code": refused.name, "message": str(refused)},
        }
        for (name, partition), refused in outcomes.items()
    ]
    rows = [
        (name, partition, "Deleted" if refused is None else f"Failed: {refused.name}")
        for (name, partition), refused in outcomes.items()
    ]
    print_result(output, {"group": group, "results": results}, ("TOPIC", "PARTITION", "STATUS"), rows)
    if any(outcomes.values()):
        raise Exit(ExitCode.FINDINGS)


@app.command(epilog=examples("holdfast groups validate-regex --regex 'orders\\..*'"))
def validate_regex(
    regex: Annotated[str, option("REGEX", "The regular expression.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Say whether a group of the consumer protocol can subscribe to a regular expression.

    The protocol takes the syntax of RE2. The command asks no broker.
    """
    from holdfast.broker.groups.regex import check  # RE2 is loaded by this command alone

    try:
        check(regex)
        problem = None
    except ApiError as error:
        problem = str(error)
    if output is Output.JSON:
        print_json({"regex": regex, "valid": problem is None, "problem": problem})
    elif problem is None:
        print(f"The regular expression {regex} is valid.")
    if problem is not None:
        raise CommandFailed(problem)


def _check_chosen(groups: list[str] | None, all_groups: bool) -> None:
    if bool(groups) == all_groups:
        raise UsageError("say which groups: --group ID or --all-groups, one of them")

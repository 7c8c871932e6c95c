"""`holdfast spool status|inspect|export|drain|retry|accept-cluster|renew`: what producers have stored on this machine.

The exit code is 0 when nothing is wrong: what is stored is delivered, or a living owner is about to deliver it.
Whatever waits, was set aside, is damaged or lost its owner makes it 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import IO, Annotated, Any

from typer.exceptions import Exit

from holdfast.cli.exits import CommandFailed, complain
from holdfast.cli.options import SERVER, CommandGroup, OutputOption, ServerFlags, examples, flag, option
from holdfast.cli.output import Output, content_as_json, json_line, print_result, print_table
from holdfast.client.spool.format import SpooledMessage
from holdfast.client.spool.home import OwnedSpool, SpoolHome
from holdfast.client.spool.identity import read_identity, write_identity
from holdfast.client.spool.peek import Damage, SpoolPeek, SpoolState, is_in_use
from holdfast.client.spool.refused import Refused
from holdfast.errors import ExitCode, HoldfastError, UsageError
from holdfast.real import RealFileSystem, RealRandomness

app = CommandGroup(
    no_args_is_help=True,
    help="What producers with a spool have stored on this machine, and what of it is still to be sent.",
)

SHOWN_CHARACTERS = 48
"""How much of a key, a value or a reason a table shows."""

SpoolOption = Annotated[
    str, option("DIR", "The home of the spools: what a Producer was given as spool=DIR.", "--spool")
]
IdOption = Annotated[str | None, option("ID", "Only this spool of the home, by its 16 digits.", "--id")]
TopicOption = Annotated[str | None, option("NAME", "Only messages for this topic.")]
RefusedOption = Annotated[bool, flag("Refused messages, with the reasons, instead.")]
TimeoutOption = Annotated[int | None, option("MS", "Stop after this long; what is left stays stored.", min=0)]
AllOption = Annotated[bool, flag("Also messages that were delivered and are still in the files.", "--all")]


# Looking


@app.command(
    epilog=examples(
        "holdfast spool status --spool /var/spool/orders",
        "holdfast spool status --spool /var/spool/orders --output json",
    )
)
def status(directory: SpoolOption, spool_id: IdOption = None, output: OutputOption = Output.TABLE) -> None:
    """Show the spools of a home: their owners, what they hold, what waits, what was refused, any damage.

    The command changes nothing.
    """
    home = _home(directory)
    states: list[SpoolState] = []
    has_problem = False
    for each in _ids(home, spool_id):
        try:
            states.append(_peek(home, each).state(each, is_in_use=is_in_use(home, each)))
        except (HoldfastError, OSError) as error:
            complain(f"spool {each} cannot be read: {error}")
            has_problem = True
    rows = [
        (
            state.id,
            _state_word(state),
            state.delivery,
            state.left,
            state.bytes,
            _moment(state.oldest_ms),
            state.refused,
        )
        for state in states
    ]
    columns = ("Spool", "State", "Delivery", "ToSend", "Bytes", "Oldest", "Refused")
    print_result(
        output, {"home": home.path, "spools": [_state_as_json(state) for state in states]}, columns, rows
    )
    for state in states:
        has_problem = has_problem or _state_word(state) not in ("in use", "empty")
        for line in state.waiting if state.left else ():
            complain(f"spool {state.id}: {line}")
    _end_with([damage for state in states for damage in state.damages], has_problem=has_problem)


def _state_word(state: SpoolState) -> str:
    if state.damages:
        return "damaged"
    if state.left and state.waiting:
        return "waiting"
    if state.left and not state.is_in_use:
        return "left behind"
    if state.refused:
        return "refused"
    return "in use" if state.is_in_use else "empty"


def _state_as_json(state: SpoolState) -> dict[str, Any]:
    return {
        "id": state.id,
        "state": _state_word(state).replace(" ", "_"),
        "in_use": state.is_in_use,
        "delivery": state.delivery,
        "to_send": state.left,
        "bytes": state.bytes,
        "oldest_ms": state.oldest_ms,
        "refused": state.refused,
        "waiting": state.waiting if state.left else [],
        "cluster_id": state.cluster_id,
        "partitions": [
            {
                "topic": each.topic,
                "partition": each.partition,
                "stored": each.stored,
                "confirmed": each.confirmed,
            }
            for each in state.partitions
            if each.partition >= 0
        ],
        "undecided": state.undecided,
        "damages": [{"path": each.path, "at": each.at, "bytes": each.bytes} for each in state.damages],
    }


@app.command(
    epilog=examples(
        "holdfast spool inspect --spool /var/spool/orders --topic orders --max-messages 10",
        "holdfast spool inspect --spool /var/spool/orders --refused",
    )
)
def inspect(
    directory: SpoolOption,
    spool_id: IdOption = None,
    topic: TopicOption = None,
    refused: RefusedOption = False,
    everything: AllOption = False,
    max_messages: Annotated[int | None, option("N", "Stop after so many messages.", min=1)] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show messages: those that are still to be sent, or refused ones. Changes nothing, needs no broker."""
    home = _home(directory)
    damages: list[Damage] = []
    documents = _documents(home, spool_id, topic, refused, everything, damages)
    rows: list[tuple[object, ...]] = []
    for number, document in enumerate(documents, 1):
        if output is Output.JSON:
            sys.stdout.write(json_line(document))
        else:
            rows.append(_row(document, refused))
        if number == max_messages:
            break
    if output is Output.TABLE:
        columns = ("Spool", "Topic", "Partition", "Sequence", "Time", "Key", "Value")
        print_table((*columns, "Code", "Reason") if refused else columns, rows)
    _end_with(damages)


@app.command(
    epilog=examples(
        "holdfast spool export --spool /var/spool/orders --file rescued.jsonl",
        "holdfast spool export --spool /var/spool/orders --refused | jq .reason",
    )
)
def export(
    directory: SpoolOption,
    spool_id: IdOption = None,
    topic: TopicOption = None,
    refused: RefusedOption = False,
    everything: AllOption = False,
    file: Annotated[str, option("FILE", "Where to write; - is standard output.")] = "-",
) -> None:
    """Write messages as JSON lines, whole: also those of a damaged spool, as far as they can be read."""
    home = _home(directory)
    damages: list[Damage] = []
    count = 0
    with _writer(file) as to:
        for document in _documents(home, spool_id, topic, refused, everything, damages):
            to.write(json_line(document))
            count += 1
    complain(f"{count} message{'' if count == 1 else 's'} written")
    _end_with(damages)


@contextmanager
def _writer(path: str) -> Iterator[IO[str]]:
    if path == "-":
        yield sys.stdout
        return
    try:
        with open(path, "x", encoding="utf-8") as opened:
            yield opened
    except FileExistsError as error:
        raise UsageError(f"{path} exists already; name a new file") from error


# Delivering


@app.command(
    epilog=examples(
        "holdfast spool drain --spool /var/spool/orders",
        "holdfast spool drain --spool /var/spool/orders --timeout-ms 60000",
    )
)
def drain(
    directory: SpoolOption,
    spool_id: IdOption = None,
    timeout_ms: TimeoutOption = None,
    server: ServerFlags = SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Deliver what spools of dead owners hold, as their owners would, and remove empty spools."""
    home = _home(directory)
    _deliver(home, _ids(home, spool_id), server, timeout_ms, output)


@app.command(
    epilog=examples(
        "holdfast spool retry --refused --spool /var/spool/orders",
        "holdfast spool retry --refused --spool /var/spool/orders --id 9a0c77d1e2f35b68",
    )
)
def retry(
    directory: SpoolOption,
    spool_id: IdOption = None,
    refused: Annotated[bool, flag("Refused messages; say it, since there is no other kind.")] = False,
    timeout_ms: TimeoutOption = None,
    server: ServerFlags = SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Send refused messages again, as new messages behind all others, and what else the spools hold.

    A message that is refused again stays in the spool's refused messages. The producer of a spool in use sends
    them itself, within seconds.
    """
    if not refused:
        raise UsageError("say --refused: this sends refused messages again")
    home = _home(directory)
    _deliver(home, _ids(home, spool_id), server, timeout_ms, output, retry_refused=True)


def _deliver(
    home: SpoolHome,
    ids: list[str],
    server: ServerFlags,
    timeout_ms: int | None,
    output: Output,
    *,
    retry_refused: bool = False,
) -> None:
    from holdfast.cli.exits import Interrupts
    from holdfast.client.settings import spool_settings
    from holdfast.client.spool.drain import Drain

    connection = server.connect()
    connection.admin()
    given = dict(connection.client_config())
    settings = spool_settings(given.pop("bootstrap.servers"), given)
    with Interrupts() as interrupts:
        draining = Drain(
            RealFileSystem(),
            home,
            RealRandomness(),
            settings,
            say=complain,
            is_over=lambda: interrupts.count > 0,
        )
        timeout = None if timeout_ms is None else timeout_ms / 1000
        drained = list(draining.run(ids, timeout, retry_refused=retry_refused))
        was_interrupted = interrupts.count > 0
    rows = [(each.id, each.delivered, each.refused, each.left, each.problem or "-") for each in drained]
    columns = ("Spool", "Delivered", "Refused", "Left", "Problem")
    print_result(output, {"spools": [each._asdict() for each in drained]}, columns, rows)
    if was_interrupted:
        raise Exit(ExitCode.INTERRUPTED)
    if any(each.left or each.refused or each.problem for each in drained):
        raise Exit(ExitCode.FINDINGS)


# Saying what nobody else can know


@app.command(epilog=examples("holdfast spool accept-cluster --spool /var/spool/orders"))
def accept_cluster(directory: SpoolOption, spool_id: IdOption = None) -> None:
    """Let spools deliver to another cluster: the next one that takes a message.

    This is for spools that wait because somebody replaced their cluster on purpose. No producer may use them
    meanwhile.
    """
    home = _home(directory)
    for owned in _taken(home, _ids(home, spool_id)):
        identity = read_identity(RealFileSystem(), owned.directory)
        write_identity(RealFileSystem(), owned.directory, identity._replace(cluster_id=None))
        print(
            f"spool {owned.id}: was for cluster {identity.cluster_id or 'none yet'}, and is for the next one now"
        )


@app.command(epilog=examples("holdfast spool renew --spool /var/spool/orders --id 9a0c77d1e2f35b68"))
def renew(
    directory: SpoolOption,
    spool_id: Annotated[str, option("ID", "The spool, by its 16 digits.", "--id")],
) -> None:
    """Give a spool that is an older copy a new id, so that all it holds is sent.

    What was delivered after the copy was taken, or before that was recorded, may be sent a second time. No
    producer may use the spool meanwhile.
    """
    home = _home(directory)
    for owned in _taken(home, _ids(home, spool_id)):
        print(f"spool {owned.id} is {home.rename(owned)} now")


def _taken(home: SpoolHome, ids: list[str]) -> Iterator[OwnedSpool]:
    """Each of the spools, owned; raises for one that is in use."""
    for each in ids:
        owned = home.take(each)
        if owned is None:
            raise CommandFailed(f"spool {each} is in use: end its producer first")
        try:
            yield owned
        finally:
            owned.lock.release()


# What they share


def _home(directory: str) -> SpoolHome:
    fs = RealFileSystem()
    if not fs.is_directory(directory):
        raise UsageError(f"{directory} is not a directory; name the one a Producer was given as spool=DIR")
    home = SpoolHome(fs, directory.rstrip("/") or "/", RealRandomness())
    if not home.ids():
        hint = "; it is one spool of the home above it" if fs.exists(f"{directory}/lock") else ""
        raise UsageError(f"{directory} holds no spool{hint}")
    return home


def _ids(home: SpoolHome, wanted: str | None) -> list[str]:
    ids = home.ids()
    if wanted is None:
        return ids
    if wanted not in ids:
        raise UsageError(f"--id {wanted}: {home.path} has {', '.join(ids)}")
    return [wanted]


def _peek(home: SpoolHome, spool_id: str) -> SpoolPeek:
    return SpoolPeek(RealFileSystem(), home.directory(spool_id))


def _documents(
    home: SpoolHome,
    spool_id: str | None,
    topic: str | None,
    refused: bool,
    everything: bool,
    damages: list[Damage],
) -> Iterator[dict[str, Any]]:
    """Messages of spools, each as JSON has it; damage is noted in the list."""
    if refused and everything:
        raise UsageError("--refused and --all ask for different messages: choose one")
    for each in _ids(home, spool_id):
        peek = _peek(home, each)
        if refused:
            for aside in peek.refused():
                if topic in (None, aside.message.topic):
                    yield _refused_as_json(each, aside)
            continue
        for kept in peek.messages(is_left_only=not everything):
            if topic in (None, kept.message.topic):
                yield {**_message_as_json(each, kept.message), "to_send": kept.is_left}
        damages += peek.damages


def _message_as_json(spool_id: str, message: SpooledMessage) -> dict[str, Any]:
    return {
        "spool": spool_id,
        "topic": message.topic,
        "partition": message.partition if message.partition >= 0 else None,
        "sequence": message.sequence,
        "timestamp_ms": message.timestamp_ms,
        **content_as_json(message.key, message.value, message.headers, "name"),
    }


def _refused_as_json(spool_id: str, refused: Refused) -> dict[str, Any]:
    return {
        **_message_as_json(spool_id, refused.message),
        "code": refused.code,
        "reason": refused.reason,
        "refused_ms": refused.refused_ms,
    }


def _row(document: dict[str, Any], refused: bool) -> tuple[object, ...]:
    cells = (
        document["spool"],
        document["topic"],
        "-" if document["partition"] is None else document["partition"],
        document["sequence"],
        _moment(document["timestamp_ms"]),
        _shortened(document["key"]),
        _shortened(document["value"]),
    )
    return (*cells, document["code"], _shortened(document["reason"])) if refused else cells


def _shortened(text: str | None) -> str:
    if text is None:
        return "null"
    line = "".join(letter if letter.isprintable() else "·" for letter in text[: SHOWN_CHARACTERS + 1])
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 1] + "…"


def _moment(time_ms: int | None) -> str:
    if time_ms is None:
        return "-"
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _end_with(damages: list[Damage], *, has_problem: bool = False) -> None:
    for damage in damages:
        complain(f"{damage.path}: {damage.bytes} bytes from byte {damage.at} on cannot be read")
    if damages or has_problem:
        raise Exit(ExitCode.FINDINGS)

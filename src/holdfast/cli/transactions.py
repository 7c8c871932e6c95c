"""`holdfast transactions list|describe|describe-producers|abort|find-hanging`, as kafka-transactions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

from typer.exceptions import Exit

from holdfast.cli.exits import CommandFailed, complain
from holdfast.cli.options import SERVER, CommandGroup, OutputOption, ServerFlags, examples, option
from holdfast.cli.output import Output, print_json, print_result
from holdfast.cli.transactions_admin import ActiveProducer, TransactionAdmin
from holdfast.errors import ExitCode, UsageError

app = CommandGroup(
    no_args_is_help=True,
    help="List and describe transactions, find those that hang, and abort them.",
)

DEFAULT_LONGEST_MINUTES = 15
"""Kafka's default of transaction.max.timeout.ms: no transaction of a live producer lasts longer."""

TopicName = Annotated[str, option("NAME", "The topic.")]
OptionalTopic = Annotated[str | None, option("NAME", "The topic.")]
PartitionNumber = Annotated[int, option("N", "The partition.", min=0)]
OptionalPartition = Annotated[int | None, option("N", "The partition.", min=0)]
BrokerId = Annotated[int | None, option("ID", "Ask this broker, instead of each leader.", min=0)]


@app.command(
    "list",
    epilog=examples(
        "holdfast transactions list",
        "holdfast transactions list --duration-filter 60000 --transactional-id-pattern 'billing-.*'",
    ),
)
def list_transactions(
    duration_filter: Annotated[
        int, option("MS", "Only transactions that have been open for longer; all when negative.")
    ] = -1,
    transactional_id_pattern: Annotated[
        str | None, option("REGEX", "Only transactional ids that match, in the syntax of RE2.")
    ] = None,
    state: Annotated[list[str] | None, option("STATE", "Only those in this state; may be repeated.")] = None,
    server: ServerFlags = SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List transactional ids, with their producers and states."""
    states = [_state_name(each) for each in state or []]
    with _admin(server) as admin:
        found = admin.listings(states=states, duration_ms=duration_filter, pattern=transactional_id_pattern)
    columns = ("TransactionalId", "Coordinator", "ProducerId", "TransactionState")
    print_result(output, {"transactions": [each._asdict() for each in found]}, columns, found)


STATES = (
    "Empty",
    "Ongoing",
    "PrepareCommit",
    "PrepareAbort",
    "CompleteCommit",
    "CompleteAbort",
    "PrepareEpochFence",
    "Dead",
)


def _state_name(text: str) -> str:
    for name in STATES:
        if name.lower() == text.strip().lower():
            return name
    raise UsageError(f"--state {text}: there are {', '.join(STATES)}")


@app.command(epilog=examples("holdfast transactions describe --transactional-id billing-1"))
def describe(
    transactional_id: Annotated[str, option("ID", "The transactional id.")],
    server: ServerFlags = SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what the coordinator knows of a transactional id."""
    with _admin(server) as admin:
        found = admin.describe(transactional_id)
    if found is None:
        raise _no_such_id(transactional_id)
    duration_ms = found.duration_ms(_now_ms())
    columns = (
        "CoordinatorId",
        "TransactionalId",
        "ProducerId",
        "ProducerEpoch",
        "TransactionState",
        "TransactionTimeoutMs",
        "CurrentTransactionStartTimeMs",
        "TransactionDurationMs",
        "TopicPartitions",
    )
    row = (
        found.coordinator_id,
        found.transactional_id,
        found.producer_id,
        found.producer_epoch,
        found.state,
        found.timeout_ms,
        found.start_time_ms,
        duration_ms,
        ",".join(f"{topic}-{partition}" for topic, partition in found.places),
    )
    document = asdict(found)
    places = [{"topic": topic, "partition": partition} for topic, partition in document.pop("places")]
    print_result(output, {**document, "duration_ms": duration_ms, "partitions": places}, columns, [row])


@app.command(epilog=examples("holdfast transactions describe-producers --topic orders --partition 0"))
def describe_producers(
    topic: TopicName,
    partition: PartitionNumber,
    broker_id: BrokerId = None,
    server: ServerFlags = SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the producers a partition remembers, and where their open transactions begin."""
    with _admin(server) as admin:
        found = sorted(admin.producers([(topic, partition)], broker_id), key=lambda each: each.producer_id)
    columns = ("ProducerId", "ProducerEpoch", "LatestCoordinatorEpoch", "LastSequence", "LastTimestamp")
    rows = [each[2:] for each in found]
    document = {"producers": [each._asdict() for each in found]}
    print_result(output, document, (*columns, "CurrentTransactionStartOffset"), rows)


@app.command(
    epilog=examples(
        "holdfast transactions abort --transactional-id billing-1",
        "holdfast transactions abort --topic orders --partition 0 --start-offset 4711",
    )
)
def abort(
    transactional_id: Annotated[
        str | None, option("ID", "Abort the open transaction of this id and fence its producer.")
    ] = None,
    topic: OptionalTopic = None,
    partition: OptionalPartition = None,
    start_offset: Annotated[
        int | None, option("N", "The offset where the transaction begins.", min=0)
    ] = None,
    producer_id: Annotated[int | None, option("ID", "The producer, with its epochs.", min=0)] = None,
    producer_epoch: Annotated[int | None, option("N", "The producer's epoch.", min=0)] = None,
    coordinator_epoch: Annotated[
        int | None,
        option("N", "The epoch of the coordinator that last wrote to the partition; -1 when none did."),
    ] = None,
    server: ServerFlags = SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Abort a transaction: the open one of a transactional id, or a hanging one in a partition.

    By transactional id its producer is fenced. A hanging one is named by the offset where it begins or by its
    producer.
    """
    by_producer = (producer_id, producer_epoch, coordinator_epoch)
    if transactional_id is not None:
        if any(flag is not None for flag in (topic, partition, start_offset, *by_producer)):
            raise UsageError("--transactional-id aborts in all partitions: it goes with no other choice")
        with _admin(server) as admin:
            _abort_id(admin, transactional_id, output)
        return
    if topic is None or partition is None:
        raise UsageError("say what to abort: --transactional-id, or --topic and --partition")
    if (start_offset is None) == all(flag is None for flag in by_producer) or (
        start_offset is None and None in by_producer
    ):
        raise UsageError(
            "say which transaction: --start-offset, or --producer-id, --producer-epoch and --coordinator-epoch"
        )
    with _admin(server) as admin:
        if producer_id is None or producer_epoch is None or coordinator_epoch is None:
            assert start_offset is not None
            found = _open_transaction(admin, topic, partition, start_offset)
            producer_id, producer_epoch = found.producer_id, found.producer_epoch
            coordinator_epoch = found.coordinator_epoch
        # No coordinator has written here yet: epoch 0 is one that no leader can find too old.
        admin.abort((topic, partition), producer_id, producer_epoch, max(coordinator_epoch, 0))
    if output is Output.JSON:
        keys = ("topic", "partition", "producer_id", "producer_epoch")
        print_json({"aborted": dict(zip(keys, (topic, partition, producer_id, producer_epoch), strict=True))})
    else:
        print(f"Aborted the transaction of producer {producer_id} on {topic}-{partition}.")


def _open_transaction(
    admin: TransactionAdmin, topic: str, partition: int, start_offset: int
) -> ActiveProducer:
    open_ones = [each for each in admin.producers([(topic, partition)]) if each.start_offset is not None]
    for each in open_ones:
        if each.start_offset == start_offset:
            return each
    offsets = ", ".join(str(each.start_offset) for each in open_ones)
    there_are = f"those that are open there begin at {offsets}" if offsets else "none is open there"
    raise CommandFailed(f"no transaction of {topic}-{partition} begins at offset {start_offset}: {there_are}")


def _abort_id(admin: TransactionAdmin, transactional_id: str, output: Output) -> None:
    before = admin.describe(transactional_id)
    if before is None:  # taking it over would create it
        raise _no_such_id(transactional_id)
    producer_id, producer_epoch = admin.fence(transactional_id)
    if output is Output.JSON:
        document = {
            "transactional_id": transactional_id,
            "state_before": before.state,
            "producer_id": producer_id,
            "producer_epoch": producer_epoch,
        }
        print_json({"aborted": document})
    elif before.state == "Ongoing":
        print(f"Aborted the transaction of {transactional_id} and fenced its producer.")
    else:
        print(f"Fenced the producer of {transactional_id}; it had no open transaction ({before.state}).")


@app.command(
    epilog=examples(
        "holdfast transactions find-hanging --topic orders",
        "holdfast transactions find-hanging --broker-id 1 --max-transaction-timeout 60",
    )
)
def find_hanging(
    broker_id: Annotated[int | None, option("ID", "Search the partitions of this broker.", min=0)] = None,
    topic: Annotated[str | None, option("NAME", "Search this topic only.")] = None,
    partition: Annotated[int | None, option("N", "Search this partition of --topic only.", min=0)] = None,
    max_transaction_timeout: Annotated[
        int,
        option(
            "MINUTES",
            "Only transactions whose last message is older; transaction.max.timeout.ms of the cluster.",
            min=0,
        ),
    ] = DEFAULT_LONGEST_MINUTES,
    server: ServerFlags = SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Find transactions that are open in a partition and that no coordinator will ever end.

    Exit code 1 when there are any.
    """
    if topic is None and broker_id is None:
        raise UsageError("say where to search: --topic or --broker-id")
    if partition is not None and topic is None:
        raise UsageError("--partition needs --topic")
    now_ms = _now_ms()
    with _admin(server) as admin:
        places = admin.places(topic, partition, broker_id)
        found = admin.hanging(places, broker_id, max_transaction_timeout * 60_000, now_ms)
    columns = ("Topic", "Partition", "ProducerId", "ProducerEpoch", "CoordinatorEpoch", "StartOffset")
    rows = [
        (
            *each[:5],
            each.start_offset,
            each.last_timestamp_ms,
            (now_ms - each.last_timestamp_ms) // 60_000,
        )
        for each in found
    ]
    document = {"hanging": [each._asdict() for each in found]}
    print_result(output, document, (*columns, "LastTimestamp", "Duration(min)"), rows)
    if found:
        name, number = found[0].place
        complain(
            f"{len(found)} hanging: readers of committed messages wait there for ever; end each as in "
            f"'holdfast transactions abort --topic {name} --partition {number} "
            f"--start-offset {found[0].start_offset}'"
        )
        raise Exit(ExitCode.FINDINGS)


@contextmanager
def _admin(server: ServerFlags) -> Iterator[TransactionAdmin]:
    connection = server.connect()
    with connection.brokers() as brokers:
        yield TransactionAdmin(brokers)


def _no_such_id(transactional_id: str) -> CommandFailed:
    return CommandFailed(
        f"transactional id '{transactional_id}' is not known to its coordinator; "
        "'holdfast transactions list' shows which are"
    )


def _now_ms() -> int:
    return int(time.time() * 1000)

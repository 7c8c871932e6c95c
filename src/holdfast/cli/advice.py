"""What to do about a broker's refusal: one line per error, naming the thing it is about."""

from __future__ import annotations

from collections.abc import Mapping

from confluent_kafka import KafkaError, KafkaException

from holdfast.cli.client import UNREACHABLE
from holdfast.cli.exits import CannotConnect, CommandFailed

ADVICE: Mapping[int, str] = {
    KafkaError.UNKNOWN_TOPIC_OR_PART: "create it with 'holdfast topics create --topic {name}', "
    "or see 'holdfast topics list'",
    KafkaError.TOPIC_ALREADY_EXISTS: "choose another name, or pass --if-not-exists",
    KafkaError.TOPIC_EXCEPTION: "a name has up to 249 letters, digits, '.', '_' and '-'",
    KafkaError.INVALID_PARTITIONS: "partitions can be added, never removed: pass a larger --partitions",
    KafkaError.INVALID_REPLICATION_FACTOR: "pass a --replication-factor no larger than the number of brokers",
    KafkaError.INVALID_REPLICA_ASSIGNMENT: "name brokers that exist, each once per partition",
    KafkaError.INVALID_CONFIG: "'holdfast configs describe --topic NAME --all' lists names and values",
    KafkaError.INVALID_REQUEST: "see what the broker says, and the command's --help",
    KafkaError.POLICY_VIOLATION: "the cluster's own policy forbids this; ask who runs it",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "this user may not do that to '{name}'; see --command-config",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "this user may not do that; see --command-config",
    KafkaError.MSG_SIZE_TOO_LARGE: "raise max.message.bytes of '{name}' and max.request.size of the producer",
    KafkaError._MSG_TIMED_OUT: "no broker confirmed it within delivery.timeout.ms; it may be stored all the same",
    KafkaError.NON_EMPTY_GROUP: "stop its members first; "
    "'holdfast groups describe --group {name} --members' names them",
    KafkaError.GROUP_ID_NOT_FOUND: "'holdfast groups list' shows which there are",
    KafkaError.INVALID_GROUP_ID: "a group's name has at least one character",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "this user may not do that to '{name}'; see --command-config",
    KafkaError.UNKNOWN_MEMBER_ID: "the group has active members; stop them first",
    KafkaError.COORDINATOR_NOT_AVAILABLE: "the cluster has no coordinator for it at the moment; try again",
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS: "its coordinator is still reading its log; try again",
    KafkaError.NOT_ENOUGH_REPLICAS: "too few replicas are in sync; 'holdfast topics describe --topic {name}'",
}


def describe_error(error: KafkaError, name: str) -> str:
    """What the broker said and what to do about it."""
    advice = ADVICE.get(error.code())
    said = f"{error.str().removeprefix('Broker: ').rstrip('.')} ({error.name()})"
    return f"{said}; {advice.format(name=name)}" if advice else said


def failure(exception: KafkaException, subject: str, name: str) -> CommandFailed:
    """An exception that ends the command: `subject` says what was attempted, `name` on what."""
    error: KafkaError = exception.args[0]
    message = f"{subject}: {describe_error(error, name)}"
    return CannotConnect(message) if error.code() in UNREACHABLE else CommandFailed(message)


def no_such_topic(topic: str) -> CommandFailed:
    advice = ADVICE[KafkaError.UNKNOWN_TOPIC_OR_PART].format(name=topic)
    return CommandFailed(f"topic '{topic}' does not exist; {advice}")


def no_topic_to_change(topic: str) -> CommandFailed:
    """For commands that would change or delete it, and have --if-exists."""
    return CommandFailed(
        f"topic '{topic}' does not exist; 'holdfast topics list' shows which there are, and with --if-exists "
        "this is no failure"
    )

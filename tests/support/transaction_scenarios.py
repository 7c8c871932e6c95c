"""The language of scenarios about transactions: producers with short names begin, write, end, retry and are fenced.

    init ann [timeout=60s] [again=yes]      with `again`, saying who it was (KIP-360)
    produce ann orders-0=one orders-1=two   the broker enrols; from an older producer it is verified
    add ann orders-0 orders-1               AddPartitionsToTxn, for older producers
    commit ann | abort ann                  `as=P1/0` speaks with another producer id and epoch
    older ann                               from here on ann speaks the older protocol
    hold | flush journal | flush partitions | settle    with `hold`, nothing becomes durable unless told
    crash [keep=1]                          the coordinator dies; of what was not durable `keep` records are found again
    offline orders-0 | online orders-0 | delete orders-0
    refuse CODE | accept                    what the journal does from here on
    used-up ann                             the transactional id has come to its last usable epoch
    pass 70s | describe | show orders-0 | log

Every command takes `id=`, "copy" unless said otherwise. Producer ids are shown as P1, P2 in the order they are met; a
producer with its epoch as P1/0. Answers appear under the command that let them leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kio.schema.errors import ErrorCode
from tests.support.coordinator_worlds import Answers, PartitionEntries, TransactionWorld
from tests.support.group_scenarios import duration_ms

from holdfast.broker.transactions.model import (
    EPOCH_USABLE_MAX,
    NEWER_PROTOCOL,
    OLDER_PROTOCOL,
    Ended,
    Initialised,
    ProducerIdentity,
    TopicPartition,
    TransactionMetadata,
    read_record,
    record_of,
)
from holdfast.wire.batch import iterate_records


class Producer:
    def __init__(self, name: str) -> None:
        self.name = name
        self.identity = ProducerIdentity(-1, -1)
        self.client_version = NEWER_PROTOCOL


class TransactionInterpreter:
    def __init__(self) -> None:
        self.world = TransactionWorld()
        self._producers: dict[str, Producer] = {}
        self._ids: dict[int, str] = {}
        self._awaited: list[tuple[str, Answers, Callable[[Any], str]]] = []
        self._is_held = False
        self._logged = 0

    def execute(self, verb: str, words: Sequence[str], options: Mapping[str, str]) -> Iterable[str]:
        if verb in ("commit", "abort"):
            said = self._end(words, options, is_commit=verb == "commit")
        else:
            method = getattr(self, f"do_{verb.replace('-', '_')}", None)
            if method is None:
                raise ValueError(f"no command {verb!r}")
            said = method(words, options) or ()
        yield from said
        if not self._is_held:
            self.world.settle()
        yield from self._answers()

    def _answers(self) -> Iterable[str]:
        waiting, self._awaited = self._awaited, []
        for entry in waiting:
            name, answers, words = entry
            if answers.given:
                yield f"{name}: {words(answers.only)}"
            else:
                self._awaited.append(entry)
        yield from self.world.said
        self.world.said.clear()

    def _await(self, name: str, answers: Answers, words: Callable[[Any], str]) -> None:
        self._awaited.append((name, answers, words))

    # Producers

    def _producer(self, name: str) -> Producer:
        return self._producers.setdefault(name, Producer(name))

    def _who(self, name: str, options: Mapping[str, str]) -> tuple[Producer, ProducerIdentity]:
        producer = self._producer(name)
        if "as" not in options:
            return producer, producer.identity
        label, _, epoch = options["as"].partition("/")
        known = {shown: producer_id for producer_id, shown in self._ids.items()}
        return producer, ProducerIdentity(known.get(label, 99), int(epoch))

    def _show(self, identity: tuple[int, int]) -> str:
        producer_id, epoch = identity
        label = self._ids.setdefault(producer_id, f"P{len(self._ids) + 1}")
        return f"{label}/{epoch}"

    def do_init(self, words: Sequence[str], options: Mapping[str, str]) -> None:
        producer, identity = self._who(words[0], options)

        def answer(reply: Initialised) -> str:
            if reply.error is not ErrorCode.none:
                return reply.error.name.upper()
            producer.identity = ProducerIdentity(reply.producer_id, reply.producer_epoch)
            return f"is {self._show(producer.identity)}"

        answers = self.world.init(
            options.get("id", "copy"),
            timeout_ms=duration_ms(options.get("timeout", "60s")),
            expected=identity if "again" in options else None,
        )
        self._await(producer.name, answers, answer)

    def do_older(self, words: Sequence[str], options: Mapping[str, str]) -> None:
        self._producer(words[0]).client_version = OLDER_PROTOCOL

    def do_used_up(self, words: Sequence[str], options: Mapping[str, str]) -> None:
        producer = self._producer(words[0])
        name = options.get("id", "copy")
        changed = self.world.metadata(name)._replace(producer_epoch=EPOCH_USABLE_MAX)
        self.world.journal.append([record_of(name, changed)], self.world.now)
        self.world.settle()
        self.world.crash()
        producer.identity = producer.identity._replace(epoch=EPOCH_USABLE_MAX)

    # Writing

    def do_produce(self, words: Sequence[str], options: Mapping[str, str]) -> None:
        producer, identity = self._who(words[0], options)
        for place, value in options.items():
            if place in ("id", "as"):
                continue
            answers = self.world.produce(
                options.get("id", "copy"),
                identity,
                partition_named(place),
                value,
                client_version=producer.client_version,
            )
            self._await(producer.name, answers, lambda code, place=place: f"{place} {code.name.upper()}")  # type: ignore[misc]

    def do_add(self, words: Sequence[str], options: Mapping[str, str]) -> None:
        producer, identity = self._who(words[0], options)
        partitions = [partition_named(place) for place in words[1:]]
        answers = self.world.add(options.get("id", "copy"), identity, *partitions)
        self._await(producer.name, answers, lambda code: str(code.name.upper()))

    def _end(self, words: Sequence[str], options: Mapping[str, str], *, is_commit: bool) -> Iterable[str]:
        producer, identity = self._who(words[0], options)
        version = producer.client_version

        def answer(reply: Ended) -> str:
            if reply.error is not ErrorCode.none or version < NEWER_PROTOCOL:
                return reply.error.name.upper()
            producer.identity = ProducerIdentity(reply.producer_id, reply.producer_epoch)
            return f"{'committed' if is_commit else 'aborted'}, and is {self._show(producer.identity)}"

        answers = self.world.end(
            options.get("id", "copy"), identity, is_commit=is_commit, client_version=version
        )
        self._await(producer.name, answers, answer)
        return ()

    # The world

    def do_hold(self, words: Sequence[str], options: Mapping[str, str]) -> None:
        self._is_held = True

    def do_settle(self, words: Sequence[str], options: Mapping[str, str]) -> None:
        self._is_held = False

    def do_flush(self, words: Sequence[str], options: Mapping[str, str]) -> None:
        if words[0] == "journal":
            self.world.journal.flush()
        else:
            self.world.flush_partitions()

    def do_crash(self, words: Sequence[str], options: Mapping[str, str]) -> None:
        self._awaited.clear()
        self.world.crash(keep=int(options.get("keep", "0")))

    def do_offline(self, words: Sequence[str], options: Mapping[str, str]) -> None:
        self._entries(words[0]).is_offline = True

    def do_online(self, words: Sequence[str], options: Mapping[str, str]) -> None:
        self._entries(words[0]).is_offline = False

    def do_delete(self, words: Sequence[str], options: Mapping[str, str]) -> None:
        del self.world.partitions[partition_named(words[0])]

    def do_refuse(self, words: Sequence[str], options: Mapping[str, str]) -> None:
        self.world.journal.refuses = ErrorCode[words[0].lower()]

    def do_accept(self, words: Sequence[str], options: Mapping[str, str]) -> None:
        self.world.journal.refuses = None

    def do_pass(self, words: Sequence[str], options: Mapping[str, str]) -> None:
        self.world.advance(duration_ms(words[0]))

    # Looking

    def _entries(self, place: str) -> PartitionEntries:
        return self.world.partitions[partition_named(place)]

    def do_describe(self, words: Sequence[str], options: Mapping[str, str]) -> Iterable[str]:
        metadata = self.world.coordinator.describe(options.get("id", "copy"))
        return [self._described(metadata) if metadata is not None else "not known"]

    def _described(self, metadata: TransactionMetadata) -> str:
        text = f"{metadata.state.label} {self._show((metadata.producer_id, metadata.producer_epoch))}"
        if metadata.partitions:
            text += " in " + " ".join(f"{topic}-{index}" for topic, index in sorted(metadata.partitions))
        if metadata.next_producer_id >= 0:
            text += f", then {self._show((metadata.next_producer_id, 0))}"
        return text

    def do_show(self, words: Sequence[str], options: Mapping[str, str]) -> Iterable[str]:
        """What a partition holds, and what became of it."""
        entries = self._entries(words[0])
        fates = {True: "committed", False: "aborted", None: "undecided"}
        outcomes = entries.outcomes()
        for entry in entries.entries:
            if entry.is_commit is None:
                yield f"{entry.value} of {self._show(entry.producer)}: {fates[outcomes[entry.value]]}"
            else:
                yield f"{'commit' if entry.is_commit else 'abort'} marker of {self._show(entry.producer)}"

    def do_log(self, words: Sequence[str], options: Mapping[str, str]) -> Iterable[str]:
        """The journal's records since the last look; behind `*` those that a crash may take."""
        batches = self.world.journal.batches
        for at in range(min(self._logged, len(batches)), len(batches)):
            for record in iterate_records(batches[at]):
                found = read_record(record)
                assert found is not None
                name, metadata = found
                mark = "* " if at >= self.world.journal.durable else ""
                yield f"{mark}{name}: {self._described(metadata) if metadata is not None else 'forgotten'}"
        self._logged = len(batches)


def partition_named(place: str) -> TopicPartition:
    topic, _, index = place.rpartition("-")
    return topic, int(index)

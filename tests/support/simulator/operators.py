"""Those who change things from outside: the administrator of topics, an operator of groups, and a stranger.

The administrator is the one client that changes topics, one request at a time. A change whose answer never came is
settled by reading the metadata before the next one, so that the history knows at any time which topics may exist.

`GroupTool` is an operator at the command line: it looks at groups from outside, resets and deletes committed offsets,
deletes groups. And it is the simplest of consumers, which commits offsets without being a member of anything.

`Stranger` may send anything: requests against internal topics, and those that only coordinators send. Nobody minds what
it is answered. The checkers see what it has done to others: it must be nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kio.schema.errors import ErrorCode
from tests.support import history
from tests.support.simulator.link import NOT_NOW, Client
from tests.support.simulator.members import NOBODY, GroupOffsets

from holdfast.wire import api_keys
from holdfast.wire.batch import make_batch

if TYPE_CHECKING:
    from tests.support.simulator.world import KnownTopic, World


Trait: TypeAlias = Literal["expires", "unflushed", "compacted"]

TOPIC_RESOURCE = 2
SET = 0
TOPICS_MAX = 4
PARTITIONS_MAX = 4
_NOT_NOW = frozenset(
    {
        ErrorCode.request_timed_out,
        ErrorCode.not_controller,
        ErrorCode.not_leader_or_follower,
        ErrorCode.leader_not_available,
        ErrorCode.coordinator_not_available,
        ErrorCode.coordinator_load_in_progress,
    }
)
_NAMES = ("alpha", "beta", "gamma", "delta", "epsilon")
_KINDS: tuple[tuple[Trait | None, tuple[tuple[str, str], ...]], ...] = (
    (None, ()),
    (None, ()),
    (None, ()),
    ("expires", (("retention.ms", "3000"), ("retention.bytes", "20000"), ("segment.ms", "500"))),
    ("unflushed", (("holdfast.flush", "os"),)),
    (
        "compacted",
        (
            ("cleanup.policy", "compact"),
            ("segment.ms", "300"),
            ("min.cleanable.dirty.ratio", "0.01"),
            ("delete.retention.ms", "400"),
            ("index.interval.bytes", "512"),
        ),
    ),
)
"""What a topic promises less than others, and the settings that make it so."""
_SETTINGS = (
    ("internal.segment.bytes", ("8000", "60000")),
    ("segment.ms", ("200", "5000", "604800000")),
    ("index.interval.bytes", ("0", "512", "4096")),
    ("flush.messages", ("1", "9223372036854775807")),
    ("holdfast.write.ahead.bytes", ("0", "20000", "1048576")),
)


class Administrator(Client):
    def __init__(
        self, world: World, name: str, lasting: tuple[str, ...] = (), *, likes_compacted: bool = False
    ) -> None:
        super().__init__(world, name)
        self._lasting = lasting
        """Topics that are made first, keep everything, and are never deleted."""
        self._likes_compacted = likes_compacted
        self._unsettled = True
        """Some change's outcome is unknown: the next request must be for metadata."""

    @property
    def is_settled(self) -> bool:
        return not self.is_waiting and not self._unsettled

    def settle(self) -> None:
        """Learn how the last change went."""
        if not self.is_settled:
            self.act(may_change=False)

    def act(self, may_change: bool = True) -> bool:
        if self.is_waiting:
            return False
        if self._unsettled or not may_change:
            return self.read_metadata()
        rng = self.world.rng
        live = list(self.world.topics.values())
        for name in self._lasting:
            if name not in self.world.topics:
                return self._create(name)
        if len(live) < 2 or (len(live) < TOPICS_MAX and rng.random() < 0.15):
            return self._create()
        choices: list[Callable[[], bool]] = [
            self._delete_records,
            self._delete_records,
            self._alter_config,
            self._describe_config,
            self._take_producer_id,
            self._take_producer_id,
            self._add_partitions,
            self._delete,
            self.read_metadata,
        ]
        return rng.choice(choices)()

    def _change(
        self, kind: str, api_key: int, version: int, fields: dict[str, Any], then: Callable[[Any], str | None]
    ) -> bool:
        """`then` takes the answer and says how it went; None leaves a change unsettled."""

        def answered(response: Any) -> None:
            outcome = then(response)
            if outcome is None:
                self._unsettled = True
            self.world.say(f"{self.name}: {kind}: {outcome}")
            self.world.count(kind, outcome or "storage error")

        def lost() -> None:
            self._unsettled = True
            self.world.say(f"{self.name}: {kind}: unknown")

        return self.ask(kind, api_key, version, fields, answered, lost)

    def _outcome(self, kind: str, error: ErrorCode) -> str | None:
        if error == ErrorCode.kafka_storage_error:
            self.world.storage_error(f"{self.name}: {kind}")
            return None
        if error in _NOT_NOW:
            return None
        self.world.unexpected(f"{self.name}: {kind} was answered {error.name}")
        return error.name

    def read_metadata(self) -> bool:
        self.world.observe(history.MetadataBegun(self.name))
        fields = {
            "topics": None,
            "allow_auto_topic_creation": False,
            "include_topic_authorized_operations": False,
        }
        return self._change(
            "metadata", api_keys.METADATA, self.world.rng.choice((12, 13)), fields, self._metadata_read
        )

    def _metadata_read(self, response: Any) -> str:
        topics: dict[str, history.TopicSeen] = {}
        for topic in response.topics:
            if topic.name.startswith("__"):
                continue
            epochs: list[int] = [-1] * len(topic.partitions)
            for partition in topic.partitions:
                epochs[partition.partition_index] = (
                    partition.leader_epoch if partition.error_code == ErrorCode.none else -1
                )
            topics[topic.name] = history.TopicSeen(topic.topic_id.hex, tuple(epochs))
        self.world.observe(history.MetadataRead(self.name, topics))
        self.world.set_topics(
            {name: (seen.topic_id, len(seen.leader_epochs)) for name, seen in topics.items()}
        )
        self._unsettled = False
        return "ok"

    def _create(self, lasting: str | None = None) -> bool:
        rng = self.world.rng
        name = lasting or rng.choice([name for name in _NAMES if name not in self.world.topics])
        count = rng.choice((1, 2, 3))
        self.world.observe(history.TopicCreationRequested(name, count))
        self.world.say(f"{self.name}: create {name} of {count}")
        configs = [
            {"name": key, "value": rng.choice(values)} for key, values in _SETTINGS if rng.random() < 0.4
        ]
        trait, settings = (None, ()) if lasting else rng.choice(_KINDS)
        if self._likes_compacted and not lasting and rng.random() < 0.5:
            trait, settings = _KINDS[-1]
        self.world.traits[name] = trait
        if trait is not None:
            configs = [{"name": key, "value": value} for key, value in settings]
        topic = {
            "name": name,
            "num_partitions": count,
            "replication_factor": rng.choice((1, -1)),
            "assignments": [],
            "configs": configs,
        }
        fields = {"topics": [topic], "timeout": 30_000, "validate_only": False}

        def then(response: Any) -> str | None:
            result = response.topics[0]
            if result.error_code != ErrorCode.none:
                return self._outcome(f"create {name}", result.error_code)
            self.world.observe(history.TopicCreated(name, result.topic_id.hex, count))
            self.world.add_topic(name, result.topic_id.hex, count)
            return "ok"

        return self._change("create topic", api_keys.CREATE_TOPICS, 7, fields, then)

    def _delete(self) -> bool:
        topic = self.world.rng.choice(list(self.world.topics.values()))
        if len(self.world.topics) < 2 or topic.name in self._lasting or self.world.rng.random() < 0.3:
            return False
        self.world.observe(history.TopicDeletionRequested(topic.name))
        self.world.say(f"{self.name}: delete {topic.name}")
        self.world.remove_topic(topic.name)
        by_id = self.world.rng.random() < 0.5
        state = {"name": None if by_id else topic.name, "topic_id": topic.uuid if by_id else None}

        def then(response: Any) -> str | None:
            error = response.responses[0].error_code
            if error != ErrorCode.none:
                return self._outcome(f"delete {topic.name}", error)
            self.world.observe(history.TopicDeleted(topic.name))
            return "ok"

        return self._change(
            "delete topic", api_keys.DELETE_TOPICS, 6, {"topics": [state], "timeout": 30_000}, then
        )

    def _add_partitions(self) -> bool:
        topic = self._some_topic()
        if topic.partitions >= PARTITIONS_MAX:
            return False
        count = topic.partitions + 1
        self.world.observe(history.PartitionsRequested(topic.name, count))
        self.world.say(f"{self.name}: {topic.name} shall have {count} partitions")
        fields = {
            "topics": [{"name": topic.name, "count": count, "assignments": None}],
            "timeout": 30_000,
            "validate_only": False,
        }

        def then(response: Any) -> str | None:
            error = response.results[0].error_code
            if error != ErrorCode.none:
                return self._outcome(f"partitions of {topic.name}", error)
            self.world.observe(history.PartitionsCreated(topic.name, count))
            topic.partitions = count
            return "ok"

        return self._change("create partitions", api_keys.CREATE_PARTITIONS, 3, fields, then)

    def _some_topic(self) -> KnownTopic:
        return self.world.rng.choice(list(self.world.topics.values()))

    def _alter_config(self) -> bool:
        topic = self._some_topic()
        if topic.is_compacted:
            return False
        key, values = self.world.rng.choice(_SETTINGS)
        value = self.world.rng.choice(values)
        self.world.observe(history.ConfigRequested(topic.name, key, value))
        self.world.say(f"{self.name}: {key} of {topic.name} shall be {value}")
        resource = {
            "resource_type": TOPIC_RESOURCE,
            "resource_name": topic.name,
            "configs": [{"name": key, "config_operation": SET, "value": value}],
        }

        def then(response: Any) -> str | None:
            error = ErrorCode(response.responses[0].error_code)
            if error != ErrorCode.none:
                return self._outcome(f"{key} of {topic.name}", error)
            self.world.observe(history.ConfigAltered(topic.name, key, value))
            return "ok"

        fields = {"resources": [resource], "validate_only": False}
        return self._change("alter configs", api_keys.INCREMENTAL_ALTER_CONFIGS, 1, fields, then)

    def _describe_config(self) -> bool:
        topic = self._some_topic()
        keys = [key for key, _ in _SETTINGS]
        resource = {"resource_type": TOPIC_RESOURCE, "resource_name": topic.name, "configuration_keys": keys}

        def then(response: Any) -> str | None:
            result = response.results[0]
            error = ErrorCode(result.error_code)
            if error != ErrorCode.none:
                return self._outcome(f"configs of {topic.name}", error)
            for config in result.configs:
                self.world.observe(history.ConfigRead(topic.name, config.name, config.value))
            return "ok"

        fields = {"resources": [resource], "include_synonyms": False, "include_documentation": False}
        return self._change("describe configs", api_keys.DESCRIBE_CONFIGS, 4, fields, then)

    def _delete_records(self) -> bool:
        chosen = self.world.some_partitions(1)
        if not chosen:
            return False
        known = chosen[0]
        if known.topic.is_compacted or known.topic.name in self._lasting:
            return False
        end = self.world.checkers.records.end_floor(known.partition)
        before = self.world.rng.randrange(end + 1)
        self.world.observe(history.DeletionRequested(known.partition, before))
        self.world.say(f"{self.name}: delete records of {known} before {before}")
        partition = {"partition_index": known.index, "offset": before}
        fields = {"topics": [{"name": known.topic.name, "partitions": [partition]}], "timeout": 30_000}

        def then(response: Any) -> str | None:
            result = response.topics[0].partitions[0]
            if result.error_code == ErrorCode.offset_out_of_range:
                return "behind the log start"
            if result.error_code != ErrorCode.none:
                return self._outcome(f"delete records of {known}", result.error_code)
            self.world.observe(history.DeletionAcknowledged(known.partition, result.low_watermark))
            return "ok"

        return self._change("delete records", api_keys.DELETE_RECORDS, 2, fields, then)

    def _take_producer_id(self) -> bool:
        fields = {"transactional_id": None, "transaction_timeout": 0, "producer_id": -1, "producer_epoch": -1}

        def then(response: Any) -> str | None:
            if response.error_code != ErrorCode.none:
                return self._outcome("init producer id", response.error_code)
            self.world.observe(history.ProducerIdGiven(response.producer_id, response.producer_epoch))
            return "ok"

        return self._change("init producer id", api_keys.INIT_PRODUCER_ID, 5, fields, then)


_REFUSED = frozenset(
    {
        ErrorCode.non_empty_group,
        ErrorCode.group_id_not_found,
        ErrorCode.group_subscribed_to_topic,
        ErrorCode.transactional_id_not_found,
    }
)


class GroupTool(Client):
    def __init__(self, world: World, name: str, books: list[GroupOffsets], loner: GroupOffsets) -> None:
        super().__init__(world, name)
        self._books = [*books, loner]
        self._loner = loner
        """A group without members."""

    def act(self) -> bool:
        if self.is_waiting:
            return False
        rng = self.world.rng
        book = rng.choice(self._books)
        draw = rng.random()
        if draw < 0.4:
            self.is_waiting = True
            book.fetch(self.link, NOBODY, self._done)
            return True
        if draw < 0.7:
            return self._commit(self._loner)
        if draw < 0.8:
            return self._commit(book)
        if draw < 0.88:
            return self._delete_offsets(book)
        if draw < 0.92:
            return self._delete_group(book)
        return self._look(book)

    def _done(self, _: object) -> None:
        self.is_waiting = False

    def _commit(self, book: GroupOffsets) -> bool:
        """Set offsets, back perhaps, in nobody's name: a group with members refuses."""
        partitions = book.partitions()
        if not partitions:
            return False
        rng = self.world.rng
        offsets = {
            partition: rng.randrange(60)
            for partition in rng.sample(partitions, rng.randint(1, len(partitions)))
        }
        self.is_waiting = True
        book.commit(self.link, offsets, NOBODY, (2, 5, 8, 9, 10), self._done)
        return True

    def _tell(
        self, kind: str, api_key: int, version: int, fields: dict[str, Any], then: Callable[[Any], ErrorCode]
    ) -> bool:
        def answered(response: Any) -> None:
            error = then(response)
            self.world.count(kind, error.name)
            self.world.say(f"{self.name}: {kind}: {error.name}")
            if error != ErrorCode.none and error not in NOT_NOW and error not in _REFUSED:
                self.world.refused(f"{self.name}: {kind}", error)

        return self.ask(kind, api_key, version, fields, answered)

    def _delete_offsets(self, book: GroupOffsets) -> bool:
        partitions = book.partitions()
        if not partitions:
            return False
        chosen = self.world.rng.choice(partitions)
        known = self.world.known(chosen)
        deletion = book.name(f"{self.name} deletes")
        self.world.observe(history.OffsetsDeletionRequested(book.group, deletion, (chosen,)))
        topic = {"name": known.topic.name, "partitions": [{"partition_index": known.index}]}

        def then(response: Any) -> ErrorCode:
            error = ErrorCode(response.error_code)
            if error == ErrorCode.none:
                error = ErrorCode(response.topics[0].partitions[0].error_code)
            if error == ErrorCode.none:
                self.world.observe(history.OffsetsDeleted(book.group, deletion))
            return error

        fields = {"group_id": book.group, "topics": [topic]}
        return self._tell("delete offsets", api_keys.OFFSET_DELETE, 0, fields, then)

    def _delete_group(self, book: GroupOffsets) -> bool:
        deletion = book.name(f"{self.name} deletes all")
        partitions = tuple(book.partitions())
        self.world.observe(history.OffsetsDeletionRequested(book.group, deletion, partitions))
        self.world.observe(history.GroupDeletionRequested(book.group))
        self.world.say(f"{self.name}: delete {book.group}")

        def then(response: Any) -> ErrorCode:
            error = ErrorCode(response.results[0].error_code)
            if error == ErrorCode.none:
                self.world.observe(history.OffsetsDeleted(book.group, deletion))
            return error

        version = self.world.rng.choice((0, 2))
        return self._tell(
            "delete group", api_keys.DELETE_GROUPS, version, {"groups_names": [book.group]}, then
        )

    def _look(self, book: GroupOffsets) -> bool:
        """Ask for what changes nothing; the answer need only be one."""
        rng = self.world.rng
        group, keys = [book.group], {"key_type": 0, "coordinator_keys": [book.group]}
        looks: list[tuple[str, int, tuple[int, ...], dict[str, Any], Callable[[Any], Any]]] = [
            ("list groups", api_keys.LIST_GROUPS, (2, 5), {}, lambda response: response),
            ("describe group", api_keys.DESCRIBE_GROUPS, (0, 5, 6), {"groups": group}, lambda r: r.groups[0]),
            (
                "describe consumer group",
                api_keys.CONSUMER_GROUP_DESCRIBE,
                (0, 1),
                {"group_ids": group},
                lambda r: r.groups[0],
            ),
            ("find coordinator", api_keys.FIND_COORDINATOR, (4, 6), keys, lambda r: r.coordinators[0]),
            (
                "list transactions",
                api_keys.LIST_TRANSACTIONS,
                (0, 1),
                {"duration_filter": -1},
                lambda response: response,
            ),
            (
                "describe transaction",
                api_keys.DESCRIBE_TRANSACTIONS,
                (0,),
                {"transactional_ids": ["x1"]},
                lambda r: r.transaction_states[0],
            ),
        ]
        kind, api_key, versions, fields, answer_of = rng.choice(looks)

        def then(response: Any) -> ErrorCode:
            return ErrorCode(answer_of(response).error_code)

        return self._tell(kind, api_key, rng.choice(versions), fields, then)


INTERNAL_TOPICS = ("__consumer_offsets", "__transaction_state")
_INTERNAL_SETTINGS = (
    ("cleanup.policy", "delete"),
    ("retention.ms", "1"),
    ("retention.bytes", "1"),
    ("delete.retention.ms", "0"),
    ("max.compaction.lag.ms", "1"),
    ("message.timestamp.type", "LogAppendTime"),
)


class Stranger(Client):
    def act(self) -> bool:
        if self.is_waiting:
            return False
        rng = self.world.rng
        api_key, version, fields = rng.choice((self._markers, self._markers, self._administration))()
        self.world.say(f"{self.name}: request {api_key} {fields}")
        kind = f"stranger: {api_key}"
        return self.ask(kind, api_key, version, fields, lambda _: self.world.count(kind, "answered"))

    def _markers(self) -> tuple[int, int, dict[str, Any]]:
        """The end of somebody's transaction, of any epoch and of a coordinator that nobody knows."""
        rng = self.world.rng
        topics = [
            {"name": known.topic.name, "partition_indexes": [known.index]}
            for known in self.world.some_partitions(2)
        ]
        marker = {
            "producer_id": rng.randrange(6),
            "producer_epoch": rng.choice((0, 1, 2, 32_767)),
            "transaction_result": rng.random() < 0.5,
            "topics": [*topics, {"name": INTERNAL_TOPICS[0], "partition_indexes": [0, 1]}],
            "coordinator_epoch": rng.choice((0, 0, 1, 100, 2**31 - 1)),
        }
        return api_keys.WRITE_TXN_MARKERS, 1, {"markers": [marker]}

    def _administration(self) -> tuple[int, int, dict[str, Any]]:
        rng = self.world.rng
        name = rng.choice(INTERNAL_TOPICS)
        setting, value = rng.choice(_INTERNAL_SETTINGS)
        configs = [{"name": setting, "config_operation": SET, "value": value}]
        resource = {"resource_type": TOPIC_RESOURCE, "resource_name": name, "configs": configs}
        more = {"name": name, "count": rng.choice((3, 50)), "assignments": None}
        anew = {"name": name, "num_partitions": 7, "replication_factor": 1, "assignments": [], "configs": []}
        before = [{"partition_index": index, "offset": -1} for index in (0, 1)]
        junk = [{"index": index, "records": make_batch([b"junk"])} for index in (0, 1)]
        requests: tuple[tuple[int, int, dict[str, Any]], ...] = (
            (api_keys.CREATE_PARTITIONS, 3, {"topics": [more], "timeout": 30_000, "validate_only": False}),
            (api_keys.CREATE_TOPICS, 7, {"topics": [anew], "timeout": 30_000, "validate_only": False}),
            (api_keys.DELETE_TOPICS, 6, {"topics": [{"name": name, "topic_id": None}], "timeout": 30_000}),
            (
                api_keys.DELETE_RECORDS,
                2,
                {"topics": [{"name": name, "partitions": before}], "timeout": 30_000},
            ),
            (api_keys.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource], "validate_only": False}),
            (
                api_keys.PRODUCE,
                9,
                {
                    "transactional_id": None,
                    "acks": -1,
                    "timeout": 30_000,
                    "topic_data": [{"name": name, "partition_data": junk}],
                },
            ),
        )
        return rng.choice(requests)

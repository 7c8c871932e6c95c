"""Where a member begins on the partitions it is given, and what it makes of errors while it reads.

It begins at the group's committed offset; where there is none, at the beginning, on partitions that were added later
too (HF304). A committed offset that the log does not hold any more means that messages expired before they were
handled, or that the topic was recreated: the member stops and says so, unless it was told where to go on (HF305,
HF206). So it does when the group has no committed offset and had one before, as its marks tell, and when the offset
is of another topic of the same name: one that was deleted, and recreated since, before the member took it over or under
its eyes. The topic's id is stored beside each committed offset (see `commits.Note`), so that is noticed whenever the
topic is looked at next.

Of the topics that match its patterns a member does not take those that its own dead letters go to. Otherwise `^orders`
would take `orders-dlt`, hand dead letters to the handler that could not handle them, and set them aside in
`orders-dlt-dlt`, and so on. A topic that is subscribed to by its name is taken whatever it holds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Consumer as RawConsumer

from holdfast.client.consuming.commits import Note
from holdfast.client.consuming.marks import GroupMarks, Mark
from holdfast.client.errors import ClientError
from holdfast.client.process import say
from holdfast.client.settings import is_incremental, shared_settings
from holdfast.client.spool.format import PartitionKey
from holdfast.client.topic_ids import NONE, TopicIds, TopicRecreated

LostOffsets: TypeAlias = Literal["stop", "earliest", "latest"]
ANSWER_SECONDS: Final = 30.0
"""How long the broker has to say where a group is."""
MEMBER_ANSWER_SECONDS: Final = 5.0
"""How long it has to say so to a member, before we ask it without being one, see `_committed`; and how long it has to
tell a topic's id while work waits for it."""
PATIENCE_SECONDS: Final = 60.0
"""How long we retry while the broker cannot say; well below max.poll.interval.ms, within which a member must answer."""
AGAIN_SECONDS: Final = 0.5
HOPELESS: Final = frozenset(
    (
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.INVALID_SESSION_TIMEOUT,
        KafkaError._FATAL,
    )
)
UNREADABLE: Final = frozenset(
    (
        KafkaError._BAD_MSG,
        KafkaError._BAD_COMPRESSION,
        KafkaError._NOT_IMPLEMENTED,
        KafkaError._UNDERFLOW,
        KafkaError.INVALID_MSG,
    )
)
"""The client would go on behind what it could not read."""
PASSING: Final = frozenset(
    (KafkaError._PARTITION_EOF, KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._TIMED_OUT)
)
"""Not worth a word: the client connects again by itself."""
WAY_OUT: Final = (
    "Decide where to go on: lost_offsets='earliest' or 'latest', or `holdfast groups reset-offsets`."
)


class CommittedOffsetLost(ClientError):
    """A committed offset is no longer in the log; going on would skip or repeat, which is not ours to decide."""


class UnreadableMessages(ClientError):
    """The log holds something that cannot be read; going on would skip it."""


class Start(NamedTuple):
    """Where a member begins on a partition."""

    offset: int
    """The committed offset, or the one decided on; negative for the beginning of the log."""
    note: str = ""
    """Its metadata."""
    read_from: int | None = None
    """An offset before the committed offset, when something before it is to be read again."""
    is_stored: bool = True
    """False where it was decided on now: what comes behind it is lost if it is decided on once more."""
    changelog: str = ""
    """Which state belongs to the committed offset, by its metadata; see `changelog`."""


def messages(consumer: Any, seconds: float, most: int) -> Iterator[Any]:
    """Up to `most` messages, the first of which may take so long.

    One at a time: a batch could hold messages that were read before a rebalance took their partition away, or gave
    it back at another offset.
    """
    raw = consumer.poll(seconds)
    while raw is not None:
        yield raw
        most -= 1
        raw = consumer.poll(0) if most > 0 else None


def _differ(stored: str, now: str) -> bool:
    """Whether two ids are of two topics; one that is not known, or that an old broker does not give, tells nothing."""
    return bool(stored and now) and stored != now and NONE not in (stored, now)


def _without_committed_offset(committed: list[TopicPartition]) -> list[PartitionKey]:
    return [(each.topic, each.partition) for each in committed if each.error is None and each.offset < 0]


class Assignment:
    def __init__(
        self,
        consumer: Any,
        lost_offsets: LostOffsets,
        *,
        say: Callable[[str], None] = say,
        marks: GroupMarks | None = None,
        settings: Mapping[str, Any] | None = None,
        ids: TopicIds | None = None,
        sources: Collection[Source] = (),
    ) -> None:
        """`sources` are what is subscribed to: partitions of our own dead letters, which a pattern may bring, are left
        alone. `settings` are the consumer's own: with them another one can be made that asks in its place, and somebody
        who asks for topics' ids; without either, committed offsets are not told from those of another topic of the
        name."""
        self._settings = settings
        self._ids = TopicIds(settings) if ids is None and settings is not None else ids
        self._sources = sources
        self._left_alone: frozenset[str] = frozenset()
        self._id_of: dict[PartitionKey, str] = {}
        """Which topic we believe to read, where that is known."""
        self._consumer = consumer
        self._lost_offsets = lost_offsets
        self._marks = marks
        self.is_incremental = is_incremental(settings or {})
        """Whether rebalances take single partitions: cooperative assignors, and the new group protocol."""
        self._say = say

    def take_over(self, partitions: list[TopicPartition], lookback: int = 0) -> dict[PartitionKey, Start]:
        """Take partitions over, reading so many offsets before the committed offset of each again."""
        alone, partitions = self.divide(partitions)
        starts: dict[PartitionKey, Start] = {}
        if partitions:
            committed = self._patiently(lambda: self._committed(partitions))
            forgotten = self._patiently(partial(self._forgotten, committed))
            if forgotten:
                # Another member may have had them since, and a committed offset is stored before its mark is.
                committed = self._patiently(lambda: self._committed(partitions))
                missing = set(_without_committed_offset(committed))
                forgotten = {key: mark for key, mark in forgotten.items() if key in missing}
            ids = self._topic_ids({each.topic for each in partitions})
            for each in committed:
                mark = forgotten.get((each.topic, each.partition))
                stored_id = Note.decode(each.metadata).topic_id
                self._id_of[each.topic, each.partition] = ids.get(each.topic, stored_id)
                starts[each.topic, each.partition] = (
                    self._patiently(partial(self._start_of, each, lookback))
                    if mark is None
                    else Start(self._patiently(partial(self._start_of_forgotten, mark)), is_stored=False)
                )
        self.assign(
            [
                TopicPartition(*key, start.offset if start.read_from is None else start.read_from)
                for key, start in starts.items()
            ]
            + alone
        )
        if alone:
            self._consumer.pause(alone)
        return starts

    def divide(self, partitions: list[TopicPartition]) -> tuple[list[TopicPartition], list[TopicPartition]]:
        """Partitions that are to be left alone, since they hold our own dead letters, and the others."""
        own: frozenset[str] = self._patiently(lambda: own_dead_letters(self._sources, self._consumer))
        for topic in sorted({each.topic for each in partitions} & own - self._left_alone):
            self._say(
                f"'{topic}' is for dead letters of this group: a pattern does not take it, its name would"
            )
        self._left_alone |= own
        alone = [
            TopicPartition(each.topic, each.partition, OFFSET_END) for each in partitions if each.topic in own
        ]
        return alone, [each for each in partitions if each.topic not in own]

    def _committed(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Where the group is.

        A member asks under its epoch, and gets no answer if that has passed: if it was expelled, or its group has moved
        on, while it learned of its partitions. The client asks again and again, and notices nothing until this call
        has returned. Somebody who is no member is answered. What the member may do with it is decided when it commits.
        """
        if self._settings is None:
            return list(self._consumer.committed(partitions, timeout=ANSWER_SECONDS))
        try:
            return list(self._consumer.committed(partitions, timeout=MEMBER_ANSWER_SECONDS))
        except KafkaException as refused:
            if refused.args[0].code() != KafkaError._TIMED_OUT:
                raise
        stranger = self._stranger(self._settings.get("isolation.level", "read_committed"))
        try:
            return list(stranger.committed(partitions, timeout=ANSWER_SECONDS))
        finally:
            stranger.close()

    def _stranger(self, isolation: str) -> Any:
        """A consumer of the group's name that is no member."""
        assert self._settings is not None
        return RawConsumer(
            {
                **shared_settings(self._settings),
                "group.id": self._settings["group.id"],
                "isolation.level": isolation,
                "enable.auto.commit": False,
            }
        )

    def _forgotten(self, committed: list[TopicPartition]) -> dict[PartitionKey, Mark]:
        """Partitions that this group had a committed offset of, and has none any more."""
        return self._marks.find(_without_committed_offset(committed)) if self._marks is not None else {}

    def _start_of_forgotten(self, mark: Mark) -> int:
        place = f"{mark.topic}-{mark.partition}"
        since = time.strftime("%Y-%m-%d", time.gmtime(mark.since_ms / 1000))
        what = f"{place}: group '{mark.group}' has worked here since {since}, and has no committed offset any more"
        if self._lost_offsets == "stop":
            raise CommittedOffsetLost(
                f"{what}: it expired (offsets.retention.minutes), or was deleted. To begin again would repeat what was "
                f"handled, and pass over what left the log meanwhile. {WAY_OUT}"
            )
        self._say(f"{what}; going on at the {self._lost_offsets}")
        if self._lost_offsets == "earliest":
            return OFFSET_BEGINNING
        return self._ends(TopicPartition(mark.topic, mark.partition))[1]

    def _start_of(self, committed: TopicPartition, lookback: int) -> Start:
        key, note = (committed.topic, committed.partition), Note.decode(committed.metadata)
        if committed.offset >= 0 and _differ(note.topic_id, self._id_of[key]):
            start = Start(self.start_of_recreated(key, self._id_of[key], note.topic_id), is_stored=False)
            return start._replace(changelog=note.changelog)
        position = self.start(committed)
        if self._marks is not None and note.is_remembered and committed.offset >= 0:
            self._marks.known(key)
        is_stored = position == committed.offset
        start = Start(position, note.seen if is_stored else "", is_stored=is_stored, changelog=note.changelog)
        if position <= 0 or not lookback:
            return start
        low, _ = self._ends(committed)
        return start._replace(read_from=max(low, position - lookback))

    # Topics that are recreated

    def note(self, key: PartitionKey, *, seen: str = "", changelog: str = "") -> str:
        """The metadata that we commit with an offset."""
        is_remembered = self._marks is not None and self._marks.is_remembered(key)
        return Note(is_remembered, self._id_of.get(key, ""), changelog, seen).encode()

    def _topic_ids(self, topics: Collection[str]) -> Mapping[str, str]:
        """Which topics these are now. Where that cannot be had, those of the committed offsets are believed, until a
        later look tells."""
        try:
            return {} if self._ids is None else self._ids.known(topics)
        except KafkaException as refused:
            self._say(
                f"the ids of {', '.join(sorted(topics))} cannot be had ({refused.args[0].str()}): whether a topic was "
                "recreated shows later"
            )
            return {}

    def recreated(self, keys: Collection[PartitionKey], *, waits: bool) -> dict[PartitionKey, str]:
        """Partitions whose topic has another id than when we took them over, with that id.

        Who does not wait gets the answer to the question before. Where there is no answer nothing is told: what is
        committed meanwhile has the old id beside it.
        """
        topics = {topic for topic, _ in keys}
        if self._ids is None:
            return {}
        try:
            ids = self._ids.known(topics, MEMBER_ANSWER_SECONDS) if waits else self._ids.look(topics)
        except KafkaException:
            return {}
        return {
            key: ids[key[0]]
            for key in keys
            if key[0] in ids and _differ(self._id_of.get(key, ""), ids[key[0]])
        }

    def start_of_recreated(self, key: PartitionKey, new: str, old: str | None = None) -> int:
        """Where to go on in a topic that took the place of the one we had; raises unless somebody has decided that."""
        topic, partition = key
        what = (
            f"topic '{topic}' was deleted and recreated: this group's committed offset of {topic}-{partition} is of "
            f"the topic with id {old or self._id_of[key]}, and now the id is {new}"
        )
        if self._lost_offsets == "stop":
            raise TopicRecreated(
                f"{what}. To go on there would skip the first messages of the new one. {WAY_OUT}"
            )
        low, high = self._patiently(lambda: self._ends(TopicPartition(*key)))
        self._id_of[key] = new
        self._say(f"{what}; going on at the {self._lost_offsets}")
        return int(low if self._lost_offsets == "earliest" else high)

    def close(self) -> None:
        if self._ids is not None:
            self._ids.close()

    def restart(self, starts: Mapping[PartitionKey, int], others: Mapping[PartitionKey, int]) -> None:
        """Read some of our partitions from elsewhere; `others` are the rest, with where each goes on."""
        partitions = [TopicPartition(*key, offset) for key, offset in starts.items()]
        if self.is_incremental:
            self._consumer.incremental_unassign(partitions)
            self._consumer.incremental_assign(partitions)
        else:
            self._consumer.assign(
                partitions + [TopicPartition(*key, offset) for key, offset in others.items()]
            )

    def assign(self, partitions: list[TopicPartition]) -> None:
        if self.is_incremental:
            self._consumer.incremental_assign(partitions)
        else:
            self._consumer.assign(partitions)

    @staticmethod
    def _patiently(ask: Callable[[], Any]) -> Any:
        """Ask again while the broker is only away."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return ask()
            except KafkaException as refused:
                error: KafkaError = refused.args[0]
                if error.fatal() or error.code() in HOPELESS or time.monotonic() >= deadline:
                    raise
                time.sleep(AGAIN_SECONDS)

    def _ends(self, partition: TopicPartition) -> tuple[int, int]:
        """The first offset of a log, and the one behind its last that is decided."""
        return self._ends_by(self._consumer, partition)

    def _log_end(self, partition: TopicPartition) -> int:
        """The offset behind the last of a log, of transactions that are open, or not seen to have ended, too."""
        if self._settings is None:
            return self._ends(partition)[1]
        stranger = self._stranger("read_uncommitted")
        try:
            return self._ends_by(stranger, partition)[1]
        finally:
            stranger.close()

    @staticmethod
    def _ends_by(consumer: Any, partition: TopicPartition) -> tuple[int, int]:
        ends = consumer.get_watermark_offsets(partition, timeout=ANSWER_SECONDS)
        if ends is None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return int(ends[0]), int(ends[1])

    def end(self, partitions: list[TopicPartition]) -> None:
        """Let partitions go."""
        if self.is_incremental:
            self._consumer.incremental_unassign(partitions)
        else:
            self._consumer.unassign()

    def start(self, committed: TopicPartition) -> int:
        """Where to begin, given a committed offset: there, if the log still holds it."""
        if committed.error is not None:
            raise KafkaException(committed.error)
        if committed.offset < 0:
            return OFFSET_BEGINNING
        low, high = self._ends(committed)
        # Whoever set it to the end of the log may have set it behind an open transaction, where reading goes on later.
        if low <= committed.offset <= high or high < committed.offset <= self._log_end(committed):
            return int(committed.offset)
        return self.elsewhere(committed, low, high)

    def elsewhere(self, lost: TopicPartition, low: int | None = None, high: int | None = None) -> int:
        """Where to go on when a committed offset is not in the log; raises unless somebody has decided that."""
        key = (lost.topic, lost.partition)
        for new in self.recreated([key], waits=True).values():
            return self.start_of_recreated(key, new)
        if low is None or high is None:
            low, high = self._patiently(lambda: self._ends(lost))
        place = f"{lost.topic}-{lost.partition}"
        if self._lost_offsets == "stop":
            how = (
                f"{low - lost.offset} messages expired before they were handled"
                if lost.offset < low
                else "it was cut off, or brought back from an older copy, and may hold other messages there by now"
            )
            raise CommittedOffsetLost(
                f"{place}: this group's committed offset {lost.offset} is outside the log, which holds {low} to "
                f"{high}: {how}. {WAY_OUT}"
            )
        self._say(
            f"{place}: committed offset {lost.offset} is outside the log ({low} to {high}); "
            f"going on at the {self._lost_offsets}"
        )
        return low if self._lost_offsets == "earliest" else high

    def judge(self, raw: Any, error: KafkaError) -> BaseException | None:
        """What an error among the messages means: a reason to stop, or nothing that lasts."""
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            return CommittedOffsetLost(
                f"{raw.topic()}-{raw.partition()}: the committed offset {raw.offset()} of this group is not in the log "
                f"any more ({error.str()}). Messages may have expired before they were handled. {WAY_OUT}"
            )
        if error.code() in UNREADABLE:
            return UnreadableMessages(
                f"{raw.topic()}-{raw.partition()} at {raw.offset()}: {error.str()} (HF205). Nothing behind it was "
                "handed out; going on would skip messages."
            )
        if error.fatal() or error.code() in HOPELESS:
            return KafkaException(error)
        if error.code() not in PASSING:
            self._say(f"{error.name()}: {error.str()}")
        return None


def takes(topics: Iterable[str], topic: str) -> bool:
    """Whether a topic is among these; names that begin with ^ are patterns, as everywhere in the client."""
    return any(topic == each or (each.startswith("^") and re.search(each, topic)) for each in topics)


class Source(NamedTuple):
    """Topics by name or pattern, and where what fails of each goes."""

    topics: Collection[str]
    dead_letter_topic: Callable[[str], str]

    def letters(self, topic: str) -> str | None:
        if not takes(self.topics, topic):
            return None
        try:
            return self.dead_letter_topic(topic)
        except Exception:  # noqa: BLE001 - a user's function that does not know the topic: nothing of it goes anywhere
            return None


def own_dead_letters(sources: Collection[Source], consumer: Any) -> frozenset[str]:
    """Topics that a pattern would take although they hold our own dead letters. Raises KafkaException when nobody
    answers."""
    names = {each for source in sources for each in source.topics}
    if not any(each.startswith("^") for each in names):
        return frozenset()
    found = consumer.list_topics(timeout=ANSWER_SECONDS)
    if found is None:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
    return frozenset(
        letters
        for source in sources
        for topic in found.topics
        if (letters := source.letters(topic)) is not None and letters != topic and letters not in names
    )


SEEK_SECONDS: Final = 10.0
SEEK_AGAIN_SECONDS: Final = 0.005
METADATA: Final = b"CGMDv2:"
"""How librdkafka's serialised group metadata begins; the generation follows, as a 32-bit number."""


def seek(consumer: Any, place: TopicPartition) -> None:
    """Seek; a partition that was assigned a moment ago is not ready for it at once."""
    deadline = time.monotonic() + SEEK_SECONDS
    while True:
        try:
            consumer.seek(place)
        except KafkaException as error:
            if error.args[0].code() != KafkaError._STATE or time.monotonic() > deadline:
                raise
            time.sleep(SEEK_AGAIN_SECONDS)
        else:
            return


def is_member(consumer: Any, metadata: bytes) -> bool:
    """Whether group metadata is that of a member.

    A member that lost its membership and has not been told yet has none, and a broker takes offsets that come in a
    transaction without a member as those of a program that uses no group: nothing would fence them.
    """
    if metadata.startswith(METADATA):
        generation = metadata[len(METADATA) : len(METADATA) + 4]
        return int.from_bytes(generation, "little", signed=True) >= 0
    return bool(consumer.memberid())

"""An operator at the command line: looks at groups from outside, resets and deletes positions, deletes groups.

And the simplest of consumers, which commits positions without being a member of anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from tests.support.simulator.link import Link
from tests.support.simulator.positions import NOBODY, PositionBook
from tests.support.simulator.retriable import NOT_NOW

from holdfast.testing import history

if TYPE_CHECKING:
    from tests.support.simulator.world import World

DESCRIBE_GROUPS = 15
LIST_GROUPS = 16
DELETE_GROUPS = 42
OFFSET_DELETE = 47
_REFUSED = frozenset(
    {
        ErrorCode.non_empty_group,
        ErrorCode.group_id_not_found,
        ErrorCode.group_subscribed_to_topic,
        ErrorCode.transactional_id_not_found,
    }
)


class GroupTool:
    def __init__(self, world: World, name: str, books: list[PositionBook], loner: PositionBook) -> None:
        self.world = world
        self.name = name
        self.link = Link(world, name)
        self._books = [*books, loner]
        self._loner = loner
        """A group without members."""
        self._waiting = False

    is_settled = True

    def settle(self) -> None:
        """Nothing is left to be done."""

    def act(self) -> bool:
        if self._waiting:
            return False
        rng = self.world.rng
        book = rng.choice(self._books)
        draw = rng.random()
        if draw < 0.4:
            self._waiting = True
            book.fetch(self.link, NOBODY, self._done)
            return True
        if draw < 0.7:
            return self._commit(self._loner)
        if draw < 0.8:
            return self._commit(book)
        if draw < 0.88:
            return self._delete_positions(book)
        if draw < 0.92:
            return self._delete_group(book)
        return self._look(book)

    def _done(self, _: object) -> None:
        self._waiting = False

    def _commit(self, book: PositionBook) -> bool:
        """Set positions, back perhaps, in nobody's name: a group with members refuses."""
        partitions = book.partitions()
        if not partitions:
            return False
        rng = self.world.rng
        positions = {
            partition: rng.randrange(60)
            for partition in rng.sample(partitions, rng.randint(1, len(partitions)))
        }
        self._waiting = True
        book.commit(self.link, positions, NOBODY, (2, 5, 8, 9, 10), self._done)
        return True

    def _ask(
        self,
        kind: str,
        api_key: int,
        version: int,
        fields: dict[str, Any],
        then: Callable[[Any], ErrorCode],
    ) -> bool:
        self._waiting = True

        def answered(response: Any | None) -> None:
            self._waiting = False
            if response is None:
                self.world.count(kind, "unknown")
                return
            error = then(response)
            self.world.count(kind, error.name)
            self.world.say(f"{self.name}: {kind}: {error.name}")
            if error != ErrorCode.none and error not in NOT_NOW and error not in _REFUSED:
                self.world.refused(f"{self.name}: {kind}", error)

        self.link.request(api_key, version, fields, answered)
        return True

    def _delete_positions(self, book: PositionBook) -> bool:
        partitions = book.partitions()
        if not partitions:
            return False
        chosen = self.world.rng.choice(partitions)
        known = self.world.known(chosen)
        deletion = book.name(f"{self.name} deletes")
        self.world.observe(history.PositionsDeletionRequested(book.group, deletion, (chosen,)))
        topic = {"name": known.topic.name, "partitions": [{"partition_index": known.index}]}

        def then(response: Any) -> ErrorCode:
            error = ErrorCode(response.error_code)
            if error == ErrorCode.none:
                error = ErrorCode(response.topics[0].partitions[0].error_code)
            if error == ErrorCode.none:
                self.world.observe(history.PositionsDeleted(book.group, deletion))
            return error

        fields = {"group_id": book.group, "topics": [topic]}
        return self._ask("delete positions", OFFSET_DELETE, 0, fields, then)

    def _delete_group(self, book: PositionBook) -> bool:
        deletion = book.name(f"{self.name} deletes all")
        partitions = tuple(book.partitions())
        self.world.observe(history.PositionsDeletionRequested(book.group, deletion, partitions))
        self.world.observe(history.GroupDeletionRequested(book.group))
        self.world.say(f"{self.name}: delete {book.group}")

        def then(response: Any) -> ErrorCode:
            error = ErrorCode(response.results[0].error_code)
            if error == ErrorCode.none:
                self.world.observe(history.PositionsDeleted(book.group, deletion))
            return error

        version = self.world.rng.choice((0, 2))
        return self._ask("delete group", DELETE_GROUPS, version, {"groups_names": [book.group]}, then)

    def _look(self, book: PositionBook) -> bool:
        """Ask for what changes nothing; the answer need only be one."""
        rng = self.world.rng
        group, keys = [book.group], {"key_type": 0, "coordinator_keys": [book.group]}
        looks: list[tuple[str, int, tuple[int, ...], dict[str, Any], Callable[[Any], Any]]] = [
            ("list groups", LIST_GROUPS, (2, 5), {}, lambda response: response),
            ("describe group", DESCRIBE_GROUPS, (0, 5, 6), {"groups": group}, lambda r: r.groups[0]),
            ("describe consumer group", 69, (0, 1), {"group_ids": group}, lambda r: r.groups[0]),
            ("find coordinator", 10, (4, 6), keys, lambda r: r.coordinators[0]),
            ("list transactions", 66, (0, 1), {"duration_filter": -1}, lambda response: response),
            (
                "describe transaction",
                65,
                (0,),
                {"transactional_ids": ["x1"]},
                lambda r: r.transaction_states[0],
            ),
        ]
        kind, api_key, versions, fields, answer_of = rng.choice(looks)

        def then(response: Any) -> ErrorCode:
            return ErrorCode(answer_of(response).error_code)

        return self._ask(kind, api_key, rng.choice(versions), fields, then)

"""What a hand-over changes in the log directories, and how all of it is taken back.

The journal, `graduation.json` in the output directory, is durable before the first change and names every one: files
and directories moved out of the log directories or renamed in them, files made, owners changed, and the bytes appended
to the metadata log. Each change may be found done, half done or not done, and is taken back all the same. So a process
that dies anywhere leaves a journal from which `take_back` restores every byte, and whoever begins again takes back
first.

The append to the metadata log comes last when changes are made, and goes first when they are taken back. It also tells
whether anybody has used the directories since: Kafka writes `quorum-state` beside the metadata log before anything
else, and every start of Kafka or holdfast appends to the log and uses up the mark of a clean stop. Then nothing is
taken back, for that would take away what was written since.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, NamedTuple

from holdfast.atomic import parent_of, write_atomically
from holdfast.broker.log.checkpoints import CLEAN_SHUTDOWN_FILE
from holdfast.errors import UsageError
from holdfast.real import RealFileSystem, flush_descriptor

JOURNAL_FILE: Final = "graduation.json"
QUORUM_STATE_FILE: Final = "quorum-state"
KIND: Final = "holdfast-graduation"
VERSION: Final = 1
FS: Final = RealFileSystem()

CHANGING: Final = "changing"
GRADUATED: Final = "graduated"
UNDOING: Final = "undoing"


class AlreadyUsed(UsageError):
    """The directories were used since: what was changed cannot be taken back any more."""


class Move(NamedTuple):
    """A file or directory that gets another path. Between two file systems files are copied."""

    old: str
    new: str


class Owner(NamedTuple):
    path: str
    user: int
    group: int


class Made(NamedTuple):
    """A file that is made, with its content."""

    path: str
    data: str
    """In hexadecimal."""


@dataclass(frozen=True)
class Append:
    """Bytes behind the end of a file."""

    path: str
    position: int
    data: str
    """In hexadecimal."""

    @property
    def bytes(self) -> bytes:
        return bytes.fromhex(self.data)


@dataclass(frozen=True)
class Journal:
    state: str
    log_dirs: tuple[str, ...]
    metadata_path: str
    append: Append
    moves: tuple[Move, ...] = ()
    made: tuple[Made, ...] = ()
    owners: tuple[Owner, ...] = ()
    """As they were."""
    new_owner: tuple[int, int] | None = None
    settings_taken: tuple[Mapping[str, str], ...] = ()
    """Settings that Kafka does not know, for the way back: resource, name and value."""
    details: Mapping[str, Any] = field(default_factory=dict)


Tick = Callable[[], None]
"""Called before each change: where a process may die."""


def journal_path(output: str) -> str:
    return f"{output}/{JOURNAL_FILE}"


def save(journal: Journal, output: str) -> None:
    document = {"kind": KIND, "version": VERSION, **asdict(journal)}
    write_atomically(FS, journal_path(output), json.dumps(document, indent=1).encode() + b"\n")


def load(output: str) -> Journal | None:
    """The journal in an output directory; none when there was no hand-over, or it was taken back."""
    path = journal_path(output)
    try:
        with open(path, "rb") as file:
            document = json.loads(file.read())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if document.get("kind") != KIND or document.get("version") != VERSION:
        raise UsageError(f"{path} is no journal of a hand-over that this version knows")
    return Journal(
        state=document["state"],
        log_dirs=tuple(document["log_dirs"]),
        metadata_path=document["metadata_path"],
        append=Append(**document["append"]),
        moves=tuple(Move(*each) for each in document["moves"]),
        made=tuple(Made(*each) for each in document["made"]),
        owners=tuple(Owner(*each) for each in document["owners"]),
        new_owner=None if document["new_owner"] is None else (*document["new_owner"],),
        settings_taken=tuple(document["settings_taken"]),
        details=document["details"],
    )


# Making the changes


def make(journal: Journal, output: str, tick: Tick = lambda: None) -> None:
    """Make every change the journal names; durable when it returns."""
    save(journal, output)
    for move in journal.moves:
        tick()
        os.makedirs(parent_of(move.new), exist_ok=True)
        _move(move.old, move.new)
    for made in journal.made:
        tick()
        _write(made.path, bytes.fromhex(made.data))
    if journal.new_owner is not None:
        for owner in journal.owners:
            tick()
            os.chown(owner.path, *journal.new_owner, follow_symlinks=False)
        for made in journal.made:
            os.chown(made.path, *journal.new_owner)
    _flush_directories(journal)
    tick()
    append = journal.append
    with closing(FS.open(append.path, "write")) as file:
        file.pwritev([append.bytes], append.position)
        file.flush()
    tick()
    save(replace(journal, state=GRADUATED), output)


def _move(old: str, new: str) -> None:
    if not os.path.lexists(old):
        return
    try:
        os.rename(old, new)
    except OSError as error:
        if os.path.isdir(old) or os.stat(parent_of(old)).st_dev == os.stat(parent_of(new)).st_dev:
            raise
        del error
        shutil.copy2(old, new + ".part")
        with open(new + ".part", "rb") as file:
            flush_descriptor(file.fileno())
        os.rename(new + ".part", new)
        FS.flush_directory(parent_of(new))
        os.unlink(old)


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        flush_descriptor(file.fileno())


def _flush_directories(journal: Journal) -> None:
    paths = [path for move in journal.moves for path in move] + [made.path for made in journal.made]
    for directory in dict.fromkeys(map(parent_of, paths)):
        if os.path.isdir(directory):
            FS.flush_directory(directory)


# Taking them back


def used_since(journal: Journal) -> str:
    """How it shows that somebody used the directories after the changes were made; empty while nobody did."""
    if os.path.exists(f"{journal.metadata_path}/{QUORUM_STATE_FILE}"):
        return f"Kafka has written {journal.metadata_path}/{QUORUM_STATE_FILE}, so it has run"
    for directory in journal.log_dirs:
        if not os.path.exists(f"{directory}/{CLEAN_SHUTDOWN_FILE}"):
            return f"a start has used up the mark of the clean stop in {directory} ({CLEAN_SHUTDOWN_FILE})"
    append = journal.append
    with open(append.path, "rb") as file:
        file.seek(append.position)
        found = file.read(len(append.bytes) + 1)
    is_whole = found == append.bytes
    is_part = journal.state != GRADUATED and append.bytes.startswith(found)
    if not is_whole and not is_part:
        return f"{append.path} does not end as it was left: something was appended to it since"
    newer = [name for name in os.listdir(journal.metadata_path) if _begins_behind(name, append)]
    return f"{journal.metadata_path}/{newer[0]} is newer than what was left" if newer else ""


def _begins_behind(name: str, append: Append) -> bool:
    return name.endswith(".log") and name > os.path.basename(append.path)


def take_back(journal: Journal, output: str, tick: Tick = lambda: None) -> None:
    """Restore every byte, and forget the journal. Raises `AlreadyUsed` before anything is touched."""
    if journal.state != UNDOING:
        reason = used_since(journal)
        if reason:
            raise AlreadyUsed(
                f"the hand-over cannot be taken back: {reason}. The way back from here is `holdfast serve` on the "
                "directory as Kafka leaves it"
            )
        journal = replace(journal, state=UNDOING)
        save(journal, output)
    tick()
    with closing(FS.open(journal.append.path, "write")) as file:
        file.truncate(journal.append.position)
        file.flush()
    for owner in journal.owners:
        tick()
        if os.path.lexists(owner.path):
            os.chown(owner.path, owner.user, owner.group, follow_symlinks=False)
    for made in journal.made:
        tick()
        if os.path.exists(made.path):
            os.unlink(made.path)
    for move in reversed(journal.moves):
        tick()
        _move(move.new, move.old)
    _flush_directories(journal)
    tick()
    os.unlink(journal_path(output))
    FS.flush_directory(output)

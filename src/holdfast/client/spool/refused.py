"""Messages that no broker will ever take: set aside with the reason, so that nothing behind them waits.

One file beside the spool, `refused/messages`: for each message its frame and a note. A message counts as set aside
when both are flushed; only then does the spool let go of it. A process that dies in between sets it aside once more.

What is to be sent once more is stored in the spool again, as a new message; the spool counts how many of the file's
messages were (`format.RETRIED`), in the same frame. The file keeps them: their old sequences are gaps that it explains.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Final, NamedTuple

from holdfast.client.spool import format as frames
from holdfast.client.spool.format import DamagedSpool, SpooledMessage
from holdfast.client.spool.home import REFUSED_DIRECTORY
from holdfast.seams import File, FileSystem

REFUSED_FILE: Final = "messages"


class Refused(NamedTuple):
    message: SpooledMessage
    code: str
    reason: str
    refused_ms: int


class RefusedMessages:
    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._fs = fs
        self._directory = f"{directory}/{REFUSED_DIRECTORY}"
        self._path = f"{self._directory}/{REFUSED_FILE}"
        self._file: File | None = None
        self._size = 0
        self._lock = Lock()

    def add(self, refused: Sequence[Refused]) -> None:
        """Keep messages and reasons; durable on return."""
        if not refused:
            return
        pieces: list[bytes] = []
        for message, code, reason, refused_ms in refused:
            note = {"code": code, "reason": reason, "refused_ms": refused_ms}
            pieces += (frames.encode_message(message), frames.encode_note(json.dumps(note)))
        data = b"".join(pieces)
        with self._lock:
            file = self._open()
            file.pwritev([data], self._size)
            file.flush()
            self._size += len(data)

    def _open(self) -> File:
        if self._file is None:
            is_new = not self._fs.exists(self._path)
            self._fs.make_directory(self._directory)
            file = self._fs.open(self._path, "create")
            for _, end in _pairs(file):
                self._size = end
            file.truncate(self._size)
            if is_new:
                self._fs.flush_directory(self._directory)
                self._fs.flush_directory(self._directory.rpartition("/")[0])
            self._file = file
        return self._file

    def __iter__(self) -> Iterator[Refused]:
        """Every message set aside, oldest first; a torn end was never counted as set aside."""
        if not self._fs.exists(self._path):
            return
        file = self._fs.open(self._path, "read")
        try:
            for refused, _ in _pairs(file):
                yield refused
        finally:
            file.close()

    def ids(self) -> set[tuple[str, int, int]]:
        """Topic, partition and sequence of each."""
        return {(message.topic, message.partition, message.sequence) for message, _, _, _ in self}

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _pairs(file: File) -> Iterator[tuple[Refused, int]]:
    data = file.pread(file.size(), 0)
    at = 0
    while True:
        message = frames.read_frame(data, at, 0)
        note = frames.read_frame(data, message.end, 0) if message is not None else None
        if message is None or note is None:
            return
        try:
            said = json.loads(frames.decode_note(note))
            refused = Refused(
                frames.decode_message(message), said["code"], said["reason"], said["refused_ms"]
            )
        except (ValueError, KeyError) as problem:
            raise DamagedSpool(f"{file.path}: the note at byte {message.end} cannot be read") from problem
        yield refused, note.end
        at = note.end

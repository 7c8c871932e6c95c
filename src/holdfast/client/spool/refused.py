"""Messages that no broker will ever take: set aside with the reason, so that nothing behind them waits.

One file beside the spool, `refused/messages`: for each message its frame, as it stood in the spool, and a note. A
message counts as set aside when both are flushed; only then does the spool let go of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final, NamedTuple

from holdfast.client.spool import format as frames
from holdfast.client.spool.format import Entry
from holdfast.client.spool.home import REFUSED_DIRECTORY
from holdfast.seams import File, FileSystem

REFUSED_FILE: Final = "messages"


class Refused(NamedTuple):
    entry: Entry
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

    def add(self, refused: Refused) -> None:
        """Keep a message and its reason; durable on return."""
        file = self._open()
        note = {"code": refused.code, "reason": refused.reason, "refused_ms": refused.refused_ms}
        data = frames.encode_message(refused.entry.message, refused.entry.sequence) + frames.encode_note(
            json.dumps(note)
        )
        file.pwritev([data], self._size)
        file.flush()
        self._size += len(data)

    def _open(self) -> File:
        if self._file is None:
            is_new = not self._fs.exists(self._path)
            self._fs.make_directory(self._directory)
            self._file = self._fs.open(self._path, "create")
            for _, end in self._pairs(self._file):
                self._size = end
            self._file.truncate(self._size)
            if is_new:
                self._fs.flush_directory(self._directory)
                self._fs.flush_directory(self._directory.rpartition("/")[0])
        return self._file

    def __iter__(self) -> Iterator[Refused]:
        """Every message set aside, oldest first; a torn end was never counted as set aside."""
        if not self._fs.exists(self._path):
            return
        file = self._fs.open(self._path, "read")
        try:
            for refused, _ in self._pairs(file):
                yield refused
        finally:
            file.close()

    @staticmethod
    def _pairs(file: File) -> Iterator[tuple[Refused, int]]:
        data = file.pread(file.size(), 0)
        at = 0
        while True:
            message = frames.read_frame(data, at, 0)
            note = frames.read_frame(data, message.end, 0) if message is not None else None
            if message is None or note is None:
                return
            said = json.loads(frames.decode_note(note))
            entry = frames.decode_message(message)
            yield Refused(entry, said["code"], said["reason"], said["refused_ms"]), note.end
            at = note.end

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

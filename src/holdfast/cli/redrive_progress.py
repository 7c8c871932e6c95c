"""Which dead letters of a partition were redriven: a position, and what lies behind it.

A filter picks dead letters here and there, and the next redrive may pick others. So the position stays before the
first that was not redriven, and those behind it that were are kept as a bitmap in the metadata of the committed
position, compressed, which brokers bound (`offset.metadata.max.bytes`, 4096). What was redriven once is not redriven
again by any other filter, and what was not is never passed over.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import Final

MARK: Final = "hf-redriven:"
METADATA_BYTES_MAX: Final = 4000
BITMAP_BYTES_MAX: Final = 1 << 20
"""Of a bitmap that is unpacked: eight million dead letters behind the first that is left."""


class Progress:
    def __init__(self, position: int, done: set[int] | None = None) -> None:
        self.position = position
        """Everything before it is redriven, or is not there."""
        self._done = {offset for offset in done or () if offset >= position}
        """Those behind the position that are redriven, or are not there."""
        self._pass(position)

    def __contains__(self, offset: int) -> bool:
        return offset < self.position or offset in self._done

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Progress) and (self.position, self._done) == (other.position, other._done)

    def __hash__(self) -> int:
        return hash(self.position)

    def __repr__(self) -> str:
        return f"<redriven before {self.position} and {len(self._done)} more>"

    def add(self, offset: int) -> None:
        """A dead letter was redriven."""
        self.skip(offset, offset + 1)

    def skip(self, first: int, behind: int) -> None:
        """Nothing is left to do from `first` on: it was redriven, or there are only markers and gaps."""
        if first > self.position:
            self._done.update(range(first, behind))
        elif behind > self.position:
            self._pass(behind)

    def _pass(self, position: int) -> None:
        if self._done:
            self._done.difference_update(range(self.position, position))
            while position in self._done:
                self._done.discard(position)
                position += 1
        self.position = position

    def metadata(self) -> str:
        """What is kept beside the position; raises ValueError when it does not fit."""
        if not self._done:
            return MARK
        bitmap = bytearray((max(self._done) - self.position) // 8 + 1)
        for offset in self._done:
            byte, bit = divmod(offset - self.position, 8)
            bitmap[byte] |= 1 << bit
        packed = zlib.compress(bitmap, 9)
        text = MARK + base64.b64encode(packed).decode("ascii")
        if len(text) > METADATA_BYTES_MAX:
            raise ValueError(
                f"{len(self._done)} redriven dead letters behind {self.position} are too scattered"
            )
        return text

    @classmethod
    def read(cls, position: int, metadata: str | None) -> Progress:
        """Progress as it was committed; metadata that is not ours says nothing."""
        packed = (metadata or "").removeprefix(MARK)
        if not packed or packed == metadata:
            return cls(position)
        try:
            unpacker = zlib.decompressobj()
            bitmap = unpacker.decompress(base64.b64decode(packed, validate=True), BITMAP_BYTES_MAX)
        except (binascii.Error, zlib.error, ValueError):
            return cls(position)
        done = {
            position + 8 * at + bit
            for at, byte in enumerate(bitmap)
            if byte
            for bit in range(8)
            if byte >> bit & 1
        }
        return cls(position, done)

"""What the records carry: text like an event, half of it random, so that lz4 has something to find."""

from __future__ import annotations

import random
from typing import Final

POOL_SIZE: Final = 512
"""Enough different values that a batch is no repetition of one record."""


def payloads(size: int, count: int = POOL_SIZE) -> list[bytes]:
    """`count` values of exactly `size` bytes, the same in every run."""
    chance = random.Random(size)
    return [_payload(chance, size) for _ in range(count)]


def _payload(chance: random.Random, size: int) -> bytes:
    text = ""
    while len(text) < size:
        text += (
            f'{{"id":"{chance.getrandbits(64):016x}","user":{chance.randrange(10**6)},'
            f'"action":"purchase","amount":{chance.random() * 100:.2f},"currency":"EUR"}}'
        )
    return text[:size].encode()

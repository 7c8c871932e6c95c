"""The client's side of SASL: PLAIN (RFC 4616) and SCRAM (RFC 5802, RFC 7677), as bytes to send and bytes to judge.

A SCRAM server proves that it knows the password too. A proof that does not hold is an error like a refused
password: whoever answered is not the broker.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Generator
from typing import Final

from holdfast.admin.errors import NotAuthorised
from holdfast.admin.settings import SaslSettings

_ITERATIONS_MIN: Final = 4096
"""RFC 7677's least: fewer would let a false server fish for weak proofs."""
_ITERATIONS_MAX: Final = 1 << 24
"""More would let one keep us busy for minutes."""
_HASHES: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}

Dialogue = Generator[bytes, bytes, None]
"""Yields what to send, is sent what came back, ends when the server is content and trusted."""


def dialogue(sasl: SaslSettings) -> Dialogue:
    if sasl.mechanism == "PLAIN":
        return _plain(sasl)
    return _scram(sasl, _HASHES[sasl.mechanism], secrets.token_urlsafe(24))


def _plain(sasl: SaslSettings) -> Dialogue:
    yield b"\0" + sasl.username.encode() + b"\0" + sasl.password.encode()


def _scram(sasl: SaslSettings, hash_name: str, nonce: str) -> Dialogue:
    def keyed(key: bytes, message: bytes) -> bytes:
        return hmac.digest(key, message, hash_name)

    name = sasl.username.replace("=", "=3D").replace(",", "=2C")
    first_bare = f"n={name},r={nonce}".encode()
    challenge = yield b"n,," + first_bare
    fields = _fields(challenge)
    full_nonce, iterations = fields.get("r", ""), fields.get("i", "")
    if not full_nonce.startswith(nonce) or full_nonce == nonce:
        raise NotAuthorised("the broker's SCRAM answer is not for our question")
    if not iterations.isdigit() or not _ITERATIONS_MIN <= int(iterations) <= _ITERATIONS_MAX:
        raise NotAuthorised(f"the broker asks for {iterations or 'no'} SCRAM iterations")
    salted = hashlib.pbkdf2_hmac(
        hash_name, sasl.password.encode(), _base64(fields.get("s", "")), int(iterations)
    )
    client_key = keyed(salted, b"Client Key")
    final_bare = b"c=biws,r=" + full_nonce.encode()
    signed = b",".join((first_bare, challenge, final_bare))
    signature = keyed(hashlib.new(hash_name, client_key).digest(), signed)
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    answer = _fields((yield final_bare + b",p=" + base64.b64encode(proof)))
    if "e" in answer:
        raise NotAuthorised(f"the broker refuses the credentials: {answer['e']}")
    expected = keyed(keyed(salted, b"Server Key"), signed)
    if not hmac.compare_digest(_base64(answer.get("v", "")), expected):
        raise NotAuthorised("the broker does not prove that it knows the password: it may be another one")


def _fields(message: bytes) -> dict[str, str]:
    found = {}
    for part in message.decode("utf-8", "replace").split(","):
        name, equals, value = part.partition("=")
        if equals:
            found[name] = value
    return found


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise NotAuthorised("the broker's SCRAM answer is not base64") from None

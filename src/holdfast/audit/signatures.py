"""Certificates signed with ed25519, and signatures held against a public key: no network, nothing but two small files.

Keys are PEM as OpenSSL writes it (`openssl genpkey -algorithm ed25519`, `openssl pkey -pubout`). What is signed is a
certificate's SHA-256 behind a word of our own, so that no signature of another kind of document is one of a
certificate. A public key that a certificate names itself proves nothing: it says which key to ask for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

ALGORITHM: Final = "ed25519"
DOMAIN: Final = b"holdfast-audit-certificate:"


def load_private_key(path: str) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = _load(path, "--sign-key", lambda data: load_pem_private_key(data, None))
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"--sign-key {path} is no ed25519 key: openssl genpkey -algorithm ed25519 makes one")
    return key


def load_public_key(path: str) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    key = _load(path, "--public-key", load_pem_public_key)
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"--public-key {path} is no ed25519 key")
    return key


def _load(path: str, flag: str, load: Any) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        with open(path, "rb") as file:
            return load(file.read())
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{flag} {path} is no such key in PEM, without a password: {error}") from error


def signature_of(sha256: str, key: Ed25519PrivateKey) -> dict[str, str]:
    return {
        "algorithm": ALGORITHM,
        "public_key": key.public_key().public_bytes_raw().hex(),
        "signature": key.sign(DOMAIN + sha256.encode()).hex(),
    }


def wrong_signature(sha256: str, signature: Any, key: Ed25519PublicKey | None) -> str:
    """Why this is not the signature of the key, or of the key it names itself; nothing: it is."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if signature is None:
        return "" if key is None else "is not signed"
    try:
        if signature["algorithm"] != ALGORITHM:
            return f"is signed by {signature['algorithm']!r}, which this holdfast does not know"
        named = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature["public_key"]))
        if key not in (None, named):
            return f"is signed by another key, {signature['public_key']}"
        named.verify(bytes.fromhex(signature["signature"]), DOMAIN + sha256.encode())
    except (KeyError, TypeError, ValueError) as error:
        return f"has a signature that cannot be read: {error}"
    except InvalidSignature:
        return "has a signature that is not of its hash"
    return ""

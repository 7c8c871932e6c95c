"""A certificate for a broker on this machine, signed by itself and made when a test needs it."""

from __future__ import annotations

import atexit
import datetime
import functools
import ipaddress
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple


class Certificate(NamedTuple):
    """Two files in PEM; the certificate is its own authority."""

    certificate: Path
    key: Path


@functools.cache
def local_certificate() -> Certificate:
    """For `localhost` and 127.0.0.1; one for the whole run of the tests, in a directory of its own."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    names: list[x509.GeneralName] = [
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    ]
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    directory = Path(tempfile.mkdtemp(prefix="holdfast-certificate-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    made = Certificate(directory / "broker-cert.pem", directory / "broker-key.pem")
    made.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    made.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return made

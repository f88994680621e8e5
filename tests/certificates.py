"""Certificates for tests, made here: an authority, and what it signs."""

import datetime as dt
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes

    def write(self, directory: Path, name: str) -> tuple[Path, Path]:
        """Write both as `name.pem` and `name.key`, each put in its place whole."""
        paths = directory / f"{name}.pem", directory / f"{name}.key"
        for path, content in zip(paths, (self.certificate, self.key), strict=True):
            unfinished = path.with_suffix(".new")
            unfinished.write_bytes(content)
            unfinished.replace(path)
        return paths


class Authority:
    """Signs certificates."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        own = _builder(self._name, self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self._certificate = own.sign(self._key, hashes.SHA256())

    @property
    def certificate(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def sign(self, name: str) -> Pair:
        """A certificate of 127.0.0.1 and localhost under that common name."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
        builder = _builder(subject, self._name, key).add_extension(x509.SubjectAlternativeName(names), critical=False)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        signed = builder.sign(self._key, hashes.SHA256())
        return Pair(signed.public_bytes(serialization.Encoding.PEM), private)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(minutes=5))
        .not_valid_after(now + dt.timedelta(hours=1))
    )

"""Certificates of a CA that lives as long as a test: real files for real TLS."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_LIFE = datetime.timedelta(days=1)


class Ca:
    """`ca.path` is its PEM file; `issue` writes a certificate and its key beside it."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._name = folder, _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._cert = _builder(self._name, self._name, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True).sign(self._key, hashes.SHA256())
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(self._cert.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, hosts: Sequence[str] = ("localhost", "127.0.0.1")) -> tuple[Path, Path]:
        """Files of certificate and key."""
        key = ec.generate_private_key(ec.SECP256R1())
        cert = _builder(_name(name), self._name, key.public_key()).add_extension(
            x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False).sign(
                self._key, hashes.SHA256())
        cert_path, key_path = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        cert_path.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        key_path.write_bytes(key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
        return cert_path, key_path


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return x509.CertificateBuilder(
        issuer_name=issuer, subject_name=subject, public_key=key, serial_number=x509.random_serial_number(),
        not_valid_before=now - datetime.timedelta(minutes=5), not_valid_after=now + _LIFE)

"""Certificates for the server and keys for the nodes, by which both know each other before anything is said.

A folder holds the federation's own authority (``ca.crt``, which every node gets, and ``ca.key``, which never leaves it)
and the server's certificate, signed by it. A node has a key of its own; the server gets the public half. This module
imports cryptography, which the extra ``fedem[flower]`` installs: import it late.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedem.core.errors import UserError
from fedem.core.files import write_atomically

Key = ec.EllipticCurvePrivateKey
LOOPBACK = ("127.0.0.1", "localhost")
_AUTHORITY_DAYS = 3650
_LEEWAY = timedelta(hours=1)  # clocks differ a little among machines


class Certificates(NamedTuple):
    """Where a server's files are."""

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def below(cls, folder: Path) -> Certificates:
        return cls(folder / "ca.crt", folder / "server.crt", folder / "server.key")

    def check(self) -> Certificates:
        """Refuse what has not been made."""
        for path in self:
            if not path.exists():
                raise UserError(f"There is no {path}; `fedem deploy certificates {path.parent}` makes it.")
        return self


def make_certificates(folder: Path, hosts: Sequence[str] = LOOPBACK, days: int = 397) -> Certificates:
    """Make, or renew, the certificate of the server that nodes reach as ``hosts``; the authority is made when missing.

    The ``folder`` gets ``ca.crt``, ``ca.key``, ``server.crt`` and ``server.key``. Clients of the web accept at most 398
    days.
    """
    if not hosts or not all(host.strip() for host in hosts):
        raise UserError(f"The server's hosts are {list(hosts)}; allowed: one or more names or addresses.")
    alternatives = [_alternative(host) for host in hosts]
    if not 1 <= days <= _AUTHORITY_DAYS:
        raise UserError(f"The server's certificate would be valid for {days} days; allowed: 1 to {_AUTHORITY_DAYS}.")
    folder.mkdir(parents=True, exist_ok=True)
    files = Certificates.below(folder)
    signer, authority = _authority(files.authority, folder / "ca.key")
    key = _make_key(files.key, PrivateFormat.PKCS8)
    extensions = (x509.SubjectAlternativeName(alternatives), x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]))
    _write_certificate(files.certificate, hosts[0], key, signer, authority.subject, days, *extensions)
    return files


def make_node_key(path: Path) -> Path:
    """Make a node's key ``path`` and its public half ``path.pub``, which is returned; nothing is overwritten."""
    public = path.with_name(path.name + ".pub")
    for taken in (path, public):
        if taken.exists():
            raise UserError(f"{taken} is there already; a node's key is never overwritten. Choose another name.")
    path.parent.mkdir(parents=True, exist_ok=True)
    key = _make_key(path, PrivateFormat.OpenSSH).public_key()
    write_atomically(public, key.public_bytes(Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) + b"\n")
    return public


def _authority(path: Path, key_path: Path) -> tuple[Key, x509.Certificate]:
    """Return the authority's key and certificate from their files, which are made when both are missing."""
    if not path.exists() and not key_path.exists():
        key, name = _make_key(key_path, PrivateFormat.PKCS8), "fedem authority"
        _write_certificate(path, name, key, key, _subject(name), _AUTHORITY_DAYS)
    for wanted in (path, key_path):
        if not wanted.exists():
            raise UserError(f"{wanted} is missing beside the authority's other half; put it back or use a new folder.")
    try:
        signer = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        certificate.verify_directly_issued_by(certificate)  # which reads all of it, and finds any change
        public = certificate.public_key()
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature):
        raise UserError(f"{path} and {key_path} can't be read as a certificate and its key.") from None
    if not isinstance(signer, Key) or signer.public_key() != public:
        raise UserError(f"{key_path} is not the key of {path}.")
    return signer, certificate


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _write_certificate(
    path: Path, name: str, key: Key, signer: Key, issuer: x509.Name, days: int, *extensions: x509.ExtensionType
) -> None:
    """Sign and write the certificate of ``key``; the authority's is the one that its own key signs."""
    now, signs = datetime.now(UTC), key is signer
    # A certificate that signs others signs nothing else, and the other way round.
    no = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    usage = x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, encipher_only=False, decipher_only=False, **no
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _LEEWAY)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    write_atomically(path, builder.sign(signer, SHA384()).public_bytes(Encoding.PEM))


def _alternative(host: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    try:
        return x509.DNSName(host)
    except ValueError:
        raise UserError(f"The server's host is {host!r}; allowed: an address or a name of plain letters.") from None


def _make_key(path: Path, form: PrivateFormat) -> Key:
    key = ec.generate_private_key(ec.SECP384R1())
    write_atomically(path, key.private_bytes(Encoding.PEM, form, serialization.NoEncryption()), private=True)
    return key

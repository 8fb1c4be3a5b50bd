"""Certificates for the server and keys for the nodes: who talks to whom is known before anything is said.

A folder holds the federation's own authority (``ca.crt``, which every node gets, and ``ca.key``, which never leaves it)
and the server's certificate, signed by it. A node has a key of its own; the server is told the public half.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedem.data.tables.readers import needed
from fedem.errors import UserError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

LOOPBACK = ("127.0.0.1", "localhost")
AUTHORITY_DAYS, SERVER_DAYS = 3650, 397
"""What clients of the web accept of a server at most is 398 days; renewing is one command."""

# Clocks differ a little among machines.
_LEEWAY = timedelta(hours=1)


class Certificates(NamedTuple):
    """Where a server's files are."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path, hosts: Sequence[str] = LOOPBACK, days: int = SERVER_DAYS) -> Certificates:
    """Make, or renew, the certificate of the server that is reached as ``hosts``; the authority is made when missing.

    Args:
        folder: where ``ca.crt``, ``ca.key``, ``server.crt`` and ``server.key`` lie.
        hosts: names and addresses that nodes dial.
        days: how long the server's certificate is valid.

    """
    needed("A certificate", "cryptography", extra="flower")
    if not hosts or not all(host.strip() for host in hosts):
        raise UserError(f"The server's hosts are {list(hosts)}; allowed: one or more names or addresses.")
    alternatives = [_alternative(host) for host in hosts]
    if not 1 <= days <= AUTHORITY_DAYS:
        raise UserError(f"The server's certificate would be valid for {days} days; allowed: 1 to {AUTHORITY_DAYS}.")
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    folder.mkdir(parents=True, exist_ok=True)
    files = Certificates(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    signer, authority = _authority(files.authority, folder / "ca.key")
    key = _new_key()
    builder = _certificate(hosts[0], authority.subject, key, signer, days)
    builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    _write(files.key, _private_bytes(key), private=True)
    _write(files.certificate, _signed(builder, signer), private=False)
    return files


def make_node_key(path: Path) -> Path:
    """Make a node's key ``path`` and its public half ``path.pub``, which is returned; nothing is overwritten."""
    needed("A key", "cryptography", extra="flower")
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    public = path.with_name(path.name + ".pub")
    for taken in (path, public):
        if taken.exists():
            raise UserError(f"{taken} is there already; a node's key is never overwritten. Choose another name.")
    path.parent.mkdir(parents=True, exist_ok=True)
    key = _new_key()
    _write(path, _private_bytes(key, openssh=True), private=True)
    _write(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n", private=False)
    return public


def _authority(path: Path, key_path: Path) -> tuple[EllipticCurvePrivateKey, x509.Certificate]:
    """Return the authority's key and certificate from their files, which are made when both are missing."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    if not path.exists() and not key_path.exists():
        key = _new_key()
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fedem authority")])
        made = _signed(_certificate("fedem authority", subject, key, key, AUTHORITY_DAYS, authority=True), key)
        _write(key_path, _private_bytes(key), private=True)
        _write(path, made, private=False)
    for wanted in (path, key_path):
        if not wanted.exists():
            raise UserError(
                f"{wanted} is missing beside the other half of the authority; put it back, or use another folder."
            )
    try:
        signer = load_pem_private_key(key_path.read_bytes(), password=None)
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (ValueError, TypeError):
        raise UserError(f"{path} and {key_path} can't be read as a certificate and its key.") from None
    if not isinstance(signer, EllipticCurvePrivateKey) or signer.public_key() != certificate.public_key():
        raise UserError(f"{key_path} is not the key of {path}.")
    return signer, certificate


def _certificate(
    name: str,
    issuer: x509.Name,
    key: EllipticCurvePrivateKey,
    signer: EllipticCurvePrivateKey,
    days: int,
    *,
    authority: bool = False,
) -> x509.CertificateBuilder:
    """Return what authority and server have in common, not yet signed."""
    from cryptography import x509

    now = datetime.now(UTC)
    # A certificate that signs others signs nothing else, and the other way round.
    usage = x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _LEEWAY)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )


def _alternative(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise UserError(f"The server's host is {host!r}; allowed: an address or a name of plain letters.") from None


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _signed(builder: x509.CertificateBuilder, signer: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA384
    from cryptography.hazmat.primitives.serialization import Encoding

    return builder.sign(signer, SHA384()).public_bytes(Encoding.PEM)


def _private_bytes(key: EllipticCurvePrivateKey, *, openssh: bool = False) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    form = PrivateFormat.OpenSSH if openssh else PrivateFormat.PKCS8
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


def _write(path: Path, content: bytes, *, private: bool) -> None:
    """Write a file beside its place and move it there; a private one is never readable by others, not for a moment."""
    beside = path.with_name(path.name + ".tmp")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)

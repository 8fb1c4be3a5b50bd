"""Certificates for the server and keys for the nodes, by which both know each other before anything is said.

A folder holds the federation's own authority (``ca.crt``, which every node gets, and ``ca.key``, which never leaves it)
and the server's certificate, signed by it. A node has a key of its own; the server gets the public half.

It imports cryptography, which the extra ``fedem[flower]`` installs: import it late.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedem.core.errors import UserError
from fedem.core.files import write_atomically

LOOPBACK = ("127.0.0.1", "localhost")
_AUTHORITY_DAYS = 3650
# Clocks differ a little among machines.
_LEEWAY = timedelta(hours=1)


class Certificates(NamedTuple):
    """Where a server's files are."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path, hosts: Sequence[str] = LOOPBACK, days: int = 397) -> Certificates:
    """Make, or renew, the certificate of the server that is reached as ``hosts``; the authority is made when missing.

    Args:
        folder: where ``ca.crt``, ``ca.key``, ``server.crt`` and ``server.key`` lie.
        hosts: names and addresses that nodes dial.
        days: how long the server's certificate is valid; clients of the web accept 398 days at most.
    """
    if not hosts or not all(host.strip() for host in hosts):
        raise UserError(f"The server's hosts are {list(hosts)}; allowed: one or more names or addresses.")
    alternatives = [_alternative(host) for host in hosts]
    if not 1 <= days <= _AUTHORITY_DAYS:
        raise UserError(f"The server's certificate would be valid for {days} days; allowed: 1 to {_AUTHORITY_DAYS}.")
    folder.mkdir(parents=True, exist_ok=True)
    files = Certificates(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    signer, authority = _authority(files.authority, folder / "ca.key")
    key = _new_key()
    builder = _certificate(hosts[0], authority.subject, key, signer, days)
    builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    _write_private(files.key, key, PrivateFormat.PKCS8)
    _sign_and_write(files.certificate, builder, signer)
    return files


def make_node_key(path: Path) -> Path:
    """Make a node's key ``path`` and its public half ``path.pub``, which is returned; nothing is overwritten."""
    public = path.with_name(path.name + ".pub")
    for taken in (path, public):
        if taken.exists():
            raise UserError(f"{taken} is there already; a node's key is never overwritten. Choose another name.")
    path.parent.mkdir(parents=True, exist_ok=True)
    key = _new_key()
    _write_private(path, key, PrivateFormat.OpenSSH)
    write_atomically(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return public


def _authority(path: Path, key_path: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Return the authority's key and certificate from their files, which are made when both are missing."""
    if not path.exists() and not key_path.exists():
        key, name = _new_key(), "fedem authority"
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        _write_private(key_path, key, PrivateFormat.PKCS8)
        _sign_and_write(path, _certificate(name, subject, key, key, _AUTHORITY_DAYS, authority=True), key)
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
    if not isinstance(signer, ec.EllipticCurvePrivateKey) or signer.public_key() != certificate.public_key():
        raise UserError(f"{key_path} is not the key of {path}.")
    return signer, certificate


def _certificate(
    name: str,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    days: int,
    *,
    authority: bool = False,
) -> x509.CertificateBuilder:
    """Return what authority and server have in common, not yet signed."""
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
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])]))
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
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise UserError(f"The server's host is {host!r}; allowed: an address or a name of plain letters.") from None


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> None:
    write_atomically(path, key.private_bytes(Encoding.PEM, form, NoEncryption()), private=True)


def _sign_and_write(path: Path, builder: x509.CertificateBuilder, signer: ec.EllipticCurvePrivateKey) -> None:
    write_atomically(path, builder.sign(signer, SHA384()).public_bytes(Encoding.PEM))

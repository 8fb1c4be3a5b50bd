"""A ready folder for ``flwr run``: Flower's project file, an app of a few lines, the plan, and how to use them."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedem.core.errors import UserError, needed
from fedem.core.files import write_atomically
from fedem.deploy.flower.gathering import check_server
from fedem.deploy.plan import Plan, RunConfig
from fedem.methods import METHODS

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey


_APP = '''\
"""The two apps that Flower starts: each reads the plan beside this file."""

from pathlib import Path

from fedem.deploy import client_app, server_app

PLAN = Path(__file__).parent / "plan"
client = client_app(PLAN)
server = server_app(PLAN)
'''

_PROJECT = """\
[project]
name = "{name}"
version = "1.0.0"
description = "{title} over a network."
license = "Apache-2.0"
# Nothing is listed on purpose: fedem and flwr are installed on every machine before, and Flower installs nothing.
dependencies = []

[tool.flwr.app]
publisher = "fedem"

[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"

# What `flwr run --run-config "key=value ..."` may change.
[tool.flwr.app.config]
{config}
"""

_README = """\
# {name}: {title} over a network

`plan/` is what all sides agree on (method, model, how columns become inputs); it holds no samples. `flwr run` sends
this folder, and nothing else, to the server and to the nodes. All machines need `pip install 'fedem[flower]'`, of one
version.

A node's own settings:

```
flower-supernode ... --node-config "data='/path/to/samples.csv' client='NAME' state='/path/to/state'"
```

- `data`: {columns}
- `client`: the client's name, always the same; may be left out where the file names one client alone.
- `state`: a folder for the one file that the client keeps between rounds. It never leaves the node; back it up.
- `device`: cpu, cuda, ...; as the plan says when left out.

Start and continue:

```
flwr run . SUPERLINK --stream
flwr run . SUPERLINK --stream --run-config "continue=true"
```

The server writes an ordinary run to `folder`/`experiment`. A new run needs a new `experiment`. In the end every client
keeps its own model, `state`/EXPERIMENT/CLIENT.safetensors, for `fedem export`.

In Flower's simulation engine, `data` in the run config names a file of all clients, and `state` a folder:

```
flwr run . SIMULATION --stream --run-config "data='/path/to/all.csv' state='/path/to/state'"
```
"""


def check_empty(folder: Path) -> None:
    """Refuse a folder with something in it, which might be somebody's."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already; allowed: a new or an empty folder.")


def write_app(folder: Path, plan: Plan) -> Path:
    """Write an app folder for ``plan``, whose method must be one for a server; refuses a folder that is not empty."""
    check_server(plan)
    check_empty(folder)
    name = re.sub(r"[^a-z0-9]+", "-", folder.absolute().name.lower()).strip("-") or "federation"
    if not name[0].isalpha():
        name = f"app-{name}"
    title = METHODS[plan.config.name("method")].title
    encoding = plan.format.encoding
    columns = "an npz file with arrays x and y, and client where it holds several clients."
    if encoding is not None:
        columns = (
            f"a CSV, Parquet or npz file, target column `{encoding.target.name}`; where it has a column "
            f"`{encoding.client}`, the rows of `client` are taken."
        )
    # The plan goes first: a folder that was cut short has no project file, and Flower does not take it.
    plan.save(folder / "plan")
    files = {
        "app.py": _APP,
        "README.md": _README.format(name=name, title=title, columns=columns),
        "pyproject.toml": _PROJECT.format(name=name, title=title, config=_run_config(name)),
    }
    for file, content in files.items():
        write_atomically(folder / file, content.encode())
    return folder


def _run_config(experiment: str) -> str:
    """Return all keys of the run config: Flower lets a run change none that is not written here."""
    values = {entry.name: entry.default for entry in fields(RunConfig)} | {"experiment": experiment}
    return "\n".join(
        f"{'continue' if key == 'continued' else key.replace('_', '-')} = {_literal(value)}"
        for key, value in values.items()
    )


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)


# Certificates for the server and keys for the nodes: who talks to whom is known before anything is said.
#
# A folder holds the federation's own authority (``ca.crt``, which every node gets, and ``ca.key``, which never leaves
# it) and the server's certificate, signed by it. A node has a key of its own; the server is told the public half.

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

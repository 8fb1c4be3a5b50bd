"""Certificates do what they are for: Python's own TLS trusts the right server under the right name, and no other."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from fedem.core.errors import UserError
from fedem.deploy.flower.certificates import Certificates, make_certificates, make_node_key


def _handshake(server: Certificates, authority: Path, host: str) -> None:
    """Shake hands in memory; raises what a client would."""
    contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    contexts[0].load_verify_locations(authority)
    # What later versions of Python ask for by default: every extension that the standard wants.
    contexts[0].verify_flags |= ssl.VERIFY_X509_STRICT
    contexts[1].load_cert_chain(server.certificate, server.key)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        contexts[0].wrap_bio(back, there, server_hostname=host),
        contexts[1].wrap_bio(there, back, server_side=True),
    ]
    waiting = sides
    for _ in range(10):
        undone = []
        for side in waiting:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                undone.append(side)
        waiting = undone
    assert not waiting


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_client_with_the_authority_trusts_the_server_by_each_of_its_names(tmp_path: Path) -> None:
    files = make_certificates(tmp_path / "made", ["federation.example", "10.0.0.7", "::1"])
    for host in ("federation.example", "10.0.0.7", "::1"):
        _handshake(files, files.authority, host)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        _handshake(files, files.authority, "other.example")
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        _handshake(files, files.authority, "10.0.0.8")


def test_a_client_with_another_authority_does_not(tmp_path: Path) -> None:
    ours, theirs = make_certificates(tmp_path / "ours"), make_certificates(tmp_path / "theirs")
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(ours, theirs.authority, "localhost")


def test_the_server_s_certificate_signs_nobody(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(files, files.certificate, "localhost")


def test_renewing_keeps_the_authority_that_nodes_have(tmp_path: Path) -> None:
    files = make_certificates(tmp_path, ["old.example"])
    before = files.authority.read_bytes(), files.certificate.read_bytes()
    assert make_certificates(tmp_path, ["new.example"], days=1) == files
    assert files.authority.read_bytes() == before[0]
    assert files.certificate.read_bytes() != before[1]
    _handshake(files, files.authority, "new.example")


def test_private_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    public = make_node_key(tmp_path / "keys" / "north")
    assert {_mode(path) for path in (files.key, tmp_path / "ca.key", tmp_path / "keys" / "north")} == {0o600}
    assert all(_mode(path) & 0o044 for path in (files.authority, files.certificate, public))
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_node_s_public_half_belongs_to_its_key(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    public = make_node_key(tmp_path / "north")
    private = serialization.load_ssh_private_key((tmp_path / "north").read_bytes(), password=None)
    other = serialization.load_ssh_public_key(make_node_key(tmp_path / "south").read_bytes())
    assert public.name == "north.pub"
    assert public.read_bytes().startswith(b"ecdsa-sha2-nistp384 ")
    assert serialization.load_ssh_public_key(public.read_bytes()) == private.public_key() != other


def test_nothing_is_overwritten_or_half_there(tmp_path: Path) -> None:
    make_node_key(tmp_path / "north")
    with pytest.raises(UserError, match="north is there already"):
        make_node_key(tmp_path / "north")
    make_certificates(tmp_path)
    other = make_certificates(tmp_path / "other")
    (tmp_path / "ca.crt").write_bytes(other.authority.read_bytes())
    with pytest.raises(UserError, match=r"ca\.key is not the key of"):
        make_certificates(tmp_path)
    (tmp_path / "ca.crt").write_text("nonsense")
    with pytest.raises(UserError, match="can't be read as a certificate"):
        make_certificates(tmp_path)
    (tmp_path / "ca.crt").unlink()
    with pytest.raises(UserError, match=r"ca\.crt is missing beside"):
        make_certificates(tmp_path)


@pytest.mark.parametrize(
    ("hosts", "days", "message"),
    [
        ([], 1, r"hosts are \[\]"),
        ([" "], 1, "one or more names or addresses"),
        (["bücher.example"], 1, "'bücher.example'; allowed: an address or a name of plain letters"),
        (["localhost"], 0, "valid for 0 days; allowed: 1 to 3650"),
    ],
)
def test_bad_certificates_are_refused_before_anything_is_written(
    tmp_path: Path, hosts: list[str], days: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make_certificates(tmp_path / "made", hosts, days)
    assert not (tmp_path / "made").exists()

"""Commands to a SuperLink need its secret: Flower's own interface asks for it before anything else."""

from __future__ import annotations

import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.cli.utils import load_cli_auth_plugin_from_connection
from flwr.supercore.error import BearerAuthenticationError
from flwr.superlink import config_loader
from flwr.superlink.dependencies.account import AccountAccessDependency
from starlette.datastructures import Headers

from fedem.core.errors import UserError
from fedem.deploy.flower import superlink
from fedem.deploy.flower.superlink import SecretAuthn, allow_commands, make_secret, token_of

ADDRESS = "127.0.0.1:8000"


def admitted(authn: SecretAuthn, **headers: str) -> bool:
    """Whether Flower's interface takes a command with these headers."""
    request: Any = SimpleNamespace(headers=Headers(headers))
    try:
        AccountAccessDependency(authn)(request)
    except BearerAuthenticationError:
        return False
    return True


def test_a_command_needs_the_token_of_this_secret(tmp_path: Path) -> None:
    secret, other = make_secret(tmp_path / "one"), make_secret(tmp_path / "two")
    authn = SecretAuthn(token_of(secret))
    assert admitted(authn, authorization=f"Bearer {token_of(secret)}")
    assert not admitted(authn)
    assert not admitted(authn, authorization="Bearer x")
    assert not admitted(authn, authorization=f"Bearer {token_of(other)}")
    assert not admitted(authn, authorization=f"Basic {token_of(secret)}")
    assert not admitted(authn, authorization=f"Bearer {secret.read_text()}")


def test_nobody_is_handed_a_token(tmp_path: Path) -> None:
    authn = SecretAuthn(token_of(make_secret(tmp_path / "secret")))
    assert authn.get_login_details() is None
    assert authn.get_auth_tokens("code") is None
    assert authn.refresh_tokens([("flwr-oidc-refresh-token", "none")]) == ([], None)


def test_flwr_sends_the_token_after_a_login(tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    secret = make_secret(tmp_path / "certificates" / "superlink.secret")
    monkeypatch.setenv("FLWR_HOME", str(home))
    assert run("deploy", "login", tmp_path / "certificates", "--address", ADDRESS)[0] == 0
    stored = home / "credentials.yaml"
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    # Where flwr looks for it was settled when it was imported.
    monkeypatch.setattr("flwr.supercore.credential_store.file_credential_store.CREDENTIAL_FILE_PATH", stored)
    plugin = load_cli_auth_plugin_from_connection(ADDRESS)
    plugin.load_tokens()
    assert token_of(secret) in dict(plugin.write_tokens_to_metadata([])).values()


def test_a_secret_is_private_and_stays(tmp_path: Path) -> None:
    secret = make_secret(tmp_path / "secret")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    content = secret.read_bytes()
    assert make_secret(secret).read_bytes() == content
    assert content.decode() not in token_of(secret)
    secret.write_text("short")
    with pytest.raises(UserError, match="has 5 bytes; allowed: at least 32"):
        token_of(secret)
    with pytest.raises(UserError, match="nothing can't be read"):
        allow_commands(tmp_path, ADDRESS, tmp_path / "nothing")


def test_the_superlink_is_started_with_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program: Any = SimpleNamespace(load_control_authn_plugin=config_loader.load_control_authn_plugin)
    started: list[Any] = []
    program.flower_superlink = lambda: started.append(program.load_control_authn_plugin())
    monkeypatch.setattr(superlink, "import_module", lambda name: program)
    monkeypatch.setattr("sys.argv", [])
    secret = make_secret(tmp_path / "secret")
    superlink.main(secret, ["--port", "1"])
    assert admitted(started[0], authorization=f"Bearer {token_of(secret)}")
    assert not admitted(started[0])
    with pytest.raises(UserError, match=r"allowed: flwr 1\.41"):
        superlink.main(secret, [])  # another check is in the place of Flower's own


def test_a_superlink_without_certificates_is_refused(run, tmp_path: Path) -> None:
    code, _, err = run("deploy", "superlink", tmp_path / "nowhere")
    assert code == 2
    assert "`fedem deploy certificates" in " ".join(err.split())
    assert not (tmp_path / "nowhere").exists()

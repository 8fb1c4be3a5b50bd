"""Flower's SuperLink, where only who has its secret starts runs and registers nodes.

By its control interface a SuperLink takes any Python, and has it run there and on every node. Flower 1.41 can ask for
a token there (``ControlAuthnPlugin``), and ``flwr`` can send one, but nothing in the open version checks it; this does.
The secret is a file; the same one lets Flower's SuperExec fetch work (``--superexec-auth-secret-file``).

``python -m fedem.deploy.flower.superlink SECRET ...`` is ``flower-superlink ...`` with the check.
"""

import hmac
import secrets
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from flwr.cli.constant import ACCESS_TOKEN_STORE_KEY, AUTHN_TYPE_STORE_KEY, REFRESH_TOKEN_STORE_KEY
from flwr.common.constant import ACCESS_TOKEN_KEY, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, AuthnType
from flwr.supercore.auth.typing import AccountAuthCredentials, AccountAuthLoginDetails, AccountInfo
from flwr.supercore.credential_store.file_credential_store import FileCredentialStore
from flwr.supercore.utils import get_flwr_home
from flwr.superlink import config_loader
from flwr.superlink.auth_plugin import ControlAuthnPlugin

from fedem.core.errors import UserError
from fedem.core.files import write_atomically
from fedem.deploy.flower.certificates import Certificates

_PURPOSE = b"fedem: control of a SuperLink"
Metadata = Sequence[tuple[str, str | bytes]]


class SecretAuthn(ControlAuthnPlugin):
    """Lets in whoever sends the token of a secret; there are no accounts, and nothing hands out tokens."""

    def __init__(self, token: str):
        self._token = token

    def get_login_details(self) -> AccountAuthLoginDetails | None:
        return None

    def validate_tokens_in_metadata(self, metadata: Metadata) -> tuple[bool, AccountInfo | None]:
        given = str(dict(metadata).get(ACCESS_TOKEN_KEY, ""))
        if not hmac.compare_digest(given.encode(errors="surrogatepass"), self._token.encode()):
            return False, None
        return True, AccountInfo(flwr_aid=NOOP_FLWR_AID, account_name=NOOP_ACCOUNT_NAME)

    def get_auth_tokens(self, device_code: str) -> AccountAuthCredentials | None:
        return None

    def refresh_tokens(self, metadata: Metadata) -> tuple[Metadata | None, AccountInfo | None]:
        return [], None


def make_secret(path: Path) -> Path:
    """Make a SuperLink's secret, readable by its owner alone, if there is none."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, secrets.token_hex(32).encode(), private=True)
    return path


def token_of(secret: Path) -> str:
    """Return the token that commands send: not the secret itself, from which it is derived."""
    try:
        content = secret.read_bytes()
    except OSError as error:
        raise UserError(f"The SuperLink's secret {secret} can't be read ({error.strerror}).") from None
    if len(content) < 32:
        raise UserError(f"The SuperLink's secret {secret} has {len(content)} bytes; allowed: at least 32.")
    return hmac.digest(content, _PURPOSE, "sha256").hex()


def flower_home() -> Path:
    """Return the folder in which this user's ``flwr`` keeps its settings."""
    return get_flwr_home()


def allow_commands(home: Path, address: str, secret: Path) -> None:
    """Have ``flwr`` with the home folder ``home`` send the token to the SuperLink at ``address``."""
    store = FileCredentialStore(home / "credentials.yaml")  # which it writes for its owner alone
    entries = {AUTHN_TYPE_STORE_KEY: AuthnType.OIDC, ACCESS_TOKEN_STORE_KEY: token_of(secret)}
    for key, value in (entries | {REFRESH_TOKEN_STORE_KEY: "none"}).items():
        store.set(key % address, value.encode())


def superlink_options(files: Certificates, secret: Path, host: str, port: int, database: Path) -> list[str]:
    """Return the options of a SuperLink that is closed as far as Flower's own options close it."""
    return [
        "--host", host, "--port", str(port),
        "--ssl-ca-certfile", str(files.authority), "--ssl-certfile", str(files.certificate),
        "--ssl-keyfile", str(files.key),
        "--enable-supernode-auth",
        "--isolation", "process", "--superexec-auth-secret-file", str(secret),
        "--database", str(database),
    ]  # fmt: skip


def main(secret: Path, options: Sequence[str]) -> None:
    """Run a SuperLink in this process, for good."""
    token = token_of(secret)
    program: Any = import_module("flwr.superlink.cli.flower_superlink")
    # Flower takes its own check from here; were it elsewhere, this would say so instead of leaving the SuperLink open.
    if program.load_control_authn_plugin is not config_loader.load_control_authn_plugin:
        raise UserError("This version of Flower takes its check of accounts from elsewhere; allowed: flwr 1.41.")
    program.load_control_authn_plugin = lambda: SecretAuthn(token)
    sys.argv = ["flower-superlink", *options]
    program.flower_superlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

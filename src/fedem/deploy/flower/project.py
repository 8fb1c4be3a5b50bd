"""A ready folder for ``flwr run``: Flower's project file, an app of a few lines, the plan, and how to use them."""

import re
from dataclasses import fields
from pathlib import Path

from fedem.core.errors import UserError
from fedem.core.files import toml_literal, write_atomically
from fedem.deploy.plan import Plan, RunConfig
from fedem.methods import METHODS, find_method, names_where

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


def check_server(plan: Plan) -> None:
    """Refuse a method whose server does more than to average what everybody sends."""
    mixer, config, method = plan.mixer, plan.config, plan.config.name("method")
    if mixer.is_server_mean and config.compression.downloads == "none":
        return
    if not find_method(method).mixer.is_server_mean:
        needs, allowed = type(mixer).__name__, names_where(lambda row: row.mixer.is_server_mean)
        raise UserError(f"Method {method} needs {needs} between clients, not an averaging server; allowed: {allowed}.")
    chosen = {"graph.name": config.name("graph"), "run.local_layers": config.run.local_layers}
    chosen["compression.downloads"] = config.compression.downloads
    refused = " and ".join(f"{key} is {value!r}" for key, value in chosen.items() if value != "none")
    raise UserError(f"{refused}, but behind this server all clients get the same, whole models; allowed there: none.")


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
    title, encoding = METHODS[plan.config.name("method")].title, plan.format.encoding
    columns = "an npz file with arrays x and y, and client where it holds several clients."
    if encoding is not None:
        target, own = encoding.target.name, f"where it has a column `{encoding.client}`, the rows of `client` are taken"
        columns = f"a CSV, Parquet or npz file, target column `{target}`; {own}."
    # The plan goes first: a folder that was cut short has no project file, and Flower does not take it.
    plan.save(folder / "plan")
    write_atomically(folder / "app.py", _APP.encode())
    write_atomically(folder / "README.md", _README.format(name=name, title=title, columns=columns).encode())
    # All keys of the run config: Flower lets a run change none that is not written here.
    values = {entry.name: entry.default for entry in fields(RunConfig)} | {"experiment": name}
    config = "\n".join(
        f"{'continue' if key == 'continued' else key.replace('_', '-')} = {toml_literal(value)}"
        for key, value in values.items()
    )
    write_atomically(folder / "pyproject.toml", _PROJECT.format(name=name, title=title, config=config).encode())
    return folder

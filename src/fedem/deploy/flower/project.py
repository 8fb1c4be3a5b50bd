"""A ready folder for ``flwr run``: Flower's project file, an app of a few lines, the plan, and how to use them."""

import re
from dataclasses import fields
from pathlib import Path

from jinja2 import Environment, PackageLoader

from fedem.core.errors import UserError
from fedem.core.files import toml_literal, write_atomically
from fedem.deploy.plan import Plan, RunConfig
from fedem.methods import METHODS, find_method, names_where


def check_server(plan: Plan) -> None:
    """Refuse a method whose server does more than to average what everybody sends."""
    mixer, config, method = plan.mixer, plan.config, plan.config.name("method")
    if mixer.is_server_mean and config.compression.downloads == "none":
        return
    if not find_method(method).has_averaging_server:
        needs, allowed = type(mixer).__name__, names_where(lambda row: row.has_averaging_server)
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
    # All keys of the run config: Flower lets a run change none that is not written here.
    values = {entry.name: entry.default for entry in fields(RunConfig)} | {"experiment": name}
    config = {
        "continue" if key == "continued" else key.replace("_", "-"): toml_literal(value)
        for key, value in values.items()
    }
    title = METHODS[plan.config.name("method")].title
    content = {"name": name, "title": title, "encoding": plan.format.encoding, "config": config}
    # The plan goes first: a folder that was cut short has no project file, and Flower does not take it.
    plan.save(folder / "plan")
    templates = Environment(loader=PackageLoader("fedem.deploy.flower"), trim_blocks=True, keep_trailing_newline=True)
    for file in ("app.py", "README.md", "pyproject.toml"):
        write_atomically(folder / file, templates.get_template(f"{file}.jinja").render(content).encode())
    return folder

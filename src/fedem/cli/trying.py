"""``fedem deploy trial``, ``certificates`` and ``key``: what a deployment over a network needs beside its app."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from fedem.cli.options import OwnClientColumn, OwnTargetColumn, Quiet, data_section, given
from fedem.config import Config, parse_assignment
from fedem.deploy.certificates import SERVER_DAYS, make_certificates, make_node_key
from fedem.deploy.starting import check_empty
from fedem.deploy.trial import SHORT, check_nodes, choose_clients, draw_clients, run_trial
from fedem.errors import UserError
from fedem.methods import METHODS
from fedem.report.console import console, progress, show_run, writing
from fedem.sections import Layer


def trial(
    nodes: Annotated[int, typer.Option(help="SuperNodes, one a client.")] = 3,
    rounds: Annotated[int | None, typer.Option(help="Communication rounds; each takes seconds.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Your own samples, with a column of clients; a synthetic mixture when not given."),
    ] = None,
    target_column: OwnTargetColumn = None,
    client_column: OwnClientColumn = None,
    method: Annotated[str | None, typer.Option(help="A method whose server averages, such as fedem.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides everything that is random.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that a round waits for its slowest node.")] = 120.0,
    keep: Annotated[
        Path | None, typer.Option(help="Leave everything in this folder; nothing is left when not given.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting: section.key=value. May be given several times.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Try a deployment on this machine: a SuperLink and SuperNodes of Flower, with TLS and keys, on 127.0.0.1.

    Examples:
      fedem deploy trial --nodes 3 --rounds 5

      fedem deploy trial --data mine.csv --client-column shop --keep tried

    """
    check_nodes(nodes)
    if timeout <= 0:
        raise UserError(f"--timeout is {timeout}; allowed: above 0.")
    asked: Layer = {"run": given(rounds=rounds, seed=seed), "method": given(name=method)}
    with _folder(keep) as folder:
        drawn: Layer = {"data": {"name": "file", "path": str(folder.absolute() / "data")}}
        own: Layer = {"data": data_section(None if data is None else str(data), target_column, client_column)}
        config = Config.build(SHORT, drawn if data is None else {}, own, asked, *map(parse_assignment, settings or []))
        if data is None:
            clients = draw_clients(folder / "data", nodes, config.run.seed)
        else:
            clients = choose_clients(config.make_data().federation.names, data.absolute(), nodes)
        with progress(METHODS[config.name("method")].title, config.run.rounds, quiet) as listener:
            run = run_trial(folder, config, clients, timeout=timeout, listener=listener)
        if not quiet:
            show_run(run)
        seconds = [line["seconds"] for line in run.metrics()]
        console.print(
            f"{nodes} nodes, {len(seconds)} rounds, {sum(seconds) / len(seconds):.1f} s a round.", highlight=False
        )
        if keep is not None:
            console.print(f"Everything is in {keep}; the run in {run.path}.", soft_wrap=True, highlight=False)


def certificates(
    folder: Annotated[Path, typer.Argument(help="Where they go; an authority that is there is used.")],
    host: Annotated[list[str], typer.Option(help="A name or address of the SuperLink. May be given several times.")],
    days: Annotated[int, typer.Option(help="How long the server's certificate is valid.")] = SERVER_DAYS,
) -> None:
    """Make, or renew, the certificate of a SuperLink, and the authority that signs it when there is none.

    Every node gets ca.crt; ca.key stays where it is.

    Examples:
      fedem deploy certificates certificates --host federation.example --host 10.0.0.7

    """
    with writing(folder):
        files = make_certificates(folder, host, days)
    for path in files:
        console.print(str(path), soft_wrap=True, highlight=False)


def key(path: Annotated[Path, typer.Argument(help="The key's file; its public half is PATH.pub.")]) -> None:
    """Make the key by which a SuperLink knows a node. The key stays on the node; the SuperLink is told PATH.pub.

    Examples:
      fedem deploy key keys/north

    """
    with writing(path):
        public = make_node_key(path)
    console.print(f"{path} (stays here), {public} (to be registered)", soft_wrap=True, highlight=False)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Give the folder to keep, which must be new or empty, or one that goes away."""
    if keep is None:
        with TemporaryDirectory(prefix="fedem-trial-", ignore_cleanup_errors=True) as place:
            yield Path(place)
        return
    check_empty(keep)
    with writing(keep):
        keep.mkdir(parents=True, exist_ok=True)
    yield keep

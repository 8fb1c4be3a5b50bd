"""``fedem peer``: training without a server, a process here and others elsewhere."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from fedem.cli.options import Data, OwnClientColumn, OwnTargetColumn, Rounds, data_section, given
from fedem.config import Config, parse_assignment
from fedem.deploy.meeting import Meeting, host_meeting
from fedem.deploy.members import check_start, graph_of
from fedem.deploy.peers import Task, join
from fedem.deploy.plan import Plan
from fedem.deploy.sealing import KEY, make_key
from fedem.deploy.starting import check_empty
from fedem.errors import UserError
from fedem.graphs import GRAPHS
from fedem.report.console import console, errors
from fedem.sections import Sections

group = typer.Typer(invoke_without_command=True)


@group.callback()
def peer(
    context: typer.Context,
    plan: Annotated[Path | None, typer.Option(help="The folder of the plan, from `fedem peer plan`.")] = None,
    data: Annotated[Path | None, typer.Option(help="The samples of this process's clients.")] = None,
    client: Annotated[
        list[str] | None, typer.Option(help="A client's name. May be given several times, for clients in one file.")
    ] = None,
    meet_at: Annotated[str | None, typer.Option("--meet", help="HOST:PORT, where `fedem peer meet` runs.")] = None,
    state: Annotated[Path | None, typer.Option(help="A folder for what the clients learn; it never leaves.")] = None,
    min_peers: Annotated[int, typer.Option(help="Processes without which nobody begins.")] = 2,
    max_peers: Annotated[
        int, typer.Option(help="Processes at most; when they are there, nobody waits for more.")
    ] = 1000,
    patience: Annotated[int, typer.Option(help="Seconds of silence after which a process counts as gone.")] = 15,
    round_timeout: Annotated[int, typer.Option(help="Seconds to wait for silent neighbours in a round.")] = 600,
    join_timeout: Annotated[int, typer.Option(help="Seconds to wait for the meeting place and for others.")] = 600,
) -> None:
    """Train with peers until the plan's rounds are done; the same command again goes on where this client was.

    Examples:
      fedem peer plan plan --data sample.csv --graph ring

      fedem peer meet --host 10.0.0.1 --port 29400

      fedem peer --plan plan --data mine.csv --client ann --meet 10.0.0.1:29400 --state state --min-peers 4

    """
    if context.invoked_subcommand is not None:
        return
    if plan is None or data is None or meet_at is None or state is None:
        missing = {"--plan": plan, "--data": data, "--meet": meet_at, "--state": state}
        names = ", ".join(name for name, value in missing.items() if value is None)
        raise UserError(f"A peer needs {names}; `fedem peer --help` tells more.")
    meeting = Meeting.at(
        meet_at,
        min_peers=min_peers,
        max_peers=max_peers,
        patience=patience,
        round_timeout=round_timeout,
        join_timeout=join_timeout,
    )
    try:
        trained = join(meeting, Task(plan, data, tuple(client or ()), state, tell))
    except KeyboardInterrupt:
        tell("Stopped; the same command goes on from here.")
        sys.exit(130)
    done = "Finished" if trained else "All rounds of the plan were done before"
    console.print(f"{done}; what was learnt is in {state}.", soft_wrap=True, highlight=False)


@group.command("plan")
def make_plan(
    folder: Annotated[Path, typer.Argument(help="The folder to make.", show_default=False)],
    data: Data = None,
    target_column: OwnTargetColumn = None,
    client_column: OwnClientColumn = None,
    method: Annotated[str, typer.Option(help="dfedem, dsgd, or another method that goes with a graph.")] = "dfedem",
    graph: Annotated[str | None, typer.Option(help=f"One of: {', '.join(GRAPHS)}.")] = None,
    rounds: Rounds = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting: section.key=value. May be given several times.")
    ] = None,
) -> None:
    """Make the plan that all peers agree on; the data are a sample that says what columns and classes there are."""
    asked: Sections = {
        "run": given(rounds=rounds),
        "method": {"name": method},
        "graph": given(name=graph),
        "data": data_section(data, target_column, client_column),
    }
    config = Config.build(asked, *map(parse_assignment, settings or []))
    check_empty(folder)
    check_start(config)
    plan = Plan.make(config, config.make_data())
    graph_of(plan)
    plan.save(folder)
    make_key(folder)
    console.print(f"Plan: {folder}; it holds a secret ({KEY}), for peers alone.", soft_wrap=True, highlight=False)


@group.command()
def meet(
    port: Annotated[int, typer.Option(help="Where to listen.", min=1, max=65535)] = 29400,
    host: Annotated[
        str, typer.Option(help="The address of this machine to listen on; by default none but this machine gets there.")
    ] = "127.0.0.1",
) -> None:
    """Host the place where peers find each other, for one run; no model and no sample passes through it."""
    store = host_meeting(port, host)
    tell(f"Peers meet here, at {host}, port {store.port}, until this is stopped.")
    threading.Event().wait()


def tell(note: str) -> None:
    """Print a note of a peer."""
    errors.print(note, highlight=False, markup=False, soft_wrap=True)

"""``fedem deploy``: training behind a Flower server; ``fedem peer``: training without a server."""

import os
import sys
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from typer import Argument, Context, Option, Typer

from fedem.cli.options import Assignments, Quiet, Rounds, asked, data_section, named_data, own_table, taking
from fedem.core.errors import UserError, counted, needed
from fedem.data.federation import PARTS
from fedem.deploy.flower.project import check_empty, write_app
from fedem.deploy.flower.trial import (
    FEWEST,
    MOST,
    QUIET_FLOWER,
    SECRET,
    SHORT,
    choose_clients,
    draw_clients,
    run_trial,
)  # fmt: skip
from fedem.deploy.history import History
from fedem.deploy.history import rollback as roll_back
from fedem.deploy.plan import Plan
from fedem.graphs import GRAPHS
from fedem.methods import METHODS
from fedem.report.console import aside, progress, say, show_run, waiting, writing
from fedem.runs.config import Config, Layer, Values, parse_assignment, read_toml
from fedem.runs.folder import RunFolder

deploy_group = Typer(help="Training over a network, behind a Flower server.", no_args_is_help=True)


@deploy_group.command()
@partial(taking, data_section)
def init(
    data: Values,
    folder: Annotated[Path, Argument(help="The folder to make.")],
    config: Annotated[Path | None, Option(help="A TOML file, such as a run's config.toml.")] = None,
    method: Annotated[str | None, Option(help=f"One of: {', '.join(METHODS)}.")] = None,
    rounds: Rounds = None,
    settings: Assignments = None,
    quiet: Quiet = False,
) -> None:
    """Make a folder that `flwr run` takes: the plan that all sides agree on, and an app of a few lines.

    The data are a sample that says what columns and classes there are; they are not copied.

    Examples:
      fedem deploy init hospitals --data sample.csv --target-column outcome --client-column hospital
    """
    layer = asked(data, method, rounds=rounds)
    options: list[Layer] = [layer, *map(parse_assignment, settings or [])]
    chosen = Plan.configure(read_toml(config) if config else {}, *options)
    with waiting("Making the plan", quiet):
        write_app(folder, Plan.make(chosen, chosen.make_data()))
    if not quiet:
        _note_patience(chosen)
    say(f"App folder: {folder}")


def _note_patience(config: Config) -> None:
    """Say that the plan leaves out when to stop, where that was asked for or is shipped."""
    if (patience := config.run.patience) > 0:
        trained = counted(config.run.rounds, "round is", "rounds are")
        aside(f"note: run.patience is {patience}, but 0 over a network: all {trained} trained.")


@deploy_group.command()
@partial(taking, own_table)
def trial(
    own: Values,
    nodes: Annotated[int, Option(help="SuperNodes, one for each client.")] = 3,
    rounds: Annotated[int | None, Option(help="Communication rounds; each takes seconds.")] = None,
    data: Annotated[
        Path | None, Option(help="Your own samples, with a column of clients; a synthetic mixture when not given.")
    ] = None,
    method: Annotated[str | None, Option(help="A method whose server averages, such as fedem.")] = None,
    seed: Annotated[int | None, Option(help="Decides everything that is random.")] = None,
    timeout: Annotated[float, Option(help="Seconds that a round waits for its slowest node.")] = 120.0,
    keep: Annotated[
        Path | None, Option(help="Leave everything in this folder; nothing is left when not given.")
    ] = None,
    settings: Assignments = None,
    quiet: Quiet = False,
) -> None:
    """Try a deployment on this machine: a SuperLink and SuperNodes of Flower, with TLS and keys, on 127.0.0.1.

    Examples:
      fedem deploy trial --nodes 3 --rounds 5

      fedem deploy trial --data mine.csv --client-column shop --keep tried
    """
    if not FEWEST <= nodes <= MOST:
        raise UserError(f"A trial of {nodes} nodes is asked for; allowed: {FEWEST} to {MOST}.")
    if timeout <= 0:
        raise UserError(f"--timeout is {timeout}; allowed: above 0.")
    if keep is not None:
        check_empty(keep)
        with writing(keep):
            keep.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        place = keep or Path(stack.enter_context(TemporaryDirectory(prefix="fedem-trial-", ignore_cleanup_errors=True)))
        drawn: Layer = {"data": {"name": "file", "path": str(place.absolute() / "data")}}
        section = named_data(own, None if data is None else str(data))
        layers = [SHORT, drawn if data is None else {}, asked(section, method, rounds=rounds, seed=seed)]
        config = Plan.configure({}, *layers, *map(parse_assignment, settings or []))
        if not quiet:
            _note_patience(config)
        if data is None:
            clients = draw_clients(place / "data", nodes, config.run.seed)
        else:
            clients = choose_clients(config.make_data().federation.names, data.absolute(), nodes)
        try:
            with progress(METHODS[config.name("method")].title, config.run.rounds, quiet) as listener:
                run = run_trial(place, config, clients, listener, timeout)
        except KeyboardInterrupt:
            again = "the same command tries again" if keep is None else f"a new trial needs another folder than {keep}"
            aside(f"Stopped; all programs of the trial have ended. It can't be continued: {again}.")
            sys.exit(130)
        if not quiet:
            show_run(run)
        seconds = [line["seconds"] for line in run.metrics()]
        say(f"{nodes} nodes, {counted(len(seconds), 'round')}, {sum(seconds) / len(seconds):.1f} s a round.")
        if keep is not None:
            say(f"Everything is in {keep}; the run in {run.path}.")


@deploy_group.command()
def certificates(
    folder: Annotated[Path, Argument(help="Where they go; an authority that is there is used.")],
    host: Annotated[list[str], Option(help="A name or address of the SuperLink. May be given several times.")],
    days: Annotated[int, Option(help="How long the server's certificate is valid.")] = 397,
) -> None:
    """Make, or renew, the certificate of a SuperLink, and the authority that signs it when there is none.

    Every node gets ca.crt; ca.key stays where it is.

    Examples:
      fedem deploy certificates certificates --host federation.example --host 10.0.0.7
    """
    needed("A certificate", "cryptography", extra="flower")
    from fedem.deploy.flower.certificates import make_certificates

    with writing(folder):
        files = make_certificates(folder, host, days)
    for path in files:
        say(str(path))


@deploy_group.command()
def superlink(
    folder: Annotated[Path, Argument(help="The folder of `fedem deploy certificates`.")],
    host: Annotated[str, Option(help="The address of this machine to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Where to listen.", min=1, max=65535)] = 8000,
    database: Annotated[Path, Option(help="What the SuperLink keeps; made when missing.")] = Path("superlink.db"),
) -> None:
    """Run Flower's SuperLink, closed: TLS, known nodes alone, and no commands but from who has FOLDER/superlink.secret.

    A SuperExec with the same secret runs the server's app. `fedem deploy login` lets `flwr` send commands.

    Examples:
      fedem deploy superlink certificates --database superlink.db
    """
    needed("A SuperLink", "flwr", extra="flower")
    from fedem.deploy.flower.certificates import Certificates
    from fedem.deploy.flower.database import make_private
    from fedem.deploy.flower.superlink import make_secret, superlink_options

    files = Certificates.below(folder).check()
    with writing(folder):
        secret = make_secret(folder / SECRET)
    with writing(database):
        make_private(database)
    options = superlink_options(files, secret, host, port, database)
    # In place of this process: it has loaded much that a SuperLink does not need.
    words = [sys.executable, "-m", "fedem.deploy.flower.superlink", str(secret), *options]
    os.execve(sys.executable, words, QUIET_FLOWER | os.environ)


@deploy_group.command()
def login(
    folder: Annotated[Path, Argument(help="The folder of `fedem deploy certificates`.")],
    address: Annotated[str, Option(help="HOST:PORT of the SuperLink, as in Flower's config.toml.")] = "127.0.0.1:8000",
) -> None:
    """Let this user's `flwr` send commands to the SuperLink of `fedem deploy superlink`.

    Examples:
      fedem deploy login certificates
    """
    needed("Flower's commands", "flwr", extra="flower")
    from fedem.deploy.flower.superlink import allow_commands, flower_home

    home = flower_home()
    with writing(home):
        allow_commands(home, address, folder / SECRET)
    say(f"{home}: flwr sends the token of {folder / SECRET} to {address}.")


@deploy_group.command("clean")
def clean_database(
    database: Annotated[Path, Argument(help="The SuperLink's database; the SuperLink is stopped.")],
) -> None:
    """Wipe what Flower has deleted out of its database: whole uploads and clients' names are still in the file.

    Registered keys and the list of runs stay. The file becomes its owner's alone (mode 600).

    Examples:
      fedem deploy clean superlink.db
    """
    from fedem.deploy.flower.database import clean

    with writing(database):
        before, after = clean(database)
    say(f"{database}: {before:,} bytes before, {after:,} now.")


@deploy_group.command()
def key(path: Annotated[Path, Argument(help="The key's file; its public half is PATH.pub.")]) -> None:
    """Make the key by which a SuperLink knows a node. The key stays on the node; the SuperLink gets PATH.pub.

    Examples:
      fedem deploy key keys/north
    """
    needed("A key", "cryptography", extra="flower")
    from fedem.deploy.flower.certificates import make_node_key

    with writing(path):
        public = make_node_key(path)
    say(f"{path} (stays here), {public} (to be registered)")


@deploy_group.command()
def rollback(
    run: Annotated[Path, Argument(help="The server's folder of the run, FOLDER/EXPERIMENT.")],
    to: Annotated[int | None, Option(help="The round to go back to: what came after it is undone.")] = None,
    show: Annotated[
        bool, Option("--list", help="Show the rounds that can be gone back to, and change nothing.")
    ] = False,
) -> None:
    """Return a run's server to one of the last rounds; `continue=true` goes on from there, and the clients follow.

    The figures of the rounds that are undone are moved to metrics.undone.jsonl.

    Examples:
      fedem deploy rollback runs/hospitals --list

      fedem deploy rollback runs/hospitals --to 12
    """
    folder = RunFolder(run).check()
    if show == (to is not None):
        raise UserError(f"rollback got {'both' if show else 'neither'} of --to and --list; allowed: one of them.")
    if to is None:
        shown = {line["round"]: line for line in folder.metrics()}
        for number in History(folder).rounds():
            scores = [f"{key} {value:.4g}" for key, value in shown.get(number, {}).items() if key.startswith(PARTS)]
            say(", ".join([f"round {number}", *scores]))
        return
    with writing(run):
        before = roll_back(folder, to)
    say(f"{run} is at round {to} again, and was at round {before}; `continue=true` goes on from there.")


peer_group = Typer(invoke_without_command=True)


@peer_group.callback()
def peer(
    context: Context,
    plan: Annotated[Path | None, Option(help="The folder of the plan, from `fedem peer plan`.")] = None,
    data: Annotated[Path | None, Option(help="The samples of this process's clients.")] = None,
    client: Annotated[
        list[str] | None, Option(help="A client's name. May be given several times, for clients in one file.")
    ] = None,
    meet_at: Annotated[str | None, Option("--meet", help="HOST:PORT, where `fedem peer meet` runs.")] = None,
    state: Annotated[Path | None, Option(help="A folder for what the clients learn; it never leaves.")] = None,
    min_peers: Annotated[int, Option(help="Processes without which nobody begins.")] = 2,
    max_peers: Annotated[int, Option(help="Processes at most; when they are there, nobody waits for more.")] = 1000,
    patience: Annotated[int, Option(help="Seconds of silence after which a process counts as gone.")] = 15,
    round_timeout: Annotated[int, Option(help="Seconds to wait for silent neighbours in a round.")] = 600,
    join_timeout: Annotated[int, Option(help="Seconds to wait for the meeting place and for others.")] = 600,
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
        raise UserError(f"A peer needs {names}; see `fedem peer --help`.")
    from fedem.deploy.peers.meeting import Meeting
    from fedem.deploy.peers.work import Task, join

    seconds = {"patience": patience, "round_timeout": round_timeout, "join_timeout": join_timeout}
    meeting = Meeting.at(meet_at, min_peers=min_peers, max_peers=max_peers, **seconds)
    try:
        trained = join(meeting, Task(plan, data, tuple(client or ()), state, aside))
    except KeyboardInterrupt:
        aside("Stopped; the same command goes on from here.")
        sys.exit(130)
    done = "Finished" if trained else "All rounds of the plan were done before"
    say(f"{done}; what was learnt is in {state}.")


@peer_group.command("plan")
@partial(taking, data_section)
def make_plan(
    data: Values,
    folder: Annotated[Path, Argument(help="The folder to make.")],
    method: Annotated[str, Option(help="dfedem, dsgd, or another method that goes with a graph.")] = "dfedem",
    graph: Annotated[str | None, Option(help=f"One of: {', '.join(GRAPHS)}.")] = None,
    rounds: Rounds = None,
    settings: Assignments = None,
) -> None:
    """Make the plan that all peers agree on; the data are a sample that says what columns and classes there are."""
    from fedem.deploy.peers.meeting import KEY, make_key
    from fedem.deploy.peers.work import check_start, graph_of

    layer = asked(data, method, graph, rounds=rounds)
    config = Config.build(layer, *map(parse_assignment, settings or []))
    check_empty(folder)
    check_start(config)
    plan = Plan.make(config, config.make_data())
    _note_patience(config)
    graph_of(plan)
    plan.save(folder)
    make_key(folder)
    say(f"Plan: {folder}; it holds a secret ({KEY}), for peers alone.")


@peer_group.command()
def meet(
    port: Annotated[int, Option(help="Where to listen.", min=1, max=65535)] = 29400,
    host: Annotated[
        str, Option(help="The address of this machine to listen on; by default none but this machine gets there.")
    ] = "127.0.0.1",
) -> None:
    """Host the place where peers find each other, for one run; no model and no sample passes through it."""
    from fedem.deploy.peers.meeting import host_meeting

    store = host_meeting(port, host)
    aside(f"Peers meet here, at {host}, port {store.port}, until this is stopped.")
    threading.Event().wait()

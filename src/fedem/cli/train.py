"""Commands that train: ``fedem train``, ``compare``, ``experiment``, ``tune`` and ``theory``."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

from typer import Argument, Option, Typer, echo

from fedem.cli import options
from fedem.cli.options import data_section, given, listed, read_seeds, taking
from fedem.core.deadline import stopping_after
from fedem.core.errors import UserError, counted, unknown
from fedem.core.files import write_atomically, write_json
from fedem.core.settings import names_of
from fedem.data.encoding import some
from fedem.engines.processes import Team, joined
from fedem.graphs import GRAPHS
from fedem.methods import METHODS, resolve_method
from fedem.report import studies as reports
from fedem.report.board import board_page
from fedem.report.console import aside, display, progress, put, say, show_run, waiting, writing
from fedem.report.pages import result_pages
from fedem.report.pictures import canvas
from fedem.report.pictures.declared import draw_experiment
from fedem.runs.config import Config, Layer, Values, parse_assignment, read_toml, to_toml, unbound
from fedem.runs.evaluate import Record
from fedem.runs.folder import RunFolder, new_folder
from fedem.runs.trainer import Trainer, carry_out
from fedem.studies import comparison, experiments, sweep, tuning
from fedem.studies.board import gather
from fedem.studies.experiments import Experiment
from fedem.studies.references import beside, check_references
from fedem.studies.sweep import Entry, SharedData
from fedem.studies.theory import OUTCOMES, SMALL, assumed, study

_TRIALS = 20
# Help that is too long for its option.
_ALL_METHODS = "Of all methods: data.num_clients=30, run..., batching..., model..., loss...;"
_ONE_METHOD = "of one: fedem:schedule.learning_rate=0.5. May be given several times."
_VALUES = "Values to try of a setting: section.key=value,value,... May be given several times."
_LONGER = "With a constant schedule, it may have more --rounds."
_GRIDS = (
    "of a table of your own the model, batches, weight decay and M, else the paper's grids: the learning rate and,"
    " where the method has one, the weight of its penalty."
)
_SAMPLED = "A grid is tried as a whole; the others draw numbers between the least and the largest value."

_RetryFailed = Annotated[
    bool, Option("--retry-failed", help="With --resume: train again, from the start, what failed before.")
]


class _Run(NamedTuple):
    folder: Path
    config: Config
    begun: bool  # whether it is taken up again


@partial(taking, data_section)
def train(
    data: Values,
    config: Annotated[
        Path | None, Argument(help="A TOML file, such as a run's config.toml; options win over it.")
    ] = None,
    method: Annotated[str | None, Option(help=f"One of: {', '.join(METHODS)}.")] = None,
    graph: Annotated[
        str | None, Option(help=f"Average with neighbours, without a server: {', '.join(GRAPHS)}.")
    ] = None,
    components: Annotated[
        str | None, Option(help="M, the number of shared components; auto finds it while training.")
    ] = None,
    rounds: options.Rounds = None,
    clients_per_round: options.ClientsPerRound = None,
    unseen: options.Unseen = None,
    metrics: options.Metrics = None,
    seed: Annotated[int | None, Option(help="Decides everything that is random.")] = None,
    device: options.TrainingDevice = None,
    out: Annotated[Path | None, Option(help="The run's folder; runs/DATA-METHOD-seedN when not given.")] = None,
    resume: Annotated[
        bool, Option("--resume", help=f"Go on with the run in --out where it was stopped. {_LONGER}")
    ] = False,
    settings: options.Assignments = None,
    baselines: Annotated[
        str | None,
        Option(help="Also train these methods, with the settings shipped for them, to compare: fedavg,local"),
    ] = None,
    references: options.References = False,
    stop_after: options.StopAfter = None,
    quiet: options.Quiet = False,
) -> None:
    """Train a federation and write its run to a folder.

    Examples:
      fedem train --data synthetic --method fedem --components 3 --rounds 200

      fedem train --data mine.csv --method fedem --set schedule.learning_rate=0.3

      fedem train --out runs/synthetic-fedem-seed0 --resume

      torchrun --nproc-per-node 4 -m fedem train --data synthetic
    """
    if references:
        check_references()
    with joined() as team, stopping_after(stop_after):
        runs = None
        if team.leads:  # it reads files and decides; the others are told
            run = {"rounds": rounds, "clients_per_round": clients_per_round, "unseen": unseen, "metrics": metrics}
            asked = options.asked(data, method, graph, components, **run, seed=seed, device=device)
            layers: list[Layer] = [asked, *map(parse_assignment, settings or [])]
            runs = _plan(config, layers, listed(baselines), out, resume)
        _carry_out(team.tell(runs), team, quiet or not team.leads, references)


def _plan(file: Path | None, asked: list[Layer], baselines: list[str], out: Path | None, resume: bool) -> list[_Run]:
    """Say what is to be trained, the method and then its baselines; the first of ``asked`` has the named options."""
    files: list[Layer] = [RunFolder(out).config().sections] if resume and out is not None else []
    files += [unbound(read_toml(file), *asked)] if file else []
    if "num_components" in asked[0].get("method", {}):
        named = [layer["method"]["name"] for layer in (*files, *asked) if "name" in layer.get("method", {})]
        method = resolve_method(named[-1] if named else "fedem")
        having = [name for name, row in METHODS.items() if "num_components" in names_of(row.algorithm, row.mixer)]
        if method not in having:
            mend = f"allowed with: {', '.join(having)}. `fedem methods {method}` shows its settings."
            raise UserError(f"--components is given, but method {method} has no components; {mend}")
    chosen = Config.build(*files, *asked, preset=not resume)
    if chosen.name("data") == "file" and not any("model" in layer for layer in (*files, *asked)):
        asked = [*asked, {"model": {"name": "auto"}}]  # of a table nobody may know whether it is linear
        chosen = Config.build(*files, *asked)
    common = comparison.without_own([*(comparison.without_shipped(layer, chosen) for layer in files), *asked])
    name = f"{chosen.name('data')}-{chosen.name('method')}-seed{chosen.run.seed}"
    folder = RunFolder(_folder("run", name, out, resume))
    runs = [_Run(folder.path, chosen, resume)]
    for name in comparison.resolve_methods(baselines) if baselines else []:
        # The same run with another method; solver and schedule are those shipped for it, not the main method's.
        place = RunFolder(folder.path / "baselines" / name)
        begun = resume and place.exists()
        own = place.config().replace("run", rounds=chosen.run.rounds) if begun else None
        runs.append(_Run(place.path, own or Config.build(*common, {"method": {"name": name}}), begun))
    folder.prepare(resume)
    for run in runs:
        if run.begun:
            RunFolder(run.folder).check_length(run.config)
    return runs


def _carry_out(runs: list[_Run], team: Team, quiet: bool, references: bool) -> None:
    """Make the data, prepare all runs, and only then train; references of the same rows come last."""
    with waiting("Making the data", quiet), team.leader_first():
        dataset = runs[0].config.make_data()
    if dataset.encoding is not None and not quiet:
        aside(f"note: {dataset.encoding.describe()}")
        for line in dataset.encoding.notes:
            aside(f"  - {line}")
    testless = [
        name for name, size in zip(dataset.federation.names, dataset.federation.test.sizes, strict=True) if not size
    ]
    if testless and runs[0].config.data.cut.get("test") and not quiet:
        few = f"{counted(len(testless), 'client has', 'clients have')} too few samples for a test part"
        aside(f"note: {few} and no part in its scores: {some(testless)}.")
    with waiting("Preparing", quiet):
        trainers = [Trainer.prepare(run.config, dataset, fresh=not run.begun, team=team) for run in runs]
    for run, trainer in zip(runs, trainers, strict=True):
        if not quiet and (chosen := reports.chosen_by_data(run.config, trainer.config)):
            aside(f"note: {METHODS[run.config.method.name].title}: {chosen}")
        if not quiet:
            aside(f"note: {METHODS[run.config.method.name].title}: {reports.model_in_words(trainer)}")
        if trainer.engine.note and team.leads:
            aside(f"note: {trainer.engine.note}")
        with progress(METHODS[run.config.method.name].title, run.config.run.rounds, quiet) as listener:
            carry_out(trainer, out=run.folder, resume=run.begun, listener=listener)
        if run.config.run.diagnose_every and team.leads:
            reports.plot_diagnostics(RunFolder(run.folder).metrics(), run.folder / "diagnostics.png")
    folder = RunFolder(runs[0].folder)
    if references and team.leads:
        with waiting("Fitting the references", quiet), writing(folder.path):
            folder.save_references([each.record | {"clients": each.clients} for each in beside(trainers[0])])
    if not quiet:
        show_run(folder)
    if team.leads:
        say(f"Run folder: {folder.path}")


@partial(taking, data_section)
def _asked(
    data: Values,
    rounds: options.Rounds = None,
    clients_per_round: options.ClientsPerRound = None,
    unseen: options.Unseen = None,
    metrics: options.Metrics = None,
    device: options.TrainingDevice = None,
) -> tuple[Layer, str]:
    """Return what the options of all methods ask for, and a word for the data in the name of a folder."""
    run = given(rounds=rounds, clients_per_round=clients_per_round, unseen=unseen, metrics=metrics, device=device)
    word = Path(data["path"]).stem if "path" in data else data.get("name", "synthetic")
    return {"run": run, "data": data}, word


@partial(taking, _asked)
def compare(
    asked: tuple[Layer, str],
    methods: Annotated[
        str, Option(help=f"Methods, with commas between them, or all. There are: {', '.join(METHODS)}.")
    ] = "local,fedavg,fedem",
    seeds: Annotated[
        str, Option(help="How many seeds (3 is 0, 1 and 2), or which: 0,4,7. The seed 4 alone is written 4,")
    ] = "3",
    settings: Annotated[list[str] | None, Option("--set", help=f"Any setting. {_ALL_METHODS} {_ONE_METHOD}")] = None,
    references: options.References = False,
    out: Annotated[Path | None, Option(help="Where all is written; runs/compare-DATA when not given.")] = None,
    resume: Annotated[
        bool, Option("--resume", help="Go on with the comparison in --out; what is complete is not run again.")
    ] = False,
    retry_failed: _RetryFailed = False,
    stop_after: options.StopAfter = None,
    quiet: options.Quiet = False,
) -> None:
    """Train several methods on the same data and splits, for several seeds, and put their figures side by side.

    Each method has the settings shipped for it. OUT/METHOD-seedS is a run like any other. The table is saved as
    comparison.md, .csv and .json, and the test scores against the rounds as accuracy.png and .svg.

    A method that diverges or can't be trained on these data has failed: the table says so, and the others go on. The
    exit code is 0 as long as one method comes to an end.

    Examples:
      fedem compare --methods local,fedavg,fedem --seeds 3 --unseen 0.2

      fedem compare --methods all --set fedem:schedule.learning_rate=0.5

      fedem compare --data mine.csv --out runs/mine --resume

      fedem compare --data mine.csv --out runs/mine --resume --retry-failed --set fedem:schedule.learning_rate=0.01
    """
    _check_retry(retry_failed, resume)
    if references:
        check_references()
    names = comparison.resolve_methods(listed(methods))
    shared, own = comparison.sort_settings(settings or [], names)
    numbers = read_seeds(seeds)
    layer, data = asked
    place = _folder("comparison", f"compare-{data}", out, resume)
    plan = partial(comparison.plan, place, names, numbers, [layer, *shared], own)
    plan()  # refuses what can't be, before a folder is made
    with sweep.held("comparison", place, resume, begun=place.is_dir):
        _compare(plan(), place, references, retry_failed, stop_after, quiet)
    say(f"Comparison: {place}")


def _compare(
    entries: list[Entry], place: Path, references: bool, retry_failed: bool, stop_after: float | None, quiet: bool
) -> None:
    """Work off a comparison, sum it up and write what is found."""
    names = list(dict.fromkeys(entry.labels["method"] for entry in entries))
    numbers = list(dict.fromkeys(entry.seed for entry in entries))
    titles = {entry.title: f"{METHODS[entry.labels['method']].title} seed {entry.seed}" for entry in entries}
    data_of = SharedData(most=len(numbers))
    with stopping_after(stop_after):
        stopped = _work(entries, sweep.check, data_of, quiet, retry_failed, titles)
    left_out: dict[str, str] = {}
    for entry in entries:
        if entry.title in stopped:
            left_out.setdefault(entry.labels["method"], f"{entry.folder.path}: {stopped[entry.title]}")
    over = [entry for entry in entries if entry.labels["method"] not in left_out]
    if over:
        plain = {}
        if references:
            with waiting("Fitting the references", quiet):
                plain = _references([entry for entry in over if entry.is_complete], data_of)
        found, command = comparison.summarize(over, plain), options.called()
        with writing(place):
            found.save(place, command)
            write_atomically(place / "comparison.md", reports.comparison_markdown(found, command).encode())
            for ending, content in reports.draw(found).items():
                write_atomically(place / f"{found.metric}.{ending}", content)
        if not quiet:
            display(*reports.comparison_tables(found), *reports.comparison_remarks(found))
        _tell_failed(len(found.failed), len(names), "method", place)
    if left_out:
        raise UserError(f"{', '.join(left_out)} left out of the table. {' '.join(left_out.values())}")


def _references(entries: Sequence[Entry], data: SharedData) -> dict[int, list[Record]]:
    """Return the figures of each seed's references, which are the same for all methods."""
    first: dict[int, Config] = {}
    for entry in entries:
        first.setdefault(entry.seed, entry.config)
    trainers = {
        seed: Trainer.prepare(config, data.of(config), fresh=False, tries=False) for seed, config in first.items()
    }
    return {seed: [each.record for each in beside(trainer)] for seed, trainer in trainers.items()}


experiment_group = Typer(
    help="The paper's tables and figures: list, run, status, table, board, pages.", no_args_is_help=True
)
Place = Annotated[Path, Option("--experiments", help="The folder of the experiments.")]


@dataclass(frozen=True)
class _Asked:
    """Which runs of an experiment are asked for, and where they lie."""

    experiment: Experiment
    out: Path | None
    place: Path
    only: Mapping[str, Sequence[str]]
    seeds: Sequence[int] | None  # None: as declared, or those that are there
    where: Layer  # the device, which changes no result
    shared: Sequence[Layer]
    own: Mapping[str, Sequence[Layer]]
    quick: bool

    @property
    def folder(self) -> Path:
        name = f"{self.experiment.name}-quick" if self.quick else self.experiment.home
        return self.out or Path("runs") / "experiments" / name

    @property
    def around(self) -> Path | None:
        """Where the runs of all experiments are; None for those that are elsewhere."""
        return self.folder.parent if self.out is None else None

    @property
    def page(self) -> Path:
        """The file of its table: in a folder of another experiment's runs, ``table.md`` is that one's."""
        is_guest = self.out is None and not self.quick and self.experiment.runs
        return self.folder / (f"{self.experiment.name}.md" if is_guest else "table.md")

    def plan(self) -> list[Entry]:
        seeds = self.seeds if self.seeds is not None else range(1 if self.quick else self.experiment.seeds)
        asked = [self.where, *self.shared]
        return experiments.plan(self.experiment, self.folder, seeds, self.only, asked, self.own, self.quick)

    def found(self) -> tuple[list[Entry], Path]:
        """Return the runs that are there, and where: all of them, or where settings are asked for, runs of these."""
        kept = self.place / self.experiment.home / experiments.RESULTS
        folder = kept if self.out is None and not self.folder.is_dir() and kept.is_dir() else self.folder
        if not (self.quick or self.own or any(any(layer.values()) for layer in self.shared)):
            return experiments.kept(self.experiment, folder, self.seeds, self.only), folder
        entries = replace(self, out=folder).plan()
        sweep.check_failed(entries)
        return entries, folder


def _experiment(
    name: Annotated[str, Argument(help="The experiment; fedem experiment list shows them.")],
    data: Annotated[str | None, Option(help="Short for --only data=...: data sets, with commas between them.")] = None,
    only: Annotated[list[str] | None, Option(help="Only these choices: axis=label,label. May be repeated.")] = None,
    seeds: Annotated[str | None, Option(help="How many seeds, or which: 0,4,7; as declared when not given.")] = None,
    rounds: options.Rounds = None,
    device: options.TrainingDevice = None,
    settings: Annotated[
        list[str] | None,
        Option("--set", help="Any setting, of all runs or of those with a label: EMNIST:partition.share=0.7."),
    ] = None,
    quick: Annotated[bool, Option("--quick", help="A short trial of the whole: its figures mean nothing.")] = False,
    out: Annotated[Path | None, Option(help="Where all runs are; runs/experiments/NAME when not given.")] = None,
    place: Place = experiments.USUAL,
) -> _Asked:
    experiment = experiments.find(place, name)
    chosen: dict[str, list[str]] = {}
    for text in [*(only or []), *([] if data is None else [f"data={data}"])]:
        axis, equals, labels = text.partition("=")
        if not equals or not labels.strip():
            raise UserError(f"--only got {text!r}; allowed: axis=label,label, such as method=FedEM,FedAvg.")
        chosen.setdefault(axis.strip(), []).extend(listed(labels))
    shared, own = experiments.sort_settings(experiment, settings or [])
    numbers = None if seeds is None else read_seeds(seeds)
    asked = [{"run": given(rounds=rounds)}, *shared]
    return _Asked(experiment, out, place, chosen, numbers, {"run": given(device=device)}, asked, own, quick)


@experiment_group.command("list")
def list_experiments(place: Place = experiments.USUAL) -> None:
    """List the experiments."""
    display(reports.experiments_table([experiments.read(place / name) for name in experiments.listed(place)]))


@experiment_group.command()
@partial(taking, _experiment)
def run(
    asked: _Asked,
    retry_failed: _RetryFailed = False,
    stop_after: options.StopAfter = None,
    quiet: options.Quiet = False,
) -> None:
    """Train the runs that are not complete, and print our figures beside the paper's.

    All runs are checked before the first is trained. It may be stopped at any time and started again; several processes
    may share the work. A run that diverges or can't be trained has failed: the table says so, and the others go on. The
    exit code is 0 as long as one run comes to an end.

    Examples:
      fedem experiment run table2 --data Synthetic --seeds 3

      fedem experiment run table2 --only method=FedEM,FedAvg --set EMNIST:partition.share=0.7 --device cuda
    """
    experiment, entries, folder = asked.experiment, asked.plan(), asked.folder
    with stopping_after(stop_after):
        stopped = _work(entries, experiments.check, SharedData(), quiet, retry_failed, around=asked.around)
    lines = experiments.tabulate(experiment, entries)
    put(asked.page, reports.experiment_markdown(experiment, lines).encode())
    failed = [entry for entry in entries if entry.failure is not None]
    if len(failed) == len(entries):
        raise UserError(f"No run came to an end. {' '.join(reports.experiment_remarks(experiment, lines))}")
    if not quiet:
        display(*reports.experiment_tables(experiment, lines), *reports.experiment_remarks(experiment, lines))
    _tell_failed(len(failed), len(entries), "run", folder)
    if stopped:
        titles: dict[str, list[str]] = {}  # of the runs with which the same went wrong
        for title, message in stopped.items():
            titles.setdefault(message, []).append(title)
        others = {
            message: f" and {counted(len(own) - 1, 'other run')}" if own[1:] else "" for message, own in titles.items()
        }
        raise UserError(" ".join(f"{own[0]}{others[message]}: {message}" for message, own in titles.items()))
    if left := sum(not entry.is_over for entry in entries):
        aside(f"{counted(left, 'run is', 'runs are')} being trained by other processes.")
    say(f"Experiment: {folder}")


@experiment_group.command()
@partial(taking, _experiment)
def status(asked: _Asked) -> None:
    """Show how far each run has come."""
    entries = asked.plan()
    sweep.check_failed(entries)
    display(reports.status_table(entries))


@experiment_group.command()
@partial(taking, _experiment)
def table(
    asked: _Asked,
    figure: Annotated[
        Path | None,
        Option(help="Also draw them along the experiment's axis or the rounds, to this .svg, .png or .pdf."),
    ] = None,
    force: options.Force = False,
) -> None:
    """Print our figures, of the runs that are complete, beside the paper's; nothing is trained.

    Without --out the runs are those in runs/experiments/NAME or, where nothing was run, those kept with the experiment.
    The table says what they were made with other than declared. With --set, --rounds or --quick, they must be of these
    settings.

    Examples:
      fedem experiment table table2

      fedem experiment table table2 --data EMNIST --only method=FedEM,FedAvg

      fedem experiment table components --figure components.png
    """
    experiment = asked.experiment
    if figure is not None:
        if (ending := figure.suffix.removeprefix(".")) not in canvas.FORMATS:
            raise unknown("ending of --figure", figure.suffix, [f".{each}" for each in canvas.FORMATS])
        if not experiment.along:
            others = (experiments.read(asked.place / name) for name in experiments.listed(asked.place))
            allowed = ", ".join(other.name for other in others if other.along) or "none"
            raise UserError(f"--figure is given, but {experiment.name} is drawn along nothing; allowed for: {allowed}.")
        options.check_new(force, figure)
    entries, folder = asked.found()
    lines = experiments.tabulate(experiment, entries)
    if figure is not None:
        if (picture := draw_experiment(experiment, lines, entries)) is None:
            how = " and was scored on the way (run.evaluate_every)" if experiment.along == experiments.ROUNDS else ""
            raise UserError(f"No run in {folder} is complete{how}, so there is nothing to draw.")
        put(figure, canvas.alone(picture, ending))
    display(*reports.experiment_tables(experiment, lines), *reports.experiment_remarks(experiment, lines))
    say(f"Runs: {folder}")


@experiment_group.command()
def board(
    names: Annotated[
        list[str] | None, Argument(help="Experiments; all with kept runs or notes when not given.")
    ] = None,
    out: Annotated[
        Path | None, Option(help="With one NAME: where its runs are; else EXPERIMENTS/NAME/results.")
    ] = None,
    place: Place = experiments.USUAL,
) -> None:
    """Print all kept figures as a page: methods beside FedEM and beside the paper, costs, and commands.

    Examples:
      fedem experiment board > docs/leaderboard.md

      fedem experiment board table2 --out runs/experiments/table2
    """
    echo(board_page(gather(place, names or [], out), place), nl=False)


@experiment_group.command()
def pages(
    out: Annotated[Path, Option(help="The folder to write them to.")] = Path("runs/pages"),
    place: Place = experiments.USUAL,
    force: options.Force = False,
    quiet: options.Quiet = False,
) -> None:
    """Make the leaderboard, and every experiment's table, figures and report, from the runs that are kept.

    Nothing is trained, and no data are needed.

    Examples:
      fedem experiment pages --out runs/pages
    """
    options.check_new(force, out)
    count = 0
    with waiting("Drawing", quiet):
        for name, content in result_pages(place):
            put(out / name, content)
            count += 1
    say(f"Pages: {counted(count, 'file')} in {out}")


@partial(taking, _asked)
def tune(
    asked: tuple[Layer, str],
    method: Annotated[str, Option(help=f"One of: {', '.join(METHODS)}.")] = "fedem",
    grid: Annotated[list[str] | None, Option(help=f"{_VALUES} When not given, {_GRIDS}")] = None,
    sampler: Annotated[str, Option(help=f"One of: {', '.join(tuning.SAMPLERS)}. {_SAMPLED}")] = "grid",
    trials: Annotated[int | None, Option(help=f"For random and tpe: how many ({_TRIALS}).")] = None,
    seeds: Annotated[
        str, Option(help="Runs of each trial: how many seeds (3 is 0, 1 and 2), or which: 100,101.")
    ] = "1",
    settings: options.Assignments = None,
    out: Annotated[Path | None, Option(help="Where all is written; runs/tune-DATA-METHOD when not given.")] = None,
    resume: Annotated[
        bool, Option("--resume", help="Go on with the search in --out; trials that are over are not made again.")
    ] = False,
    retry_failed: _RetryFailed = False,
    stop_after: options.StopAfter = None,
    quiet: options.Quiet = False,
) -> None:
    """Choose settings by the validation part; the test part is dropped before training.

    A trial is a run for each seed, in OUT/trials/NNN/seedS. Its score is the validation metric after the
    last round, averaged over the seeds. Writes tune.json, and chosen.toml for fedem train.

    Examples:
      fedem tune --data synthetic --method fedem --seeds 100,101

      fedem tune --method fedprox --sampler tpe --trials 30

      fedem train runs/tune-synthetic-fedem/chosen.toml
    """
    _check_retry(retry_failed, resume)
    name, (layer, data) = resolve_method(method), asked
    elsewhere = {"run.seed": "--seeds", "method.name": "--method"}
    further = [sweep.read_setting(text, elsewhere)[-1] for text in settings or []]
    layers = (layer, {"method": {"name": name}}, *further)
    number = _TRIALS if trials is None and sampler != "grid" else trials
    grids = tuning.read_grids(grid) if grid else tuning.usual_grids(name, *layers)
    search = tuning.Search(layers, grids, sampler, number, tuple(read_seeds(seeds)))
    search.check()
    place = _folder("search", f"tune-{data}-{name}", out, resume)
    total = search.count * len(search.seeds) * search.base.run.rounds
    with progress(METHODS[name].title, total, quiet) as listener, stopping_after(stop_after):
        tuned = tuning.tune(search, place, resume=resume, retry_failed=retry_failed, listener=listener)
    with writing(place):
        write_json(place / "tune.json", {"command": options.called(), **tuned.record()})
        if tuned.best is not None:
            chosen = to_toml(search.chosen_layer(tuned.best.values))
            origin = "# Chosen by the validation part; tune.json tells how."
            write_atomically(place / "chosen.toml", f"{origin}\n\n{chosen}".encode())
    if not quiet:
        display(reports.trials_table(tuned), *reports.tuning_remarks(tuned))
    if tuned.best is None:
        raise UserError(f"No trial came to an end, so nothing is chosen. {tuned.trials[0].error}")
    say(f"Chosen settings: {place / 'chosen.toml'}")


@partial(taking, data_section)
def theory(
    data: Values,
    method: Annotated[
        str, Option(help="fedem or dfedem; fedavg and dsgd are mixtures of one, without weights to follow.")
    ] = "fedem",
    rounds: Annotated[
        str, Option(help="The numbers K of rounds, with commas between them: three or more, increasing.")
    ] = "50,75,110,165,250,375",
    a0: Annotated[float, Option("--a0", help="The learning rate of a run of K rounds is a0 / sqrt(K).")] = 20.0,
    every: Annotated[int, Option(help="Most rounds between two measurements; the first rounds are all measured.")] = 10,
    seeds: Annotated[int, Option(help="Runs of each length, each with a slope of its own.")] = 5,
    settings: options.Assignments = None,
    device: options.TrainingDevice = None,
    out: Annotated[Path | None, Option(help="Where all is written; runs/theory-METHOD when not given.")] = None,
    quiet: options.Quiet = False,
) -> None:
    """Put the paper's convergence theorems to the test: how the means over K rounds fall with K.

    Trains for several K at learning rate a0 / sqrt(K), with plain SGD, and fits the slopes of the squared gradient, the
    gain and the divergence of the mixture weights and the distance to consensus against K, on logarithmic axes. Writes
    theory.json and theory.png. Without --data, on a small synthetic federation.

    A bound is consistent with the runs if the whole 95% interval of a slope is at most the theorem's exponent, refuted
    if all of it is above, else undecided. The exit code is 0 if all bounds are consistent, 4 if one is
    refuted, else 3.

    Examples:
      fedem theory

      fedem theory --method dfedem --rounds 50,100,200,400,800 --seeds 3
    """
    name = resolve_method(method)
    if seeds < 1:
        raise UserError(f"--seeds is {seeds}; allowed: at least 1.")
    try:
        lengths = [int(word) for word in listed(rounds)]
    except ValueError:
        raise UserError(f"--rounds is {rounds!r}; allowed: whole numbers, such as 50,100,200,400.") from None
    small = SMALL if data.get("name", "synthetic") == "synthetic" else {}
    elsewhere = {"run.rounds": "--rounds", "run.seed": "--seeds", "schedule": "--a0"}
    further = [sweep.read_setting(text, elsewhere)[-1] for text in settings or []]
    config = Config.build(assumed(name), small, options.asked(data, name, device=device), *further)
    place = _folder("study", f"theory-{name}", out)
    if (place / "theory.json").exists():
        raise UserError(f"{place} holds a study already; choose another folder.")
    RunFolder(place).prepare(resume=True)
    with progress(name, sum(lengths) * seeds, quiet) as listener:
        found = study(config, lengths, a0, every, range(seeds), listener)
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
        write_json(place / "theory.json", {"command": options.called(), **found.record()})
        write_atomically(place / "theory.png", reports.draw_study(found))
    if not quiet:
        display(reports.study_table(found), *reports.study_remarks(found))
    say(f"Study: {place}")
    if code := (0, 3, 4)[OUTCOMES.index(found.outcome)]:
        sys.exit(code)


def _folder(what: str, name: str, out: Path | None, resume: bool = False) -> Path:
    """Return the folder ``out`` or, unless the work there is to be resumed, a new one below runs."""
    if resume and out is None:
        raise UserError(f"--resume needs the folder of the {what} to go on with: give it as --out.")
    return out or new_folder(Path("runs"), name)


def _work(
    entries: Sequence[Entry],
    check: Callable[[Sequence[Entry], SharedData], list[str]],
    data: SharedData,
    quiet: bool,
    retry_failed: bool,
    titles: Mapping[str, str] | None = None,
    around: Path | None = None,
) -> dict[str, str]:
    """Check all runs and train those that are not over, shown by ``titles``; returns what stopped some, by entry.

    Runs in other folders ``around`` may lend their training.
    """
    if retry_failed:
        sweep.clear_failed(entries)
    pending = [entry for entry in entries if not entry.is_over]
    if not quiet and (complete := sum(entry.is_complete for entry in entries)):
        aside(f"{complete} of {counted(len(entries), 'run is', 'runs are')} complete already.")
    with waiting("Making the data, checking every run", quiet):
        notes = check(entries, data)
    for text in notes:
        aside(f"note: {text}")
    refused = {entry.title: failure.message for entry in pending if (failure := entry.failure) is not None}
    for message in dict.fromkeys(refused.values()):
        same = [title for title, other in refused.items() if other == message]
        more = f" and {counted(len(same) - 1, 'other run')}" if same[1:] else ""
        aside(f"note: {same[0]}{more} can't be trained: {message}")
    pending = [entry for entry in pending if entry.title not in refused]
    with reports.runs_progress(pending, quiet, titles or {}) as watch:
        return sweep.work_off(entries, watch, data, around)


def _check_retry(retry_failed: bool, resume: bool) -> None:
    if retry_failed and not resume:
        raise UserError("--retry-failed is given without --resume; allowed: both, to go on with what is in --out.")


def _tell_failed(number: int, total: int, what: str, place: Path) -> None:
    if number:
        mend = "--retry-failed trains them again, perhaps with other settings"
        aside(f"{number} of {counted(total, what)} failed; the table in {place} says why. {mend}.")

"""Readers of what runs are asked for, and of what they leave: configurations, experiments, folders of runs, studies."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import shops
import torch

import fedem
from fedem.cli import app
from fedem.core.files import digest, to_json, write_json
from fedem.report.runs import read_runs
from fedem.runs.checking import check_run
from fedem.runs.config import Config, parse_assignment, read_toml
from fedem.runs.folder import Failure, RunFolder
from fedem.runs.result import Result
from fedem.studies import board, checking, experiments
from fedem.studies.tuning import Trial
from fuzzing.harness import FolderReader, Reader
from fuzzing.mutations import (
    OTHERS,
    Draw,
    damaged_cells,
    damaged_toml,
    flipped,
    pick,
    toml,
)


def command(*words: object) -> None:
    """Run a command of the command line in this process; how it ends by itself is fine."""
    try:
        app([str(word) for word in words], standalone_mode=False)
    except SystemExit:
        return


class Configurations(Reader):
    title = "configurations: TOML"
    named = (
        "allowed",
        "Unknown",
        "takes no settings",
    )  # a file's settings may come from options as well: they name the setting

    def __init__(self, folder: Path):
        super().__init__(folder)
        layers: tuple[dict[str, dict[str, Any]], ...] = (
            {"method": {"name": "fedem"}},
            {"method": {"name": "dfedem"}, "graph": {"name": "ring"}, "partition": {"name": "dirichlet"}},
            {"data": {"name": "file", "path": "t.csv"}, "model": {"name": "mlp"}, "solver": {"name": "adam"}},
            {"method": {"name": "fedavg"}, "defence": {"name": "median"}, "attack": {"name": "sign_flip"}},
            {"data": {"name": "shakespeare"}, "server": {"name": "adam"}, "schedule": {"name": "cosine"}},
        )
        self.trees = [tomllib.loads(Config.build(layer, preset=False).to_toml()) for layer in layers]

    def damage(self, draw: Draw) -> str:
        self.path, tree = self.folder / "config.toml", pick(draw, self.trees)
        if draw.random() < 0.5:  # a user's own file says little
            names = list(tree)
            draw.shuffle(names)
            tree = {name: tree[name] for name in names[:3]}
        self.path.write_bytes(damaged_toml(tree, draw))
        return "config.toml"

    def read(self) -> object:
        return Config.build(read_toml(self.path))

    def judge(self, found: object) -> str:
        assert isinstance(found, Config)
        again = Config.build(tomllib.loads(found.to_toml()), preset=False)
        return "" if again.to_toml() == found.to_toml() else "It does not come back from its own file."


class Assignments(Configurations):
    title = "settings given by --set"
    named = ("--set", *Configurations.named)

    def damage(self, draw: Draw) -> str:
        tree = pick(draw, self.trees)
        section = pick(draw, sorted(tree))
        key = pick(draw, sorted(tree[section]) or ["name"])
        value = toml(pick(draw, (tree[section].get(key, ""), *OTHERS)))
        text = f"{section}.{key}={value}" if draw.random() < 0.7 else f"{section}.{key}={'[' * 9999}{value}"
        changed = (
            flipped(text.encode("utf-8", "surrogatepass"), draw)
            if draw.random() < 0.5
            else text.encode("utf-8", "replace")
        )
        self.text = changed.decode("utf-8", "replace")
        return self.text[:80]

    def read(self) -> object:
        return Config.build(parse_assignment(self.text))


class Experiments(Reader):
    title = "experiments: TOML"
    tree: ClassVar[dict[str, Any]] = {
        "title": "Clusters", "place": "J.4", "seeds": 2, "figures": ["test_accuracy", "test_loss / FedAvg"],
        "without": [{"method": "FedAvg", "size": "large"}],
        "settings": {"data.name": "synthetic", "run.rounds": 2},
        "axes": {
            "method": {"FedEM": {"method.name": "fedem"}, "FedAvg": {"method.name": "fedavg"}},
            "size": {"small": {"data.num_clients": 8}, "large": {"data.num_clients": 9, "data.dimension": 5}},
        },
        "paper": {"FedEM / small": [1, 0.5], "FedAvg / small": ["", 2]},
        "quick": {"all": {"run.rounds": 1}, "FedEM": {"data.num_test": 20}},
    }  # fmt: skip

    def damage(self, draw: Draw) -> str:
        self.where = self.folder / "clusters"
        self.where.mkdir(exist_ok=True)
        (self.where / "experiment.toml").write_bytes(damaged_toml(self.tree, draw))
        return "experiment.toml"

    def read(self) -> object:
        return experiments.read(self.where)

    def judge(self, found: Any) -> str:
        finite = all(number is None or abs(number) <= 1e308 for row in found.paper.values() for number in row)
        return (
            "" if found.seeds >= 1 and found.axes and finite else "It has no seeds or axes, or numbers that are none."
        )


class Notes(Reader):
    title = "experiments: notes of the leaderboard"
    tree: ClassVar[dict[str, Any]] = {
        "about": "Two cores.",
        "partition": {"Here": "Yes."},
        "why": {"Here": {"FedEM": "Other samples."}},
        "published": [{"source": "A paper", "partition": "ours", "figures": {"Here": {"Theirs": [1.5]}}}],
    }  # fmt: skip

    def __init__(self, folder: Path):
        super().__init__(folder)
        (folder / "experiment.toml").write_text(
            'title = "T"\nplace = "P"\nfigures = ["test_accuracy"]\n'
            'axes.data.Here."data.name" = "synthetic"\naxes.method.FedEM."method.name" = "fedem"\n'
        )
        self.experiment = experiments.read(folder)

    def damage(self, draw: Draw) -> str:
        (self.folder / "notes.toml").write_bytes(damaged_toml(self.tree, draw))
        return "notes.toml"

    def read(self) -> object:
        return board.read_notes(self.folder / "notes.toml", self.experiment)

    def judge(self, found: Any) -> str:
        known = found.partition.keys() | found.why.keys() | found.published.keys() <= {"Here"}
        return "" if known else "It speaks of data sets that the experiment has not."


# --- folders of runs


def small_run(folder: Path) -> None:
    """Train a few rounds, with a checkpoint before the last and a best state beside it, and every other file."""
    data = {"num_clients": 3, "dimension": 3, "num_test": 10, "num_validation": 10, "max_samples": 60}
    run = {"rounds": 3, "evaluate_every": 1, "checkpoint_every": 1, "unlabelled": True, "device": "cpu"}
    config = Config.build({"run": run, "data": data, "method": {"num_components": 2}})
    fedem.run(config, config.data.make(config.run.seed), out=folder)
    place = RunFolder(folder)
    place.save_references([{"method": "constant", "title": "Constant", "test_accuracy": 0.5, "clients": [{"a": 1}]}])
    place.fail(Failure("diverged", "It diverged."))


def forge(folder: Path, draw: Draw) -> None:
    """Have the hashes of a checkpoint fit whatever its files hold: not damage, but somebody's work."""
    for name in ("checkpoint.json", "checkpoint-previous.json"):
        path = folder / "checkpoints" / name
        try:
            manifest = json.loads(path.read_bytes())
            for entry in manifest["states"].values():
                entry["blake2b"] = digest((folder / "checkpoints" / entry["file"]).read_bytes())
            manifest.pop("blake2b")
            if draw.random() < 0.8:
                manifest["blake2b"] = digest(json.dumps(manifest, sort_keys=True).encode())
            path.write_bytes(to_json(manifest))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # there is nothing to be hashed


class RunFiles(FolderReader):
    """The folder of a run."""

    slowness = 2.0

    def build(self, folder: Path) -> None:
        small_run(folder)
        self.known = self.states(Result.load(folder, device="cpu"))

    @staticmethod
    def states(result: Result) -> dict[str, dict[str, Any]]:
        """Return all tensors of a result's states, by role."""
        return {
            role: {
                f"{part}.{name}": leaf for part in ("shared", "personal") for name, leaf in getattr(state, part).items()
            }
            for role, state in result.states.items()
        }

    def damage(self, draw: Draw) -> str:
        done = super().damage(draw)
        self.is_forged = "checkpoints" in done and draw.random() < 0.5
        if self.is_forged:
            forge(self.folder, draw)
        return f"{done}{', forged' if self.is_forged else ''}"


def insane_predictions(found: Any, rows: int) -> str:
    shape = tuple(found.shape)
    return "" if len(shape) == 2 and shape[0] == rows and shape[1] >= 1 else f"Predictions are of shape {shape}."


class Loaded(RunFiles):
    title = "runs: loaded, predicting, personalised"
    slowness = 6.0

    def read(self) -> object:
        result = Result.load(self.folder, device="cpu")
        repr(result)
        inputs = torch.zeros(3, *result.recipe.format.inputs, dtype=result.recipe.format.input_dtype)
        predictions = [result.predict(name, inputs) for name in result.names[:2]]
        fitted = result.personalize(inputs[:2], np.zeros(2, dtype=np.int64))
        return result, [*predictions, fitted.predict(inputs)]

    def judge(self, found: Any) -> str:
        result, predictions = found
        if not self.is_forged:
            before = json.loads(self.valid["checkpoints/checkpoint-previous.json"])["states"]["last"]["round"]
            last, states = result.state().round, self.states(result)["last"]
            if last != before and any(
                not torch.equal(leaf, self.known["last"].get(name, torch.empty(0))) for name, leaf in states.items()
            ):
                return "The state is not the one that was saved."
        return next(filter(None, (insane_predictions(each, 3) for each in predictions)), "")


class Unlabelled(RunFiles):
    title = "runs: statistics of inputs"
    slowness = 5.0
    touched = ("inputs-000003.safetensors", "checkpoint.json")
    named = ("run.unlabelled",)

    def damage(self, draw: Draw) -> str:
        done = super().damage(draw)
        forge(self.folder, draw)
        return done

    def read(self) -> object:
        result = Result.load(self.folder, device="cpu")
        shape = result.recipe.format.inputs
        return result.personalize(torch.zeros(3, *shape)).predict(torch.zeros(3, *shape))

    def judge(self, found: object) -> str:
        return insane_predictions(found, 3)


class Reported(RunFiles):
    title = "runs: shown and reported"
    slowness = 10.0
    touched = (".json", ".jsonl", ".csv", ".toml")

    def read(self) -> object:
        command("show", self.folder)
        return read_runs([self.folder])

    def judge(self, found: Any) -> str:
        rounds = [line["round"] for line in found[0].history]
        return "" if len(set(rounds)) == len(rounds) else "A round is there twice."


class Checked(RunFiles):
    title = "runs: fedem check, also --repair"
    refuses = False
    slowness = 6.0

    def damage(self, draw: Draw) -> str:
        self.repairs = draw.random() < 0.5
        done = super().damage(draw)
        self.round = self._found()
        return done

    def _found(self) -> int:
        """Return the round of the newest checkpoint that is whole; -1 where there is none."""
        loaded, _ = RunFolder(self.folder).saved.find()
        return -1 if loaded is None else loaded.states["last"].round

    def read(self) -> object:
        command("check", self.folder, *(["--repair"] if self.repairs else []))
        return checking.check(self.folder)[1] if self.repairs else []

    def judge(self, found: Any) -> str:
        """What was repaired stays so, and no round is lost by it: what is removed can be made again."""
        if self.repairs:
            first = [str(finding.path) for finding in found]
            again = [str(finding.path) for run in checking.runs_below(self.folder) for finding in check_run(run, True)]
            if not set(again) <= set(first):
                return f"Repaired, it was damaged in other files: {again}."
        return "" if self._found() == self.round else f"Of round {self.round} it is of round {self._found()} now."


class Resumed(RunFiles):
    title = "runs: gone on with"
    slowness = 35.0
    touched = (".json", ".jsonl", ".csv", ".safetensors")

    def read(self) -> object:
        config = RunFolder(self.folder).config()
        return fedem.run(config, config.data.make(config.run.seed), out=self.folder, resume=True)

    def judge(self, found: Any) -> str:
        return "" if found.state().round >= 3 else "Rounds are gone."


class Studies(FolderReader):
    title = "studies: comparison, search, trials, choice, theory"

    def build(self, folder: Path) -> None:
        trial = {
            "number": 0,
            "values": {"schedule.learning_rate": 0.1},
            "scores": [0.5, 0.6],
            "seconds": 1.0,
            "error": None,
        }
        (folder / "trials" / "000").mkdir(parents=True)
        write_json(folder / "trials" / "000" / "trial.json", trial)
        write_json(
            folder / "search.json",
            {"grids": {"schedule.learning_rate": [0.1, 1.0]}, "sampler": "grid", "seeds": [0, 1]},
        )
        write_json(
            folder / "tune.json",
            {"data": "synthetic", "method": "fedem", "metric": "validation_loss", "trials": [trial]},
        )
        methods = [{"method": "fedem", "test_accuracy": 0.5}]
        write_json(
            folder / "comparison.json", {"data": "synthetic", "metric": "accuracy", "methods": methods, "command": None}
        )
        write_json(folder / "choice.json", {"rungs": [[{"method": "fedem", "score": 0.5}]]})
        write_json(folder / "theory.json", {"outcome": "holds", "points": [{"rounds": 1, "norm": 0.5}]})

    def damage(self, draw: Draw) -> str:
        self.repairs = draw.random() < 0.3
        return super().damage(draw)

    def read(self) -> object:
        _, findings = checking.check(self.folder)
        trials = [Trial.read(path) for path in self.folder.glob("trials/*/trial.json")]
        spreads = [trial.spread for trial in trials]
        if self.repairs:
            command("check", self.folder, "--repair")
        return findings, spreads

    def judge(self, found: Any) -> str:
        return (
            "" if all(spread.mean is None or abs(spread.mean) < float("inf") for spread in found[1]) else "Not finite."
        )


class NewRows(Reader):
    title = "new rows: predict, evaluate, personalize"
    slowness = 4.0
    named = ("column", "client", "row", "--")

    def __init__(self, folder: Path):
        super().__init__(folder)
        table = shops.write_shops(folder / "shops.csv", shops.make_shops(12, names=("shop A", "shop B")))
        self.run, self.rows = folder / "run", table.read_bytes()
        data = {"name": "file", "path": str(table), "target_column": "sold", "client_column": "shop"}
        config = Config.build({"data": data, "run": {"rounds": 2, "device": "cpu"}, "method": {"num_components": 2}})
        fedem.run(config, config.make_data(), out=self.run)

    def damage(self, draw: Draw) -> str:
        self.new = self.folder / "new.csv"
        self.new.write_bytes(damaged_cells(self.rows, draw))
        for path in self.folder.glob("out*"):
            if path.is_dir():
                for file in sorted(path.rglob("*"), reverse=True):
                    file.rmdir() if file.is_dir() else file.unlink()
                path.rmdir()
            else:
                path.unlink()
        self.what = pick(draw, ("predict", "predict", "evaluate", "personalize"))
        return self.what

    def read(self) -> object:
        self.out = self.folder / ("out" if self.what == "personalize" else "out.csv")
        return command(self.what, self.run, "--data", self.new, "--out", self.out, "--device", "cpu", "--quiet")

    def judge(self, found: object) -> str:
        if self.what == "personalize":
            return "" if (self.out / "summary.json").exists() else "Nothing was written."
        text = self.out.read_text(encoding="utf-8")
        return "Predictions are not numbers." if "nan" in text.lower() and self.what == "predict" else ""


READERS: tuple[type[Reader], ...] = (
    Configurations, Assignments, Experiments, Notes, Loaded, Unlabelled, Reported, Checked, Resumed, Studies, NewRows,
)  # fmt: skip

"""``python -m benchmarks.tables``: the first commands on many kinds of tables, beside plain predictors.

Each table is a CSV file with the columns client, y and features, on which ``fedem train --data FILE --client-column
client --target-column y`` is run with nothing else, and ``fedem choose FILE`` with the same columns and a budget. Their
test scores stand beside those of the references of the same split. A seed is that of the table; the commands have their
own default. Tables marked * are those of CHOSEN_ON.

The last column but one is how much better the best reference is than what was chosen, in the mean over the seeds, with
its standard error: differences are paired by client within a seed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from benchmarks.arguments import add_names
from benchmarks.measure import environment
from fedem.cli import main as fedem
from fedem.models.metrics import find_metric
from fedem.runs.evaluate import Record, has_diverged, metrics_of
from fedem.runs.folder import RunFolder

CHOSEN_ON = ("own_slopes", "no_effect", "sensors", "diabetes")
"""the tables that defaults may be chosen on; the others are for reporting only"""

_Array = NDArray[Any]


def _frame(clients: _Array, features: _Array, targets: _Array) -> pd.DataFrame:
    columns = {f"x{position}": column for position, column in enumerate(features.T)}
    return pd.DataFrame({"client": [f"c{client:03d}" for client in clients], **columns, "y": targets})


def _shipped(name: str, seed: int) -> tuple[_Array, _Array, np.random.Generator]:
    from sklearn import datasets

    features, targets = getattr(datasets, f"load_{name}")(return_X_y=True)
    return features, targets, np.random.default_rng(seed)


def _slopes(seed: int, num_clients: int, rows: int, spread: float, dimension: int = 5) -> tuple[_Array, _Array, _Array]:
    """Return clients, standard normal inputs, and <x, w + spread * w_t> with w and w_t standard normal."""
    rng = np.random.default_rng(seed)
    clients = np.repeat(np.arange(num_clients), rows)
    features = rng.normal(size=(len(clients), dimension))
    weights = rng.normal(size=dimension) + spread * rng.normal(size=(num_clients, dimension))
    return clients, features, (features * weights[clients]).sum(1)


def own_slopes(seed: int) -> pd.DataFrame:
    """Formula: y = <x, w + 2 w_t> + e: 20 clients of 60 rows whose slopes are mostly their own."""
    clients, features, signal = _slopes(seed, 20, 60, 2.0)
    return _frame(clients, features, signal + np.random.default_rng([seed, 1]).normal(size=len(signal)))


def weak_effect(seed: int) -> pd.DataFrame:
    """Formula: y = <x, w + 0.3 w_t> + e: 40 clients of 30 rows whose slopes are mostly shared."""
    clients, features, signal = _slopes(seed, 40, 30, 0.3)
    return _frame(clients, features, signal + np.random.default_rng([seed, 1]).normal(size=len(signal)))


def no_effect(seed: int) -> pd.DataFrame:
    """Formula: y = [<x, w> + e > 0], e logistic: 30 clients of 40 rows that do not differ."""
    clients, features, signal = _slopes(seed, 30, 40, 0.0)
    noise = np.random.default_rng([seed, 1]).logistic(size=len(signal))
    return _frame(clients, features, (signal + noise > 0).astype(int))


def three_groups(seed: int) -> pd.DataFrame:
    """Formula: y = argmax_k <x, w_gk> + e_k, e Gumbel: 3 classes, 60 clients of 30 rows in 3 groups g."""
    rng = np.random.default_rng(seed)
    clients = np.repeat(np.arange(60), 30)
    features, weights = rng.normal(size=(len(clients), 4)), 2 * rng.normal(size=(3, 3, 4))
    scores = np.einsum("nd,nkd->nk", features, weights[clients % 3]) + rng.gumbel(size=(len(clients), 3))
    return _frame(clients, features, scores.argmax(1))


def rare_class(seed: int) -> pd.DataFrame:
    """Formula: y = [<x, w + w_t> + e > q], e logistic, q such that 4% of the rows are 1: 25 clients of 80 rows."""
    clients, features, signal = _slopes(seed, 25, 80, 1.0)
    signal = signal + np.random.default_rng([seed, 1]).logistic(size=len(signal))
    return _frame(clients, features, (signal > np.quantile(signal, 0.96)).astype(int))


def heavy_tails(seed: int) -> pd.DataFrame:
    """Formula: y = <x, w + w_t> + e, e of Student's t with 2 degrees of freedom: 20 clients of 50 rows."""
    clients, features, signal = _slopes(seed, 20, 50, 1.0)
    return _frame(clients, features, signal + np.random.default_rng([seed, 1]).standard_t(2, size=len(signal)))


def single_rows(seed: int) -> pd.DataFrame:
    """Formula: y = <x, w + 0.5 w_t> + e: 10 clients of 50 rows and 100 of one."""
    clients, features, signal = _slopes(seed, 110, 50, 0.5)
    kept = np.concatenate([np.arange(500), np.arange(500, len(clients), 50)])
    noise = np.random.default_rng([seed, 1]).normal(size=len(signal))
    return _frame(clients[kept], features[kept], (signal + noise)[kept])


def many_clients(seed: int) -> pd.DataFrame:
    """Formula: y = <x, w + 0.5 w_t> + 2 a_t + e, a_t normal: 300 clients of 8 rows with levels of their own."""
    clients, features, signal = _slopes(seed, 300, 8, 0.5, 3)
    rng = np.random.default_rng([seed, 1])
    return _frame(clients, features, signal + 2 * rng.normal(size=300)[clients] + rng.normal(size=len(signal)))


def exams(seed: int) -> pd.DataFrame:
    """Formula: y = round(30 + 5 a_t + 6 x0 + 2 x1 + 8 e), cut to 1..70: 139 schools of 10 to 40 pupils."""
    rng = np.random.default_rng(seed)
    clients = np.repeat(np.arange(139), rng.integers(10, 41, size=139))
    features = np.column_stack([rng.normal(size=len(clients)), rng.integers(0, 2, size=len(clients))])
    scores = 30 + 5 * rng.normal(size=139)[clients] + features @ [6, 2] + 8 * rng.normal(size=len(clients))
    return _frame(clients, features, scores.round().clip(1, 70).astype(int))


def sensors(seed: int) -> pd.DataFrame:
    """Formula: y = [<x, 0.5 w + w_t> + b_t + e > 0], b_t normal, e logistic: 23 sensors of 40 to 120 rows."""
    rng = np.random.default_rng(seed)
    clients = np.repeat(np.arange(23), rng.integers(40, 121, size=23))
    features = rng.normal(size=(len(clients), 10))
    weights, levels = 0.5 * rng.normal(size=10) + rng.normal(size=(23, 10)), rng.normal(size=23)
    signal = (features * weights[clients]).sum(1) + levels[clients] + rng.logistic(size=len(clients))
    return _frame(clients, features, (signal > 0).astype(int))


def diabetes(seed: int) -> pd.DataFrame:
    """scikit-learn's diabetes; 12 clients by twelfths of the age, the seed breaking ties."""
    features, targets, rng = _shipped("diabetes", seed)
    ranks = np.lexsort([rng.random(len(targets)), features[:, 0]]).argsort()
    return _frame(ranks * 12 // len(targets), features, targets)


def wine(seed: int) -> pd.DataFrame:
    """scikit-learn's wine; 6 clients drawn at random, which do not differ."""
    features, targets, rng = _shipped("wine", seed)
    clients = rng.integers(0, 6, size=len(targets))
    return _frame(clients, features, targets)


def cancer(seed: int) -> pd.DataFrame:
    """scikit-learn's breast cancer; 10 clients drawn at random, the odd ones with the classes exchanged."""
    features, targets, rng = _shipped("breast_cancer", seed)
    clients = rng.integers(0, 10, size=len(targets))
    return _frame(clients, features, np.where(clients % 2, 1 - targets, targets))


def digits(seed: int) -> pd.DataFrame:
    """scikit-learn's digits; 20 clients, each row at one of the 4 whose number is 2 y mod 20 up to 2 y + 3 mod 20."""
    features, targets, rng = _shipped("digits", seed)
    return _frame((2 * targets + rng.integers(0, 4, size=len(targets))) % 20, features, targets)


TABLES: dict[str, Callable[[int], pd.DataFrame]] = {
    table.__name__: table
    for table in (own_slopes, weak_effect, no_effect, three_groups, rare_class, heavy_tails, single_rows, many_clients)
} | {table.__name__: table for table in (exams, sensors, diabetes, wine, cancer, digits)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on every table for every seed, print a line each in Markdown and, if asked, write all figures to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    add_names(parser, "--tables", "table", TABLES)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--budget", default="10m", help="of fedem choose")
    parser.add_argument("--jobs", type=int, default=1, help="tables at a time, a thread each")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all figures here")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: two tables, 2 rounds; its figures mean nothing"
    )
    options = parser.parse_args(arguments)
    names = ["diabetes", "no_effect"] if options.quick else options.tables
    budget, more = ("1s", ["--rounds", "2"]) if options.quick else (options.budget, [])
    seeds = range(1 if options.quick else options.seeds)
    runs: list[Record] = []
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:  # torch's threads don't survive a fork
        asked = {name: [pool.submit(run, name, seed, budget, more) for seed in seeds] for name in names}
        for name, own in asked.items():
            found = [each.result() for each in own]
            if name == names[0]:
                titles = ["table", "clients", "rows", "metric", "fedem train", "fedem choose", "its choice"]
                titles += [*found[0]["references"], "best reference better by", "diverged"]
                print(f"| {' | '.join(titles)} |\n| --- |{' ---: |' * 2} --- |{' ---: |' * 2} --- |", end="")
                print(f"{' ---: |' * (len(titles) - 7)}", flush=True)
            print(_line(found), flush=True)
            runs += found
            if options.out:
                content = {"environment": environment(), "chosen_on": CHOSEN_ON, "budget": budget, "runs": runs}
                options.out.write_text(json.dumps(content, indent=2) + "\n")


def run(name: str, seed: int, budget: str, more: Sequence[str] = ()) -> Record:
    """Run the first commands on a table, with ``more`` in a smoke run; the second one scores the references."""
    torch.set_num_threads(1)
    frame = TABLES[name](seed)
    with tempfile.TemporaryDirectory() as folder:
        path, out, chosen = Path(folder) / f"{name}.csv", Path(folder) / "run", Path(folder) / "choice"
        frame.to_csv(path, index=False)
        # As a user would; the folders alone are named, so that they go away again.
        columns = ["--client-column", "client", "--target-column", "y", "--quiet", *more]
        failed = _call("train", "--data", str(path), *columns, "--out", str(out))
        summary = RunFolder(out).summary() or {}
        if _call("choose", str(path), *columns, "--budget", budget, "--out", str(chosen)):
            raise RuntimeError(f"fedem choose failed on {name}, seed {seed}.")
        choice = json.loads((chosen / "choice.json").read_text())
        winner = RunFolder(chosen / "winner").summary() or {}
    metric = find_metric(choice["metric"])
    figure = f"test_{metric.name}"
    plain = {each["name"]: each for each in choice["finals"] if each["title"].startswith("reference")}
    return {
        "table": name,
        "seed": seed,
        "task": metric.task,
        "clients": int(frame["client"].nunique()),
        "rows": len(frame),
        "metric": metric.name,
        "fedem": summary.get(figure),
        "choose": winner.get(figure),
        "chosen": choice["winner"],
        "seconds": choice["seconds"],
        "references": {key: each[figure] for key, each in plain.items()},
        "to_the_winner": {key: each["to_the_winner"] for key, each in plain.items()},
        "diverged": failed or any(has_diverged(each) or each.get(figure) is None for each in (summary, winner)),
        "summary": {f"test_{each.name}": summary.get(f"test_{each.name}") for each in metrics_of(summary)},
    }


def _call(*words: str) -> bool:
    """Call ``fedem`` without what it prints; returns whether it failed."""
    sys.argv = ["fedem", *words]
    try:
        with redirect_stdout(StringIO()), redirect_stderr(sys.stderr):
            fedem()
    except SystemExit as stop:
        return bool(stop.code)
    return False


def _line(runs: Sequence[Record]) -> str:
    """Return the means over the seeds of one table as a line of Markdown."""
    first = runs[0]
    metric = find_metric(first["metric"])

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if len(known) == len(values) else None

    scores = {key: mean([each["references"][key] for each in runs]) for key in first["references"]}
    known = {key: value for key, value in scores.items() if value is not None}
    best = (max if metric.larger_is_better else min)(known, key=lambda key: known[key])
    gaps = [each["to_the_winner"][best] for each in runs]
    ahead = statistics.fmean(gap["mean"] for gap in gaps)
    error = math.sqrt(sum(gap["error"] ** 2 for gap in gaps)) / len(gaps)
    told = f"{metric.text(ahead, plain='.3f')} ±{metric.text(error, plain='.3f')}"
    marked = f"{first['table']}*" if first["table"] in CHOSEN_ON else first["table"]
    ours = [metric.text(mean([each[key] for each in runs]), plain=".3f") for key in ("fedem", "choose")]
    names = ", ".join(dict.fromkeys(each["chosen"].replace("_", " ") for each in runs))
    cells = [marked, str(first["clients"]), f"{first['rows']:,}", metric.unit, *ours, names]
    cells += [metric.text(value, plain=".3f") for value in scores.values()]
    diverged = sum(each["diverged"] for each in runs)
    return f"| {' | '.join([*cells, told, f'{diverged} of {len(runs)}'])} |"


if __name__ == "__main__":
    main()

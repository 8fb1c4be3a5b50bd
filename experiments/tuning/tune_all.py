"""Search every method's settings on one data set with the same budget: ``python experiments/tuning/tune_all.py DATA``.

Each method gets as many combinations as every other (grids.toml), by ``fedem tune``: chosen by validation, with the
test part unread. Methods whose search is over are left alone, so that the script goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

from fedem.cli import app
from fedem.core.errors import UserError
from fedem.methods import METHODS

HERE = Path(__file__).parent
GRIDS: dict[str, Any] = tomllib.loads((HERE / "grids.toml").read_text(encoding="utf-8"))


def _listed(values: list[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


def _words(data: str, method: str, seed: int) -> list[str]:
    """Return the command that searches a method's settings, but for where its runs go."""
    own = GRIDS["methods"][method] | GRIDS.get("instead", {}).get(data, {}).get(method, {})
    grids = {"schedule.learning_rate": GRIDS["rates"][data]["two" if own else "alone"], **own}
    words = ["tune", "--data", data, "--method", method, "--seeds", f"{seed},"]
    words += [word for key, values in grids.items() for word in ("--grid", f"{key}={_listed(values)}")]
    return words + [word for key, value in GRIDS["settings"][data].items() for word in ("--set", f"{key}={value}")]


def _single(data: str, method: str, seed: int, values: dict[str, Any]) -> list[str]:
    """Return the command that trains a method at full size with ``values``, and scores it by validation."""
    words = ["tune", "--data", data, "--method", method, "--seeds", f"{seed},"]
    words += [word for key, value in values.items() for word in ("--grid", f"{key}={value:g}")]
    return words + [word for key, value in GRIDS["full_size"][data].items() for word in ("--set", f"{key}={value}")]


def _finals(data: str, searches: dict[str, Any], methods: list[str], seed: int, runs: Path, kept: Path) -> None:
    """Train what was shipped before beside what was found, at full size, where the two differ."""
    finals = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    for method in methods:
        before = GRIDS["before"][data].get(method)
        if before is None or method in finals:
            continue
        entry: dict[str, Any] = {}
        for which, values in (("before", before), ("found", searches[method]["chosen"])):
            words, folder = _single(data, method, seed, values), runs / data / "full_size" / f"{method}-{which}"
            print("fedem", *words, flush=True)
            try:
                app([*words, "--out", str(folder), "--quiet"], standalone_mode=False)
            except UserError as error:
                print(f"{method}: {error}", flush=True)
            (trial,) = json.loads((folder / "tune.json").read_text(encoding="utf-8"))["trials"]
            entry[which] = {"values": values, **_scored(trial)}
        finals[method] = entry
        kept.write_text(json.dumps(finals, indent=1) + "\n", encoding="utf-8")


def _scored(trial: dict[str, Any]) -> dict[str, Any]:
    return {"diverged": True} if trial["error"] else {"accuracy": round(trial["mean"], 4)}


def _told(found: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """Return what is kept of a search: its command, its choice and every trial, the best first."""
    trials = [trial["values"] | _scored(trial) for trial in found["trials"]]
    return {
        "command": " ".join(["fedem", *words]),
        "chosen": found["chosen"],
        "edges": found["edges"],
        "trials": trials,
    }


def _table(searches: dict[str, Any]) -> str:
    """Return a Markdown table of what was found, the best method first, with a star at either end of many values."""

    def shown(key: str, search: dict[str, Any]) -> str:
        tried = sorted({trial[key] for trial in search["trials"]})
        value = search["chosen"][key]
        at_end = len(tried) > 2 and value in (tried[0], tried[-1])
        return f"{key.split('.')[1].replace('_', ' ')} {value:g}{'*' if at_end else ''}"

    lines = ["| method | chosen | validation accuracy | of trials, diverged |", "| --- | --- | ---: | ---: |"]
    for method, search in sorted(searches.items(), key=lambda item: -item[1]["trials"][0]["accuracy"]):
        trials, chosen = search["trials"], ", ".join(shown(key, search) for key in search["chosen"])
        diverged = f"{sum('diverged' in trial for trial in trials)} of {len(trials)}"
        lines.append(f"| {METHODS[method].title} | {chosen} | {100 * trials[0]['accuracy']:.1f} | {diverged} |")
    return "\n".join(lines)


def main() -> None:
    """Search one method after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", choices=GRIDS["settings"])
    parser.add_argument("--methods", nargs="*", default=list(GRIDS["methods"]), choices=GRIDS["methods"])
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--runs", type=Path, default=Path("runs/tuning"), help="where the runs go")
    parser.add_argument("--out", type=Path, default=HERE, help="the folder of DATA.json")
    parser.add_argument("--table", action="store_true", help="show what was found, and search nothing")
    parser.add_argument("--finals", action="store_true", help="train what was found beside what was shipped before")
    given = parser.parse_args()
    kept = given.out / f"{given.data}.json"
    searches = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    if given.table:
        print(_table(searches))
        return
    if given.finals:
        _finals(given.data, searches, given.methods, given.seed, given.runs, given.out / f"{given.data}-full-size.json")
        return
    for method in given.methods:
        words, folder = _words(given.data, method, given.seed), given.runs / given.data / method
        if method in searches:
            continue
        print("fedem", *words, flush=True)
        going_on = ["--resume"] if folder.exists() else []
        try:
            app([*words, "--out", str(folder), "--quiet", *going_on], standalone_mode=False)
        except UserError as error:
            print(f"{method}: {error}", flush=True)
            continue
        found = json.loads((folder / "tune.json").read_text(encoding="utf-8"))
        searches[method] = _told(found, words)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(searches, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

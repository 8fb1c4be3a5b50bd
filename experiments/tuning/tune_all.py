"""Search every method's settings on one data set with the same budget: ``python experiments/tuning/tune_all.py DATA``.

Each method gets the combinations of grids.toml, by ``fedem tune``: chosen by validation, the test part unread. Methods
that are done are left alone, so that the script goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import shutil
import tomllib
from pathlib import Path

from fedem.cli import app
from fedem.core.errors import UserError

GRIDS = tomllib.loads(Path(__file__).with_name("grids.toml").read_text(encoding="utf-8"))


def _listed(values: list[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


def main() -> None:
    """Search one method after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", choices=GRIDS["settings"])
    parser.add_argument("--methods", nargs="*", default=list(GRIDS["methods"]), choices=GRIDS["methods"])
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--runs", type=Path, default=Path("runs/tuning"), help="where the runs go")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where each search's tune.json goes")
    given = parser.parse_args()
    for method in given.methods:
        result, folder = given.out / given.data / f"{method}.json", given.runs / given.data / method
        if result.exists():
            continue
        own = GRIDS["methods"][method]
        rates = GRIDS["rates"]["two" if own else "alone"]
        grids = {"schedule.learning_rate": rates, **own}
        words = ["tune", "--data", given.data, "--method", method, "--seeds", f"{given.seed},", "--out", str(folder)]
        words += [word for key, values in grids.items() for word in ("--grid", f"{key}={_listed(values)}")]
        words += [word for key, value in GRIDS["settings"][given.data].items() for word in ("--set", f"{key}={value}")]
        print("fedem", *words, flush=True)
        try:
            app([*words, "--quiet", *(["--resume"] if folder.exists() else [])], standalone_mode=False)
        except UserError as error:
            print(f"{method}: {error}", flush=True)
            continue
        result.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / "tune.json", result)


if __name__ == "__main__":
    main()

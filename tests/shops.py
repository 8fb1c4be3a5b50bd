"""A table as a user might have it: twelve shops of two kinds, some days each."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

COLUMNS = ("shop", "weekday", "price", "temperature", "promotion", "sold")
NAMES = tuple(f"shop {letter}" for letter in "ABCDEFGHIJKL")
WEEKDAYS = ("Friday", "Monday", "Saturday")

Row = dict[str, object]


def make_shops(rows: int = 40, seed: int = 0, names: tuple[str, ...] = NAMES) -> list[Row]:
    """Rows of all shops, mixed: every second shop sells more when it is warm, the others when it is cold."""
    rng = np.random.default_rng(seed)
    made: list[Row] = []
    for position, name in enumerate(names):
        for _ in range(rows):
            weekday, price, temperature = rng.integers(3), rng.uniform(2, 5), rng.normal(15, 8)
            promotion = bool(rng.random() < 0.3)
            warmth = (temperature - 15) / 8 * (1 if position % 2 == 0 else -1)
            demand = 2 * warmth - (price - 3.5) + 0.8 * promotion + 0.6 * (weekday == 2) + 0.3 * rng.normal()
            made.append(
                {
                    "shop": name,
                    "weekday": WEEKDAYS[weekday],
                    "price": round(float(price), 2),
                    "temperature": round(float(temperature), 1),
                    "promotion": str(promotion).lower(),
                    "sold": ("few", "some", "many")[int(np.digitize(demand, [-1, 1.2]))],
                    "units": max(0.0, round(60 + 25 * float(demand), 1)),
                }
            )
    return [made[row] for row in rng.permutation(len(made))]


def write_shops(path: Path, rows: list[Row], columns: tuple[str, ...] = COLUMNS) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([row[name] for name in columns] for row in rows)
    return path

"""The answer that a report opens with: which method is best, by how much, and who is worse off with it."""

from collections.abc import Iterator, Mapping

import numpy as np

from fedem.core.errors import counted
from fedem.report.runs import Gathered
from fedem.studies.sweep import Gap

PLAIN = ("local", "fedavg")  # training alone, and one model for all
_NAMED = 10  # clients at most


def answer(data: Gathered) -> str:
    """Return a paragraph: the best method against the next and the plain ones, over the seeds and over the clients."""
    return " ".join(_sentences(data))


def _sentences(data: Gathered) -> Iterator[str]:
    scored = {row.method: row.figures[data.score].mean for row in data.comparison.rows}
    ranked = [method for method, mean in scored.items() if mean is not None]
    if ranked:
        best, rivals = ranked[0], ranked[1:2]
        plain = [name for name in map(data.best_of, PLAIN) if name in ranked and name != best]
        gained = {name: gains(data, best, name) for name in dict.fromkeys([*rivals, *plain])}
        level = any(_is_level(data, best, name, gained[name]) for name in rivals)
        rank = "No method is clearly the best; the highest average has" if level else "The best method is"
        if level and not data.metric.larger_is_better:
            rank = rank.replace("highest", "lowest")
        rank = rank if rivals else "The only method with scores is"
        seeds = counted(len(data.runs[best]), "seed")
        yield f"{rank} {data.name(best)}: {data.metric.title} {data.in_words(scored[best])}, mean over {seeds}."
        for name, own in gained.items():
            yield _against(data, best, name, own, "the next, " if name in rivals else "")
        for name in plain:
            yield from _worse_off(data, name, gained[name])
    else:
        yield "These runs have no test scores by which methods could be compared."
    if failed := [each.title for each in data.comparison.failed]:
        yield f"Failed, and so not ranked: {', '.join(failed)}."


def gains(data: Gathered, method: str, other: str) -> dict[str, float]:
    """Return how much better off each client is with a method than with another, a mean over the seeds both have.

    Where a seed deals other samples to a name, these are other clients, and each is named with its seed.
    """
    sign = 1 if data.metric.larger_is_better else -1
    sizes: dict[str, set[float]] = {}
    scores: dict[str, dict[tuple[str, int], float]] = {method: {}, other: {}}
    for entry, own in scores.items():
        for run in data.runs[entry]:
            for name, size, score in zip(run.clients.names, run.clients.sizes, run.clients.scores, strict=True):
                sizes.setdefault(name, set()).add(float(size))
                own[name, run.seed] = float(score)
    are_same = all(len(found) == 1 for found in sizes.values())
    found: dict[str, list[float]] = {}
    for (name, seed), score in scores[method].items():
        gain = sign * (score - scores[other].get((name, seed), np.nan))
        if np.isfinite(gain):
            found.setdefault(name if are_same else f"{name} (seed {seed})", []).append(gain)
    return {name: float(np.mean(each)) for name, each in found.items()}


def _over_seeds(data: Gathered, method: str, other: str) -> Gap:
    """Return how much better the average of a method is than another's, paired by seed."""
    sign = 1 if data.metric.larger_is_better else -1
    ours, theirs = (
        {run.seed: None if (score := run.summary.get(data.score)) is None else sign * score for run in data.runs[name]}
        for name in (method, other)
    )
    return Gap.of(ours, theirs)


def _over_clients(gained: Mapping[str, float]) -> Gap:
    return Gap.of(gained, dict.fromkeys(gained, 0.0))


def _is_level(data: Gathered, method: str, other: str, gained: Mapping[str, float]) -> bool:
    """Whether a 95 % interval, over the seeds or over the clients, does not exclude that the other is as good."""
    found = (_over_seeds(data, method, other).interval, _over_clients(gained).interval)
    return any(interval is not None and interval[0] <= 0 for interval in found)


def _against(data: Gathered, best: str, other: str, gained: Mapping[str, float], which: str) -> str:
    seeds, clients = _over_seeds(data, best, other), _over_clients(gained)
    word = "level with" if _is_level(data, best, other, gained) else "ahead of"
    text = f"It is {word} {which}{data.name(other)}"
    if seeds.mean is not None:
        text += f": {_amount(data, seeds.mean)} better on average ({_interval(data, seeds, 'seed')})"
    if gained:
        better = sum(gain > 0 for gain in gained.values())
        text += f", and better for {better:,} of {counted(len(gained), 'client')}"
        text += f", {_amount(data, clients.mean or 0.0)} in their mean ({_interval(data, clients, 'client')})"
    return text + "."


def _interval(data: Gathered, gap: Gap, what: str) -> str:
    if gap.interval is None:
        return f"one {what}, so no interval"
    low, high = (data.metric.text(value, "+.2f", "+.3g") for value in gap.interval)
    return f"95 % interval over {counted(gap.num_seeds, what)}: {low} to {high}"


def _amount(data: Gathered, gain: float) -> str:
    return data.metric.text(gain, ".2f", ".3g") + (" points" if data.metric.in_percent else "")


def _worse_off(data: Gathered, other: str, gained: Mapping[str, float]) -> Iterator[str]:
    losers = sorted((name for name, gain in gained.items() if gain < 0), key=lambda name: gained[name])
    if losers:
        most = f"; the {_NAMED} that lose most: " if len(losers) > _NAMED else ": "
        number = f"{len(losers):,} of {counted(len(gained), 'client')}"
        yield f"Worse off than with {data.name(other)}: {number}{most}{', '.join(losers[:_NAMED])}."
    elif gained:
        yield f"No client is worse off than with {data.name(other)}."

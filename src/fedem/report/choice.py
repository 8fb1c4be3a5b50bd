"""What ``fedem choose`` prints: the clients, what was tried, and how the winner compares."""

from collections.abc import Iterator

import numpy as np
import torch
from rich.console import RenderableType

from fedem.core.errors import counted
from fedem.data.dataset import Dataset
from fedem.data.federation import PARTS, Federation
from fedem.report.console import simple_table
from fedem.report.described import between_share, describe, total_variation
from fedem.studies.choice import Choice, told

_LISTED = 8  # candidates of a rung


def clients_sentences(dataset: Dataset) -> Iterator[str]:
    """Say how many clients there are, how large, and how much they differ in targets and inputs."""
    federation, found = dataset.federation, describe(dataset, "")
    sizes = found.sizes.sum(1)
    rows = f"{sizes.min():,} to {sizes.max():,} rows each, {np.median(sizes):,.0f} in the median"
    yield f"{counted(federation.num_clients, 'client')} with {rows}."
    # Clients that are alike differ a little all the same.
    chance = f"{100 * (federation.num_clients - 1) / (int(sizes.sum()) - 1):.0f}% by chance"
    if found.counts is not None:
        moved = total_variation(found.counts)
        yield f"Labels: on average {100 * moved:.0f}% of a client's would have to change for the shares of all clients."
    else:
        assert found.between is not None
        yield f"Targets: {100 * found.between:.0f}% of their variance is between clients ({chance})."
    if (share := feature_share(federation)) is not None:
        yield f"Inputs: {100 * share:.0f}% of their variance is between clients ({chance})."


def feature_share(federation: Federation) -> float | None:
    """Return the share of the inputs' variance between clients, a mean over the inputs that vary; None for words."""
    parts = [federation.part(part) for part in PARTS]
    inputs = torch.cat([part.inputs for part in parts])
    if not inputs.is_floating_point():
        return None
    owners = np.concatenate([np.repeat(np.arange(federation.num_clients), part.sizes.numpy()) for part in parts])
    columns = inputs.flatten(1).double().numpy().T
    shares = [between_share(column, owners) for column in columns if column.std() > 0]
    return float(np.mean(shares)) if shares else None


def choice_pages(choice: Choice) -> Iterator[RenderableType]:
    """Return what was tried in each rung, and what the test part says of the winner."""
    metric = choice.metric
    for rung in choice.rungs:
        scored = [tried for tried in rung if tried.scores]
        dealt = counted(len(scored[0].scores), "dealing")
        rows = [
            (tried.candidate.title, metric.text(tried.mean, plain=".3f"), f"{tried.seconds:.1f}")
            for tried in scored[:_LISTED]
        ]
        more = f", the first {_LISTED}" if len(scored) > _LISTED else ""
        heading = f"{counted(len(rung), 'candidate')}{more}: {counted(rung[0].rounds, 'round')}, {dealt} of the samples"
        yield simple_table("candidate", f"validation {metric.unit}", "seconds", rows=rows, title=heading)
        for tried in rung:
            if tried.failure:
                yield f"{tried.candidate.title}: failed. {tried.failure}"
    if choice.untried:
        yield f"Not tried for want of time: {', '.join(each.title for each in choice.untried)}."
    if choice.finals:
        rows = [
            (
                each.title,
                choice.shown.text(each.test, plain=".3f"),
                "" if each.to_the_winner is None else told(each.to_the_winner, choice.shown),
            )
            for each in choice.finals
        ]
        title = "On the test part, which took no part in the choice; the winner first"
        yield simple_table("", f"test {choice.shown.unit}", "better than the winner by", rows=rows, title=title)
        yield "Differences are paired by client, with their standard errors; below 0 the winner is better."
    yield from choice.notes
    yield choice.reason


def choice_markdown(choice: Choice, command: str) -> str:
    """Return the reason and the test table as Markdown."""
    metric = choice.shown
    lines = ["# What these clients should use", "", choice.reason, "", "```", command, "```", ""]
    lines += [f"| | test {metric.unit} | better than the winner by |", "| --- | ---: | ---: |"]
    for each in choice.finals:
        gap = "" if each.to_the_winner is None else told(each.to_the_winner, metric)
        lines.append(f"| {each.title} | {metric.text(each.test, plain='.3f')} | {gap} |")
    return "\n".join([*lines, ""])

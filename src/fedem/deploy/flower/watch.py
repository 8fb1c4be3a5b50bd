"""What a server notices of its clients' answers: figures that can't be, uploads unlike the others', and who repeats it.

An answer that is noticed is left out of its round. A client is noticed by the node that it answers from, which Flower
knows by its key: a name is only what a node says of itself.
"""

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedem.core.errors import UserError, counted
from fedem.core.tree import Tree, tree_double, tree_flat, tree_map, tree_to
from fedem.deploy.flower.messages import Reply
from fedem.deploy.plan import Plan, RunConfig
from fedem.models.metrics import METRICS
from fedem.runs.evaluate import Record

log = logging.getLogger("flwr")  # whose lines are shown while a run is followed

_ROUNDING = 1e-3  # of a mean: what numbers of few bits may be beyond a bound
_FEWEST = 3  # answers of which one can be told to be unlike the others
_FEW = 10  # samples: where clients have fewer, one with some thousands is nothing strange
_GROWTH = 2.0  # times, by which what is usual may grow in a round
_FAR = 1000.0  # times what the others' scores are, or times 1 where theirs are below


def check_scores(plan: Plan, answer: Reply) -> None:
    """Refuse sums that no samples have: a mean loss or value out of its bounds, or another n_t than the answer's."""
    loss, metric = plan.model.loss, METRICS[plan.model.loss.metric]
    bounds = {"loss": (loss.lowest(plan.format.outputs), math.inf), "value": metric.bounds}
    for part, sums in answer.scores.items():
        if part == "train" and sums.samples != answer.num_samples:
            said = f"its scores are of {sums.samples} training samples"
            raise UserError(f"Client {answer.client!r} is refused: {said}; allowed: {answer.num_samples}, as it says.")
        for key, (least, most) in bounds.items():
            mean = getattr(sums, key) / sums.samples
            if not least - _slack(least) <= mean <= most + _slack(most):
                said = f"its {part}_{key} is {getattr(sums, key):g} over {counted(sums.samples, 'sample')}"
                allowed = f"a mean of at least {least:g}" + (f" and at most {most:g}" if math.isfinite(most) else "")
                raise UserError(f"Client {answer.client!r} is refused: {said}; allowed: {allowed}.")


def _slack(bound: float) -> float:
    return _ROUNDING * max(1.0, abs(bound)) if math.isfinite(bound) else 0.0


class Comparison(NamedTuple):
    """An upload beside those of the same round."""

    norm: float
    """of what it would change in u if it were the only one"""
    cosine: float | None
    """between that and the mean of the others; None where there is no other, or one of the two is zero"""


def compare(plan: Plan, shared: Tree, uploads: Sequence[Tree]) -> list[Comparison]:
    """Compare uploads with each other, by the steps d_t that the server would take from u by each of them alone.

    In the mean of the others no step is longer than the median one: a single long one would else be all of that mean,
    and everybody else its opposite. One that is not finite is infinitely long, and in no mean.
    """
    # Steps are computed thrice, and not kept: together they are as large as all uploads.
    norms = [float(_step(plan, shared, upload).norm()) for upload in uploads]
    norms = [norm if math.isfinite(norm) else math.inf for norm in norms]
    median = statistics.median(norms) if norms else 0.0

    def clipped(upload: Tree, norm: float) -> Tensor:
        step = _step(plan, shared, upload)
        return step * min(1.0, median / norm) if 0 < norm < math.inf else torch.zeros_like(step)

    total = sum((clipped(upload, norm) for upload, norm in zip(uploads, norms, strict=True)), torch.zeros(()))
    found = []
    for upload, norm in zip(uploads, norms, strict=True):
        own = clipped(upload, norm)
        others = total - own
        length = float(own.norm()) * float(others.norm())
        cosine = max(-1.0, min(1.0, float(own @ others) / length)) if 0 < length < math.inf else None
        found.append(Comparison(norm, cosine))
    return found


def _step(plan: Plan, shared: Tree, upload: Tree) -> Tensor:
    """Return what u would change by if this upload were the only one, all its numbers in one vector."""
    algorithm, codec, message = plan.algorithm, plan.codec, tree_to(upload, plan.device)
    summand = algorithm.summand(message) if codec is None else tree_map(torch.add, shared, codec.decode(message))
    after = algorithm.update(shared, summand, share=1.0)
    step = tree_flat(tree_double(after)) - tree_flat(tree_double(shared))
    is_number = not any(bool(leaf.isnan().any()) for leaf in summand.values())
    return step if is_number else torch.full_like(step, math.nan)


class Watch:
    """Who was noticed, how often in a row, and who is set aside for it.

    A round in which an answer of a node was left out is a strike, one in which all were good takes the strikes back,
    and one in which it was not asked, or did not answer, changes nothing. With ``strikes`` of them in a row the node is
    set aside, and so is the client's name: nothing is asked of it any more.
    """

    def __init__(self, run: RunConfig, kept: Mapping[str, Any]):
        self._run = run
        self.aside: dict[int, str] = {int(node): name for node, name in kept.get("aside", {}).items()}
        self._strikes: dict[int, int] = {int(node): count for node, count in kept.get("strikes", {}).items()}
        self._scale = float(kept.get("scale", 0.0))  # about the largest median norm of a round's uploads so far
        self._counts: dict[int, dict[str, int]] = {}  # samples of each part, as each node said last
        self._losses: dict[int, float] = {}  # mean training losses when clients were scored last
        self._begin()

    def _begin(self) -> None:
        self._faults: dict[int, tuple[str, str]] = {}  # of this round, the last of each node: what, and in words
        self._answered: set[int] = set()
        self._compared: dict[int, Comparison] = {}
        self._changes: dict[int, float] = {}

    def to_json(self) -> Record:
        """Return what a continued run must know; of clients there are hashes of names alone."""
        return {"aside": self.aside, "strikes": self._strikes, "scale": self._scale}

    def takes(self, node: int, name: str = "") -> bool:
        """Whether a node, or a client by the hash of its name, is not set aside; whoever has such a name is."""
        if node not in self.aside and name and name in self.aside.values():
            log.warning("Node %d has a client that is set aside, and is set aside with it.", node)
            self.aside[node] = name
        return node not in self.aside

    def readmit(self, words: str, hashed: Callable[[str], str]) -> None:
        """Take back in those named, by clients' names or nodes' numbers with commas between them."""
        for word in filter(None, map(str.strip, words.split(","))):
            found = [node for node, name in self.aside.items() if word == str(node) or name == hashed(word)]
            if not found:
                there = ", ".join(map(str, self.aside)) or "none"
                log.warning("Nobody is set aside as %r (readmit); nodes that are: %s.", word, there)
            for node in found:
                log.info("Node %d takes part again (readmit).", node)
                del self.aside[node]
                self._strikes.pop(node, None)

    def notice(self, node: int, what: str, words: object) -> None:
        """Say and remember that an answer of a node is left out: ``what`` is wrong in a word, and in words."""
        log.warning("%s", words)
        self._faults[node] = what, str(words)

    def plausible(self, answers: Mapping[int, Reply], known: Mapping[int, int]) -> dict[int, Reply]:
        """Return the answers by node without those whose n_t, or whose scores, are far beyond what the others say.

        ``known`` are the numbers of samples of other nodes. Numbers that differ from the node's last ones are noted.
        """
        sizes = dict(known) | {node: answer.num_samples for node, answer in answers.items()}
        most, limit = self._run.max_samples or math.inf, f"max-samples {self._run.max_samples:,}"
        if self._run.max_ratio and len(sizes) >= _FEWEST:
            typical = max(_FEW, statistics.median(sizes.values()))
            if self._run.max_ratio * typical < most:
                most = self._run.max_ratio * typical
                limit = f"{most:,.0f}, max-ratio {self._run.max_ratio:g} times what is usual here"
        good = {}
        for node, answer in answers.items():
            if answer.num_samples > most:
                said = f"its number of samples is {answer.num_samples:,}; allowed: {limit}"
                self.notice(node, "samples", f"Client {answer.client!r} is refused: {said}.")
            else:
                good[node] = answer
                self._note_counts(node, answer)
        return self._without_far_scores(good)

    def _note_counts(self, node: int, answer: Reply) -> None:
        counts = {part: sums.samples for part, sums in answer.scores.items()} | {"train": answer.num_samples}
        before = self._counts.setdefault(node, {})
        for part, count in counts.items():
            if (earlier := before.get(part, count)) != count:
                changed = f"{count:,} samples of {part}, and had {earlier:,} before"
                log.warning("Client %r has %s; a client's data should not change in a run.", answer.client, changed)
        before |= counts

    def _without_far_scores(self, answers: dict[int, Reply]) -> dict[int, Reply]:
        good = dict(answers)
        for part in {part: None for answer in answers.values() for part in answer.scores}:
            there = {node: answer.scores[part] for node, answer in answers.items() if part in answer.scores}
            for key in ("loss", "value") if len(there) >= _FEWEST else ():
                means = {node: getattr(sums, key) / sums.samples for node, sums in there.items()}
                most = _FAR * max(1.0, abs(statistics.median(means.values())))
                for node in [node for node in good if abs(means.get(node, 0.0)) > most]:
                    said = f"its mean {part}_{key} is {means[node]:g}; allowed: {most:g}, {_FAR:,.0f} times the usual"
                    self.notice(node, "scores", f"Client {answers[node].client!r} is refused: {said}.")
                    del good[node]
        return good

    def alike(self, plan: Plan, shared: Tree, answers: Mapping[int, Reply], steps: Tensor) -> dict[int, Reply]:
        """Return the answers by node without those whose uploads are unlike the others', by norm or direction.

        ``steps`` ``[C]`` is how many local steps each client takes: with more of them it may come further. What is
        usual is the largest median norm of a round so far, since clients that have learnt all there is hardly move.
        """
        found = compare(plan, shared, [answer.upload for answer in answers.values()])
        self._compared = dict(zip(answers, found, strict=True))
        if len(answers) < _FEWEST:
            return dict(answers)
        median = statistics.median(entry.norm for entry in found)
        usual = max(self._scale, median) if math.isfinite(median) else self._scale
        # A cohort whose majority is hostile, as some may be by chance, must not raise it for good.
        self._scale = min(usual, _GROWTH * self._scale) if self._scale else usual
        further = (steps / steps.double().median()).clamp(min=1).tolist()
        good, least = {}, self._run.min_cosine
        for (node, answer), entry, more in zip(answers.items(), found, further, strict=True):
            most = self._run.max_norm * usual * more or math.inf
            if not entry.norm <= most:
                said = f"its update has norm {entry.norm:.4g}; allowed: {most:.4g} (max-norm {self._run.max_norm:g})"
                self.notice(node, "norm", f"Client {answer.client!r} is left out: {said}.")
            elif entry.cosine is not None and entry.cosine < least:
                said = f"its update has cosine {entry.cosine:.3f} to the others; allowed: min-cosine {least:g}"
                self.notice(node, "cosine", f"Client {answer.client!r} is left out: {said}.")
            else:
                good[node] = answer
        return good

    def heard(self, answers: Mapping[int, Reply]) -> None:
        """Remember who gave good answers, and by how much their mean training losses changed since the last scores."""
        self._answered |= set(answers)
        for node, answer in answers.items():
            if sums := answer.scores.get("train"):
                loss = sums.loss / sums.samples
                if node in self._losses:
                    self._changes[node] = loss - self._losses[node]
                self._losses[node] = loss

    def close_round(self, name_at: Callable[[int], str]) -> Record:
        """Count strikes and set repeat offenders aside; returns the round's record, by hashes of clients' names."""
        set_aside = []
        for node in sorted(self._answered | set(self._faults)):
            if node not in self._faults:
                self._strikes.pop(node, None)
                continue
            strikes = self._strikes[node] = self._strikes.get(node, 0) + 1
            if self._run.strikes and strikes >= self._run.strikes and node not in self.aside:
                self.aside[node] = name_at(node)
                set_aside.append(node)
                rounds = f"answers of {counted(strikes, 'round')} in a row were left out, the last since: "
                mend = f"continue=true readmit='{node}' takes it back in."
                log.warning("Node %d is set aside: %s%s %s", node, rounds, self._faults[node][1], mend)
        uploads = []
        for node in sorted({*self._compared, *self._faults, *self._changes}):
            entry: Record = {"client": name_at(node) or f"node {node}"}
            if compared := self._compared.get(node):
                entry |= compared._asdict()
            if node in self._changes:
                entry["loss_change"] = self._changes[node]
            if node in self._faults:
                entry |= {"left_out": self._faults[node][0], "strikes": self._strikes[node]}
            uploads.append(entry | ({"set_aside": True} if node in set_aside else {}))
        self._begin()
        return {"uploads": uploads}

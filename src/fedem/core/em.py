"""The mathematics of the mixture: E-step, weights, likelihood, prediction (Prop. 2 of the paper).

Everything is in log-space: weights underflow once a client settles on one component.
Shapes: M components, n samples, K classes, c clients fitted together; components come before samples, as in the stacked
components themselves.
"""

import math
from typing import Any

import torch
from torch import Tensor

_LEAST = 1e-300  # a weight that still has a logarithm
_RARE = 1e-200  # a likelihood that can still be divided by, beside that of the best component
_EDGE = 1e-3  # weights below may count as lying on the simplex's edge
_MOST_NEWTON_STEPS, _MOST_HALVINGS = 1000, 30
_TOLERANCE = 1e-6  # how far the mean log-likelihood may provably be from its maximum at convergence


def log_responsibilities(losses: Tensor, log_weights: Tensor, sharpness: float = 1.0) -> Tensor:
    """E-step: log q(z = m), with q(z = m) proportional to pi_m exp(-s loss_m) (Eq. 4 where s = 1).

    ``losses`` are negative log-likelihoods ``[M, n]``, where infinite ones count as the largest finite number, and
    ``log_weights`` are ``[M]``; s is the ``sharpness``. Returns ``[M, n]``: each column's exponentials sum to one.

    >>> log_responsibilities(torch.tensor([[1e30], [1e30]]), torch.tensor([0.25, 0.75]).log()).exp().flatten()
    tensor([0.2500, 0.7500])
    """
    _, relative = _from_least(losses)
    return torch.log_softmax(log_weights[:, None] - _finite(sharpness * relative), dim=0)


def _from_least(losses: Tensor) -> tuple[Tensor, Tensor]:
    """Each sample's least loss ``[n]``, and the losses from there ``[M, n]``: a large common part swallows weights."""
    finite = _finite(losses)
    least = finite.amin(dim=0)
    return least, finite - least


def _finite(losses: Tensor) -> Tensor:
    """Bound infinite losses by a quarter of the range: differences and sums with weights then stay finite."""
    return losses.clamp(max=torch.finfo(losses.dtype).max / 4)


def update_log_weights(log_responsibilities: Tensor, mask: Tensor) -> Tensor:
    """First half of the M-step: pi_m = mean over samples of q(z = m) (Eq. 5), in log-space.

    ``[M, n] -> [M]``; the ``mask`` ``[n]`` is true where there is a sample, of which there is at least one.

    >>> update_log_weights(torch.tensor([[0.5, 1.0], [0.5, 0.0]]).log(), torch.tensor([True, True])).exp()
    tensor([0.7500, 0.2500])
    """
    totals = torch.logsumexp(log_responsibilities.masked_fill(~mask, -math.inf), dim=1)
    return torch.log_softmax(totals, dim=0)


def negative_log_likelihood(losses: Tensor, log_weights: Tensor, sharpness: float = 1.0) -> Tensor:
    """-1/s log sum_m pi_m exp(-s loss_m) of each sample, ``[M, n], [M] -> [n]``.

    With s = 1 their mean is the paper's f. It lies between the losses' mean by the weights (s near 0) and the least
    loss (s large), and falls with s.

    >>> losses, weights = torch.tensor([[1.0], [3.0]]), torch.tensor([0.5, 0.5]).log()
    >>> [round(float(negative_log_likelihood(losses, weights, s)), 2) for s in (0.01, 1.0, 100.0)]
    [2.0, 1.57, 1.01]
    """
    least, relative = _from_least(losses)
    return least - torch.logsumexp(log_weights[:, None] - _finite(sharpness * relative), dim=0) / sharpness


def mix(predictions: Tensor, log_weights: Tensor) -> Tensor:
    """Average the components' probabilities (or means), never their logits (Eq. 2). ``[M, n, K], [M] -> [n, K]``."""
    return torch.einsum("m,mnk->nk", log_weights.exp(), predictions)


def uniform_log_weights(num_components: int, like: Tensor) -> Tensor:
    """Log of the uniform mixture weights, ``[M]``, in ``like``'s type and on its device."""
    return like.new_full((num_components,), -math.log(num_components))


def fit_log_weights(
    losses: Tensor, max_iterations: int | None = None, prior: float = 0.0, mask: Tensor | None = None
) -> Tensor:
    """Fit one client's mixture weights with the components fixed, from uniform: ``losses [M, n] -> log weights [M]``.

    ``torch.func.vmap`` fits many clients together, each as it would be alone.

    Args:
        losses: with no samples the weights stay uniform.
        max_iterations: updates of EM, one being the paper's rule for unseen clients; None for convergence.
        prior: pseudo-count, shared equally by the components, where it converges: the mode under a Dirichlet
            distribution of 1 + prior / M. 0 is the greatest likelihood, for a single sample one component alone.
        mask: ``[n]``, false where a column is padding; one at least is none. None where there is no padding.

    >>> one_sample = torch.tensor([[0.0], [5.0]])
    >>> [round(float(fit_log_weights(one_sample, prior=prior)[0].exp()), 2) for prior in (0, 1, 1000)]
    [1.0, 0.75, 0.5]
    """
    log_weights = uniform_log_weights(len(losses), losses).double()
    if losses.shape[1] == 0:
        return log_weights.to(losses.dtype)
    doubles = losses.double()
    if mask is None:
        mask = torch.ones_like(losses[0], dtype=torch.bool)
    if max_iterations is None:
        solver: Any = _Converged  # whose ``apply`` torch leaves untyped
        fitted: Tensor = solver.apply(doubles, mask, prior)
        return fitted.to(losses.dtype)
    for _ in range(max_iterations):
        log_weights = update_log_weights(log_responsibilities(doubles, log_weights), mask)
    return log_weights.to(losses.dtype)


def fit_leaving_out(losses: Tensor, mask: Tensor, prior: float = 1.0, updates: int = 40) -> Tensor:
    """Fit one client's mixture weights with all components and without each: ``losses [M, n] -> log [1 + M, M]``.

    ``mask`` and ``prior``, above 0, are as in :func:`fit_log_weights`. All are fitted together by so many updates of
    EM, two products of matrices each. The first row is from uniform weights, the others from the first one's, of which
    the component left out gives its own to the others alike, and has none. With M = 1 nobody has any then.

    >>> fit_leaving_out(torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([True, True])).exp()
    tensor([[0.5000, 0.5000],
            [0.0000, 1.0000],
            [1.0000, 0.0000]])
    """
    count, finite = len(losses), _finite(losses.double())
    likelihoods = (finite.amin(0) - finite).exp().clamp(min=_RARE) * mask

    def fitted(weights: Tensor) -> Tensor:
        there = (weights > 0).to(weights)
        pseudo = prior * there / there.sum(1, keepdim=True).clamp(min=1)
        for _ in range(updates):
            ratios = 1 / (weights @ likelihoods).clamp(min=_RARE**1.5)
            weights = (weights * (ratios @ likelihoods.mT) + pseudo) / (mask.to(weights).sum() + prior)
        return weights

    whole = fitted(finite.new_full((1, count), 1 / count))
    others = 1 - torch.eye(count, dtype=whole.dtype, device=whole.device)
    left = fitted(others * (whole + whole.mT / max(1, count - 1)))
    return torch.cat([whole, left]).to(losses.dtype).log()


class _Converged(torch.autograd.Function):
    """The most likely log weights; vmap's clients are handed to one solver, since each stops at its own step."""

    @staticmethod
    def forward(losses: Tensor, mask: Tensor, prior: float) -> Tensor:
        return _converge(losses[None], mask[None], prior)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], losses: Tensor, mask: Tensor, prior: float) -> Any:
        def stacked(leaf: Tensor, dim: int | None) -> Tensor:
            return leaf.expand(info.batch_size, *leaf.shape) if dim is None else leaf.movedim(dim, 0)

        return _converge(stacked(losses, in_dims[0]), stacked(mask, in_dims[1]), prior), 0


def _converge(losses: Tensor, mask: Tensor, prior: float) -> Tensor:
    """Maximise clients' likelihoods in their weights by projected Newton steps; where one fails, EM goes on.

    ``losses [c, M, n], mask [c, n] -> log weights [c, M]``. The problem is concave, its optimum often at the simplex's
    edge; there, or where components are alike, EM takes thousands of updates. Without the constraint that weights sum
    to one, -mean log(w P) + sum(w) over w >= 0 has the same minimum, and only bounds are left (Bertsekas 1982). The
    prior's samples are like others, by their counts. Each client stops by itself, and is then left out.
    """
    num_clients, num_components, _ = losses.shape
    finite = _finite(losses)
    # P, up to a factor a sample: the best component has one. So have all where there is no sample.
    likelihoods = (finite.amin(1, keepdim=True) - finite).exp().masked_fill(~mask[:, None], 1)
    counts = mask.to(losses.dtype)
    if prior:
        certain = torch.eye(num_components, dtype=losses.dtype, device=losses.device).expand(num_clients, -1, -1)
        likelihoods = torch.cat([likelihoods, certain], dim=2)
        counts = torch.cat([counts, counts.new_full((num_clients, num_components), prior / num_components)], dim=1)
    shares = counts / counts.sum(1, keepdim=True)
    weights = torch.full_like(likelihoods[:, :, 0], 1 / num_components)
    found, left = torch.empty_like(weights), torch.arange(num_clients, device=losses.device)

    def objective(candidates: Tensor, some: Tensor | slice = slice(None)) -> Tensor:
        return candidates.sum(1) - (shares[some] * _mixed(candidates, likelihoods[some]).log()).sum(1)

    for _ in range(_MOST_NEWTON_STEPS):
        scaled = likelihoods / _mixed(weights, likelihoods)[:, None]
        weighted = scaled * shares[:, None]
        ratios = weighted.sum(2)
        # By concavity no weights are better by more than this (Lindsay 1983).
        gap = ratios.amax(1) - 1
        going = gap > _TOLERANCE
        if not bool(going.all()):
            found[left[~going]] = weights[~going]
            left, weights, likelihoods, shares, scaled, weighted, ratios, gap = (
                each[going] for each in (left, weights, likelihoods, shares, scaled, weighted, ratios, gap)
            )
            if not len(left):
                break
        step = _direction(weights, ratios, gap, weighted @ scaled.mT)
        value, following, trying = objective(weights), weights * ratios, torch.arange(len(left), device=left.device)
        for halvings in range(_MOST_HALVINGS):
            trials = (weights[trying] + 0.5**halvings * step[trying]).clamp(min=0)
            better = objective(trials, trying) < value[trying]
            following[trying[better]] = trials[better]
            trying = trying[~better]
            if not len(trying):
                break
        weights = following / following.sum(1, keepdim=True)  # which only improves the objective
    found[left] = weights
    return found.clamp(min=_LEAST).log()


def _mixed(weights: Tensor, likelihoods: Tensor) -> Tensor:
    """Each sample's likelihood under the mixture, ``[c, M], [c, M, n] -> [c, n]``."""
    return (weights[:, None] @ likelihoods)[:, 0]


def _direction(weights: Tensor, ratios: Tensor, gap: Tensor, curvature: Tensor) -> Tensor:
    """Return Newton's direction in the components that are not at the edge; to zero in those that do not help there.

    ``weights`` and ``ratios`` are ``[c, M]``, ``gap`` is ``[c]`` and ``curvature`` ``[c, M, M]``. Returns ``[c, M]``.
    """
    free = (weights > gap.clamp(max=_EDGE)[:, None]) | (ratios >= 1)
    # Damped by what is still to gain: components that are alike make the curvature singular.
    diagonal = curvature.diagonal(dim1=1, dim2=2)
    damping = gap * (diagonal * free).sum(1) / free.sum(1)
    kept = free[:, :, None] & free[:, None, :]
    system = torch.where(kept, curvature, 0) + torch.diag_embed(torch.where(free, damping[:, None], 1))
    solved = torch.linalg.solve(system, torch.where(free, ratios - 1, 0))
    return torch.where(free, solved, -weights)

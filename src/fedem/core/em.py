"""The mathematics of the mixture: E-step, weights, likelihood, prediction (Prop. 2 of the paper).

Everything is in log-space: weights underflow once a client settles on one component.
Shapes: M components, n samples, K classes; components come before samples, as in the stacked components themselves.
"""

import math

import torch
from torch import Tensor

_LEAST = 1e-300  # a weight that still has a logarithm
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


def fit_log_weights(losses: Tensor, max_iterations: int | None = None, prior: float = 0.0) -> Tensor:
    """Fit one client's mixture weights with the components fixed, from uniform: ``losses [M, n] -> log weights [M]``.

    Args:
        losses: with no samples the weights stay uniform.
        max_iterations: updates of EM, one being the paper's rule for unseen clients; None for convergence.
        prior: pseudo-count, shared equally by the components, where it converges: the mode under a Dirichlet
            distribution of 1 + prior / M. 0 is the greatest likelihood, for a single sample one component alone.

    >>> one_sample = torch.tensor([[0.0], [5.0]])
    >>> [round(float(fit_log_weights(one_sample, prior=prior)[0].exp()), 2) for prior in (0, 1, 1000)]
    [1.0, 0.75, 0.5]
    """
    log_weights = uniform_log_weights(len(losses), losses).double()
    if losses.shape[1] == 0:
        return log_weights.to(losses.dtype)
    if max_iterations is None:
        return _converge(losses.double(), log_weights, prior).to(losses.dtype)
    doubles, mask = losses.double(), losses.new_ones(losses.shape[1], dtype=torch.bool)
    for _ in range(max_iterations):
        log_weights = update_log_weights(log_responsibilities(doubles, log_weights), mask)
    return log_weights.to(losses.dtype)


def _converge(losses: Tensor, log_weights: Tensor, prior: float) -> Tensor:
    """Maximise the likelihood in the weights by projected Newton steps; where one fails, EM goes on.

    The problem is concave, its optimum often at the simplex's edge; there, or where components are alike, EM takes
    thousands of updates. Without the constraint that weights sum to one, -mean log(w P) + sum(w) over w >= 0 has the
    same minimum, and only bounds are left (Bertsekas 1982). The prior's samples are like others, by their counts.
    """
    _, relative = _from_least(losses)
    count = len(losses)
    # P, up to a factor a sample: the best component has one.
    likelihoods = torch.cat([(-relative).exp(), torch.eye(count, dtype=losses.dtype, device=losses.device)], dim=1)
    counts = losses.new_ones(likelihoods.shape[1])
    counts[-count:] = prior / count
    likelihoods, shares = likelihoods[:, counts > 0], counts[counts > 0] / counts.sum()
    weights = log_weights.exp()

    def objective(candidate: Tensor) -> float:
        return float(candidate.sum() - shares @ (candidate @ likelihoods).log())

    value = objective(weights)
    for _ in range(_MOST_NEWTON_STEPS):
        scaled = likelihoods / (weights @ likelihoods)
        ratios = scaled @ shares
        # By concavity no weights are better by more than this (Lindsay 1983).
        gap = float(ratios.max()) - 1
        if gap <= _TOLERANCE:
            break
        free = (weights > min(_EDGE, gap)) | (ratios >= 1)
        curvature = (scaled[free] * shares) @ scaled[free].T
        # Damped by what is still to gain: components that are alike make the curvature singular.
        curvature.diagonal().add_(gap * float(curvature.diagonal().mean()))
        direction = -weights  # what lies at the edge and does not help goes to zero
        direction[free] = torch.linalg.solve(curvature, ratios[free] - 1)
        trials = ((weights + 0.5**halvings * direction).clamp(min=0) for halvings in range(_MOST_HALVINGS))
        weights = next((trial for trial in trials if objective(trial) < value), weights * ratios)
        weights = weights / weights.sum()  # which only improves the objective
        value = objective(weights)
    return weights.clamp(min=_LEAST).log()

"""The mathematics of the mixture: E-step, weights, likelihood, prediction (Prop. 2 of the paper).

Everything is in log-space: weights underflow once a client settles on one component.
Shapes: M components, n samples, K classes; components come before samples, as in the stacked components themselves.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_responsibilities(losses: Tensor, log_weights: Tensor) -> Tensor:
    """E-step: log q(z = m), with q(z = m) proportional to pi_m exp(-loss_m) (Eq. 4).

    Args:
        losses: negative log-likelihoods ``[M, n]``; infinite ones count as the largest finite number.
        log_weights: ``[M]``

    Returns:
        ``[M, n]``; each column's exponentials sum to one.

    >>> log_responsibilities(torch.tensor([[1e30], [1e30]]), torch.tensor([0.25, 0.75]).log()).exp().flatten()
    tensor([0.2500, 0.7500])

    """
    finite = _finite(losses)
    # Without each sample's smallest loss: a large common part would swallow the weights in floating point.
    relative = finite - finite.amin(dim=0, keepdim=True)
    return torch.log_softmax(log_weights[:, None] - relative, dim=0)


def _finite(losses: Tensor) -> Tensor:
    """Bound infinite losses by a quarter of the range: differences and sums with weights then stay finite."""
    return losses.clamp(max=torch.finfo(losses.dtype).max / 4)


def update_log_weights(log_responsibilities: Tensor, mask: Tensor) -> Tensor:
    """First half of the M-step: pi_m = mean over samples of q(z = m) (Eq. 5), in log-space.

    Args:
        log_responsibilities: ``[M, n]``
        mask: ``[n]`` bool, true where there is a sample; at least one.

    Returns:
        log weights ``[M]``

    >>> update_log_weights(torch.tensor([[0.5, 1.0], [0.5, 0.0]]).log(), torch.tensor([True, True])).exp()
    tensor([0.7500, 0.2500])

    """
    totals = torch.logsumexp(log_responsibilities.masked_fill(~mask, -math.inf), dim=1)
    return torch.log_softmax(totals, dim=0)


def negative_log_likelihood(losses: Tensor, log_weights: Tensor) -> Tensor:
    """-log sum_m pi_m exp(-loss_m) of each sample; their mean is the paper's f. ``[M, n], [M] -> [n]``."""
    return -torch.logsumexp(log_weights[:, None] - _finite(losses), dim=0)


def mix(predictions: Tensor, log_weights: Tensor) -> Tensor:
    """Average the components' probabilities (or means), never their logits (Eq. 2). ``[M, n, K], [M] -> [n, K]``."""
    return torch.einsum("m,mnk->nk", log_weights.exp(), predictions)


def uniform_log_weights(num_components: int, like: Tensor) -> Tensor:
    """Log of the uniform mixture weights, ``[M]``, in ``like``'s type and on its device."""
    return like.new_full((num_components,), -math.log(num_components))


def fit_log_weights(losses: Tensor, max_iterations: int = 10_000, tolerance: float = 1e-6) -> Tensor:
    """Fit one client's mixture weights with the components fixed, from uniform, by EM to convergence.

    The problem is concave in the weights, so EM finds its global optimum. One iteration is the paper's rule for unseen
    clients. With no samples the weights stay uniform.

    Args:
        losses: ``[M, n]``
        max_iterations: E-steps at most.
        tolerance: stop once the mean log-likelihood is provably within so much of its maximum.

    Returns:
        log weights ``[M]``, in ``losses``'s type

    """
    log_weights = uniform_log_weights(len(losses), losses).double()
    if losses.shape[1] == 0:
        return log_weights.to(losses.dtype)
    doubles, mask = losses.double(), torch.ones(losses.shape[1], dtype=torch.bool, device=losses.device)
    for _ in range(max_iterations):
        updated = update_log_weights(log_responsibilities(doubles, log_weights), mask)
        # By concavity no weights are better by more than max_m of (updated / present) - 1 (Lindsay 1983).
        gap = float((updated - log_weights).max().expm1())
        log_weights = updated
        if gap <= tolerance:
            break
    return log_weights.to(losses.dtype)

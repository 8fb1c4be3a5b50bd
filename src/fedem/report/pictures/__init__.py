"""Pictures of runs, by name."""

from typing import NamedTuple

from fedem.report.pictures.canvas import Painter
from fedem.report.pictures.clients import against_baselines, histogram, sizes, sorted_scores
from fedem.report.pictures.curves import against_bytes, against_rounds, diagnostics
from fedem.report.pictures.weights import entropy, heat_map, similarity, simplex


class Kind(NamedTuple):
    """A row of the table of figures."""

    painter: Painter
    shows: str
    needs: str


_TEST, _MIXTURE = "test samples", "a method with mixture weights"

# In the order in which a page has them.
FIGURES = {
    "rounds": Kind(against_rounds, "test score and loss against communication rounds", _TEST),
    "bytes": Kind(against_bytes, "test score and loss against bytes sent", f"{_TEST}, a method that sends something"),
    "clients": Kind(sorted_scores, "the clients' test scores, sorted, with the bottom decile", _TEST),
    "histogram": Kind(histogram, "how many clients have which test score", _TEST),
    "gains": Kind(
        against_baselines, "each client's score against Local's and FedAvg's", "local or fedavg beside another method"
    ),
    "weights": Kind(heat_map, "mixture weights, clients sorted by dominant component", _MIXTURE),
    "simplex": Kind(simplex, "clients in the triangle of three components", "a mixture of three components"),
    "entropy": Kind(entropy, "how many components clients use", _MIXTURE),
    "components": Kind(similarity, "cosines between components", "a mixture of shared components, its checkpoint"),
    "sizes": Kind(sizes, "clients' numbers of samples, and scores by size", "clients"),
    "diagnostics": Kind(diagnostics, "what the convergence theorems speak of", "runs with run.diagnose_every"),
}

"""Methods, by name, and what it takes to write one.

A method is one file of this package, or of anybody's: an :class:`Algorithm` for one client, a :class:`Mixer` between
the clients (or one of those here), and at its end the row of the table that it adds with :func:`register`.
"""
# Names are listed, many on a line.
# fmt: off
# isort: off

from importlib import import_module
from pkgutil import iter_modules

from fedem.core.tree import Tree, tree_towards
from fedem.methods.base import (
    ALIASES, METHODS, Algorithm, Batch, Local, Method, Mixture, Stage, Trained, find_method, names_where, register,
    resolve_method, title_of,
)
from fedem.methods.decentralised import Graph
from fedem.methods.mixer import (
    Alone, Mixed, Mixer, OneGroup, OwnGroups, Round, RoundPlan, Served, Star, Start, Uploads, Welcome, by_samples,
    gather, mean_of_groups, weighted_means,
)
from fedem.methods.steps import (
    OwnModel, Penalty, SingleModel, distinct_models, inner_product, mean_by_mass, mean_loss, mixture_of_one,
    require_gradient_steps, square_distance, times_mass, train_step, trained_leaves,
)
from fedem.methods.surrogate import Fixed, Surrogate

# Every method's file registers its rows when it is imported.
for _module in iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)
for _row in sorted(METHODS.values(), key=lambda row: (row.position, row.name)):
    METHODS[_row.name] = METHODS.pop(_row.name)

__all__ = [
    "ALIASES", "METHODS", "Algorithm", "Alone", "Batch", "Fixed", "Graph", "Local", "Method", "Mixed", "Mixer",
    "Mixture", "OneGroup", "OwnGroups", "OwnModel", "Penalty", "Round", "RoundPlan", "Served", "SingleModel", "Stage",
    "Star", "Start", "Surrogate", "Trained", "Tree", "Uploads", "Welcome", "by_samples", "distinct_models",
    "find_method", "gather", "inner_product", "mean_by_mass", "mean_loss", "mean_of_groups", "mixture_of_one",
    "names_where", "register", "require_gradient_steps", "resolve_method", "square_distance", "times_mass", "title_of",
    "train_step", "trained_leaves", "tree_towards", "weighted_means",
]

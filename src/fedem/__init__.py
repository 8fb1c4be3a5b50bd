"""Federated learning of personalised models as mixtures.

>>> import fedem
>>> data = fedem.Synthetic(num_clients=20, dimension=5, num_test=50).make(seed=0)
>>> result = fedem.train(data.federation, method="fedem", num_components=3, rounds=3, learning_rate=0.5)
>>> result.predict("0", data.federation.test.inputs[:4]).shape
torch.Size([4, 2])
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedem.core import VERSION

# Before torch is loaded: the threads of a step would wait for each other by spinning, for 3 to 200 ms, on cores that
# the slowest of them or another process could use.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from fedem import graphs, surrogates
    from fedem.core.errors import UserError
    from fedem.data import Dataset, FromFile, Synthetic
    from fedem.data.federation import Federation
    from fedem.data.files import from_datasets, from_frame, from_huggingface
    from fedem.data.samples import Samples
    from fedem.export import export_client, load_exported
    from fedem.methods import METHODS, Method
    from fedem.models import Model
    from fedem.models.metrics import METRICS, Metric
    from fedem.runs.config import Config
    from fedem.runs.result import PersonalModel, Result
    from fedem.runs.trainer import run, train
    from fedem.studies.choice import Choice, choose

__version__ = VERSION

__all__ = [
    "METHODS",
    "METRICS",
    "Choice",
    "Config",
    "Dataset",
    "Federation",
    "FromFile",
    "Method",
    "Metric",
    "Model",
    "PersonalModel",
    "Result",
    "Samples",
    "Synthetic",
    "UserError",
    "__version__",
    "choose",
    "export_client",
    "from_datasets",
    "from_frame",
    "from_huggingface",
    "graphs",
    "load_exported",
    "run",
    "surrogates",
    "train",
]

_HOMES = {
    "fedem.core.errors": ("UserError",),
    "fedem.data": ("Dataset", "FromFile", "Synthetic"),
    "fedem.data.federation": ("Federation",),
    "fedem.data.files": ("from_datasets", "from_frame", "from_huggingface"),
    "fedem.data.samples": ("Samples",),
    "fedem.export": ("export_client", "load_exported"),
    "fedem.methods": ("METHODS", "Method"),
    "fedem.models": ("Model",),
    "fedem.models.metrics": ("METRICS", "Metric"),
    "fedem.runs.config": ("Config",),
    "fedem.runs.result": ("PersonalModel", "Result"),
    "fedem.runs.trainer": ("run", "train"),
    "fedem.studies.choice": ("Choice", "choose"),
}

if not TYPE_CHECKING:  # a type checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        """Import a public name, or a package, once it is asked for: torch takes seconds, which help can do without."""
        if name.startswith("_"):
            raise AttributeError(f"module 'fedem' has no attribute {name!r}")
        if home := next((module for module, names in _HOMES.items() if name in names), None):
            globals()[name] = getattr(import_module(home), name)
            return globals()[name]
        try:
            return import_module(f"fedem.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"fedem.{name}":
                raise
            raise AttributeError(f"module 'fedem' has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

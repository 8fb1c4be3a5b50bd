"""Federated learning of personalised models as mixtures.

>>> import fedem
>>> data = fedem.Synthetic(num_clients=20, dimension=5, num_test=50).make(seed=0)
>>> result = fedem.train(data.federation, method="fedem", num_components=3, rounds=3, learning_rate=0.5)
>>> result.predict("0", data.federation.test.inputs[:4]).shape
torch.Size([4, 2])
"""

import os

from fedem.core import VERSION

# Before torch is loaded: the threads of a step would wait for each other by spinning, for 3 to 200 ms, on cores that
# the slowest of them or another process could use.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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

__version__ = VERSION

__all__ = [
    "METHODS",
    "METRICS",
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

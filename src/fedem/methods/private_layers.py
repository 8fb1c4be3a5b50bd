"""FedAvg whose clients keep some layers to themselves: FedPer the last one, LG-FedAvg all others, FedBN normalisations.

Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers, 2019. Liang, Liu, Ziyin, Allen,
Auerbach, Brent, Salakhutdinov, Morency: Think Locally, Act Globally: Federated Learning with Local and Global
Representations, 2020. Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization, ICLR 2021.

A client trains all layers together, and only those that are shared are sent
(:class:`~fedem.methods.wrappers.local_layers.LocalLayers`).
"""

from fedem.methods.base import Method, register
from fedem.methods.fedavg import FedAvg
from fedem.methods.mixer import Star

_UNSEEN = "takes the shared layers, and the mean of the others"

register(
    Method("fedper", FedAvg, Star, title="FedPer", summary="a shared body, and a last layer of each client's own",
           paper="Arivazhagan et al. 2019", personal="the last layer", sent="the other layers", unseen=_UNSEEN,
           local_layers="head", position=250),
    Method("lgfedavg", FedAvg, Star, title="LG-FedAvg", summary="a body of each client's own below a shared last layer",
           paper="Liang et al. 2020", personal="all layers but the last", sent="the last layer", unseen=_UNSEEN,
           local_layers="body", aliases=("lg-fedavg",), position=280),
    Method("fedbn", FedAvg, Star, title="FedBN", summary="FedAvg whose batch normalisations stay with their clients",
           paper="Li et al. 2021", personal="batch normalisations", sent="the other layers", unseen=_UNSEEN,
           local_layers="batch_norm", position=290),
)  # fmt: skip

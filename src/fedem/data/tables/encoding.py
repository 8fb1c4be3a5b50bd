"""How a table's columns become inputs and targets: learnt from the training rows, kept with the run.

- Numbers are standardised by the mean and deviation of the training rows.
- Text is one-hot over the categories of the training rows; a category that was not there becomes all zeros.
- true and false are 1 and 0.
- Targets are classes (text, booleans, few different whole numbers) or numbers to regress on, standardised as well.

Shapes: n rows, d inputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedem.data.tables.columns import BOOLEAN, NUMBER, TEXT, Column, Piece, Table
from fedem.data.tables.features import Feature, some
from fedem.data.tables.readers import is_frame, read_frame
from fedem.data.tables.targets import Target
from fedem.errors import UserError


@dataclass(frozen=True)
class Encoding:
    """What was learnt of a table's columns.

    Attributes:
        features: in the order of the inputs; None where the inputs are an array, which is taken as it is.
        target: the column of targets.
        client: name of the column of clients.
        ignored: names of columns that are left out.

    """

    features: tuple[Feature, ...] | None
    target: Target
    client: str = "client"
    ignored: tuple[str, ...] = ()

    @classmethod
    def fit(
        cls,
        table: Table,
        train_rows: NDArray[np.int64],
        target: Target | None = None,
        *,
        standardize: bool = True,
        max_categories: int = 100,
        ignored: Sequence[str] = (),
    ) -> Encoding:
        """Learn from the training rows; ``target`` is found out from the table when it is not given."""
        target = target or Target.fit(table, max_categories=max_categories)
        target = target.scaled(table, train_rows) if standardize else target
        if table.array is not None:
            return cls(None, target, table.client, tuple(ignored))
        names = table.without(ignored).features
        table.complete(names)
        features = tuple(
            Feature.fit(table, name, train_rows, standardize=standardize, max_categories=max_categories)
            for name in names
        )
        return cls(features, target, table.client, tuple(ignored))

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes; None for regression."""
        return self.target.classes

    @property
    def target_deviation(self) -> float:
        """How large an error of 1 is in the targets' own units; 1 for classes and for targets that are not scaled."""
        return self.target.deviation

    @property
    def fingerprint(self) -> str:
        """A hash of all that was learnt: 32 hexadecimal digits."""
        content = json.dumps(self.to_json(), sort_keys=True)
        return blake2b(content.encode(errors="surrogatepass"), digest_size=16).hexdigest()

    @property
    def input_names(self) -> tuple[str, ...] | None:
        """Names of the d inputs; None where they are an array."""
        if self.features is None:
            return None
        return tuple(name for feature in self.features for name in feature.inputs)

    def inputs(self, table: Table) -> NDArray[np.generic]:
        """Encode a table's features, ``[n, d]`` float32; columns are found by their names."""
        if self.features is None:
            return table.stacked()
        # What was text stays so, also where the new rows have numbers only.
        own = table.without(self.ignored).as_text([f.name for f in self.features if f.kind == TEXT])
        names = tuple(feature.name for feature in self.features)
        if table.array is not None:
            raise UserError(f"The inputs are an array without names; allowed: the columns {some(names)}.")
        if set(own.features) != set(names):
            raise UserError(f"The columns are {', '.join(own.features)}; allowed: {', '.join(names)}, as in training.")
        own.complete(names)
        widths = [len(feature.inputs) for feature in self.features]
        inputs = np.zeros((len(table), sum(widths)), dtype=np.float32)
        for feature, end, width in zip(self.features, np.cumsum(widths).tolist(), widths, strict=True):
            feature.encode(own, inputs[:, end - width : end])
        return inputs

    def targets(self, table: Table) -> NDArray[np.generic]:
        """Encode a table's targets: classes ``[n]`` int64, or float32."""
        return self.target.encode(table)

    def decode(self, predictions: Tensor) -> Tensor:
        """Return predicted means in the targets' own units; probabilities ``[n, K]`` stay as they are."""
        return predictions * self.target.deviation + self.target.mean

    def accept(self, values: Any) -> Any:
        """Encode a data frame of new inputs; whatever else is given counts as encoded already."""
        if not is_frame(values):
            return values
        return self.inputs(read_frame(values, self.target.name, self.client))

    def accept_targets(self, values: ArrayLike) -> NDArray[np.generic]:
        """Encode new targets, given as in the table: names of classes, or numbers."""
        array = np.asarray(values)
        if array.dtype.kind in "US":
            array = array.astype(object)
        blank = [value is None or value != value for value in array.reshape(len(array), -1)[:, 0].tolist()]
        column = Column(array, np.array(blank, dtype=bool))
        return self.target.encode(
            Table({self.target.name: column}, self.target.name, self.client, (Piece("the targets", len(array)),))
        )

    def unseen(self, table: Table) -> dict[str, list[str]]:
        """Return, by column, the categories that no training row had; their inputs are all zeros."""
        found = {
            feature.name: sorted(set(table.columns[feature.name].texts(TEXT)) - set(feature.categories))
            for feature in self.features or ()
            if feature.kind == TEXT
        }
        return {name: categories for name, categories in found.items() if categories}

    def describe(self) -> str:
        """Say in one line what was made of the columns."""
        if self.features is None:
            return f"{self.target.describe()}; inputs as they are"
        kinds = {kind: [feature for feature in self.features if feature.kind == kind] for kind in (NUMBER, BOOLEAN)}
        said = [
            f"{len(found)} {word} feature{'s' if len(found) > 1 else ''}"
            for word, found in (("numeric", kinds[NUMBER]), ("true/false", kinds[BOOLEAN]))
            if found
        ]
        texts = [f"{f.name!r} with {len(f.categories)} categories" for f in self.features if f.kind == TEXT]
        if texts:
            said.append(f"{len(texts)} categorical ({some(texts)})")
        names = self.input_names or ()
        return f"{self.target.describe()}; {', '.join(said)}; {len(names)} inputs in all"

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as JSON has them."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Encoding:
        """Return the encoding that :meth:`to_json` wrote."""
        features, target = content["features"], dict(content["target"])
        classes = target.pop("classes")
        return cls(
            None if features is None else tuple(Feature(**_tuples(feature)) for feature in features),
            Target(**target, classes=None if classes is None else tuple(classes)),
            content["client"],
            tuple(content["ignored"]),
        )


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {**values, "categories": tuple(values["categories"])}

"""What all sides of a deployment agree on: the configuration, and what a model must know of the data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fedem.checkpoint import write_atomically, write_json
from fedem.config import Config, read_toml
from fedem.data.base import Dataset
from fedem.errors import UserError
from fedem.facts import shape_facts, take_shapes
from fedem.job import Job
from fedem.parts import Parts, Shapes

CONFIG, PLAN = "config.toml", "plan.json"
_SIMULATED = ("unseen", "measure_alpha_every", "diagnose_every")
"""settings of [run] that need all clients' data in one place"""
_START = {"weights": "", "jitter": 0.0}
"""settings of [model] that say what the server's first models are made of"""


@dataclass(frozen=True, eq=False)
class Plan:
    """A configuration whose loss is settled, and the shapes of the data; nothing of any client."""

    config: Config
    shapes: Shapes

    @classmethod
    def make(cls, config: Config, dataset: Dataset) -> Plan:
        """Settle from sample data what the configuration leaves open, and try the model on them."""
        for key in _SIMULATED:
            if value := config.sections["run"][key]:
                raise UserError(f"run.{key} is {value}; allowed in a deployment, where no one has all data: 0.")
        # How many clients there will be, the sample does not say.
        whole = config.replace("run", clients_per_round=1.0)
        job = Job.prepare(whole, dataset, None, fresh=False)
        # Neither where the sample lies nor who owns which of its rows concerns those who get the plan.
        settled = job.config.replace("run", clients_per_round=config.run.clients_per_round, partition_hash="")
        if "path" in settled.sections["data"]:
            settled = settled.replace("data", path="")
        return cls(settled, job.shapes)

    def save(self, folder: Path) -> None:
        """Write config.toml and plan.json into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / CONFIG, self.config.to_toml().encode())
        write_json(folder / PLAN, shape_facts(self.shapes))

    @classmethod
    def load(cls, folder: Path) -> Plan:
        """Read what :meth:`save` wrote."""
        path = folder / PLAN
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            return cls(Config.build(read_toml(folder / CONFIG), preset=False), take_shapes(facts))
        except FileNotFoundError:
            raise UserError(
                f"{folder} holds no plan (no {PLAN}); `fedem deploy init` makes one for a server, "
                "`fedem peer plan` one for peers."
            ) from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"The plan {path} can't be read ({type(error).__name__}: {error}).") from None

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as JSON has them."""
        return {"config": self.config.sections, "shapes": shape_facts(self.shapes)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Plan:
        """Return the plan that :meth:`to_json` wrote."""
        return cls(Config.build(content["config"], preset=False), take_shapes(dict(content["shapes"])))

    @cached_property
    def parts(self) -> Parts:
        """Model, algorithm and mixer."""
        return Parts.build(self.config, self.shapes, None)

    def on_node(self, device: str = "") -> Plan:
        """Return the plan as a client follows it: on its own device, and without weights in files to start from.

        Those are the server's: a client's models come by messages.
        """
        config = self.config.replace("run", device=device) if device else self.config
        start = {key: value for key, value in _START.items() if key in config.sections["model"]}
        return Plan(config.replace("model", **start), self.shapes)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that sides must agree on, 32 hexadecimal digits: not of what each may have its own way."""
        content = json.dumps(self.on_node("auto").to_json(), sort_keys=True)
        return blake2b(content.encode(errors="surrogatepass"), digest_size=16).hexdigest()

    def rate(self, round_index: int) -> float:
        """Return the learning rate of a round, counted from 0."""
        return self.config.schedule.rate(round_index, self.config.run.rounds)

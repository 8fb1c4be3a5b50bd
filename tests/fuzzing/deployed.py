"""Readers of deployments: plans, kept files, messages of servers, clients and peers, rollbacks, certificates, keys."""

from __future__ import annotations

import json
import math
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import torch
from cryptography import x509
from deployments import make_plan, write_sample
from flower_grid import Deployed
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from fedem.core.errors import UserError
from fedem.core.tree import Tree, tree_index
from fedem.deploy.flower.certificates import make_certificates
from fedem.deploy.flower.messages import (
    EVALUATE,
    TRAIN,
    layout_of,
    read_reply,
    read_request,
    to_record,
    upload_layout,
    write_reply,
    write_request,
)
from fedem.deploy.flower.server import first_server_state
from fedem.deploy.flower.superlink import make_secret, token_of
from fedem.deploy.history import rollback
from fedem.deploy.kept import Earlier, Kept
from fedem.deploy.node import Node
from fedem.deploy.peers.group import pack, unpack
from fedem.deploy.peers.meeting import SealedBackend, make_key, read_key
from fedem.deploy.peers.neighbours import read_present, refusals, round_to_go_on_with, run_to_go_on_with
from fedem.deploy.plan import NodeConfig, Plan, RunConfig
from fedem.runs.folder import RunFolder
from fedem.runs.neighbours import predict
from fedem.runs.rounds import not_finite
from fuzzing.harness import FolderReader, Reader
from fuzzing.mutations import (
    Draw,
    changed_tree,
    damaged_cells,
    damaged_json,
    damaged_tensors,
    flipped,
    pick,
)
from fuzzing.runs import forge

ABOUT = {"round": 0, "num_rounds": 3, "learning_rate": 0.1, "experiment": "trial", "run": "0123456789abcdef"}


class Plans(FolderReader):
    title = "plans of deployments: TOML, JSON"
    named = ("allowed", "Unknown", "takes no settings")  # settings are named as in any configuration

    def build(self, folder: Path) -> None:
        sample = write_sample(folder.parent)
        make_plan(sample)[0].save(folder)
        sample.unlink()

    def read(self) -> object:
        plan = Plan.load(self.folder)
        return plan.fingerprint, plan.on_node("cpu").fingerprint

    def judge(self, found: Any) -> str:
        return "" if found[0] == found[1] and len(found[0]) == 32 else "Its fingerprint goes by the device."


class KeptFiles(Reader):
    title = "kept files of clients: safetensors, JSON"

    def __init__(self, folder: Path):
        super().__init__(folder)
        plan = make_plan(write_sample(folder))[0]
        weights, self.path = {"log_weights": torch.zeros(3)}, folder / "state" / "trial" / "ann.safetensors"
        Kept(plan, 2, weights, plan.algorithm.init_shared(0), (Earlier(1, weights),), "run", "ann").save(self.path)
        self.content = self.path.read_bytes()

    def damage(self, draw: Draw) -> str:
        if draw.random() < 0.4:
            self.path.write_bytes(damaged_tensors(self.content, draw))
            return "tensors"
        (length,) = struct.unpack("<Q", self.content[:8])
        header = json.loads(self.content[8 : 8 + length])
        kept = json.loads(header["__metadata__"]["kept"])
        match int(draw.integers(3)):
            case 0:
                kept["plan"] = changed_tree(kept["plan"], draw)
            case 1:
                kept = changed_tree(kept, draw)
            case _:
                kept = {"plan": kept.pop("plan"), **changed_tree(kept, draw)} if draw.random() < 0.9 else {}
        header["__metadata__"]["kept"] = json.dumps(kept)
        text = json.dumps(header).encode()
        self.path.write_bytes(struct.pack("<Q", len(text)) + text + self.content[8 + length :])
        return "metadata"

    def read(self) -> object:
        """Read it, and use it as ``fedem export`` does."""
        kept = Kept.load(self.path)
        inputs = torch.zeros(2, *kept.plan.format.inputs, dtype=kept.plan.format.input_dtype)
        model = kept.model(self.path)
        predict(model.model, model.mixture, inputs)
        return kept

    def judge(self, found: Any) -> str:
        return "" if len(found.plan.fingerprint) == 32 and found.round >= 0 else "It has no plan, or no round."


class NodeSamples(Reader):
    title = "samples of nodes under a plan: CSV"
    named = ("column", "client")

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.path = write_sample(folder)
        self.plan, self.rows = make_plan(self.path)[0], self.path.read_bytes()

    def damage(self, draw: Draw) -> str:
        self.path.write_bytes(damaged_cells(self.rows, draw))
        return "shops.csv"

    def read(self) -> object:
        return Node.open(self.plan, self.path, "shop A")

    def judge(self, found: Any) -> str:
        inputs = found.federation.train.inputs
        fits = tuple(inputs.shape[1:]) == self.plan.format.inputs and bool(inputs.isfinite().all())
        return "" if fits and found.num_samples >= 1 else "Inputs are not what the plan has."


# --- Flower's messages

VALUES: tuple[Any, ...] = (
    -(2**63), -1, 0, 1, 3, 4, 2**63 - 1, math.nan, math.inf, -math.inf, -0.5, 1e308, True, False, "", "x", "../x",
    "a/b", ".x", "x\n", "x\0y", "ä", "x" * 300, b"", b"\xff", [], [0], [-1], [1.5], ["x"], [math.nan], [b"x"], [True],
)  # fmt: skip


def damaged_values(record: dict[str, Any], draw: Draw) -> dict[str, Any]:
    """Values of a record with one to three replaced, gone or added; of what Flower can send."""
    changed = dict(record)
    for _ in range(pick(draw, (1, 1, 2, 3))):
        name = pick(draw, [*changed, "x"])
        if draw.random() < 0.2:
            changed.pop(name, None)
        else:
            changed[name] = pick(draw, VALUES)
    return changed


def damaged_arrays(record: ArrayRecord, draw: Draw) -> ArrayRecord:
    """Arrays of a message with another name, shape, type, form or content."""
    arrays = dict(record.items())
    name = pick(draw, sorted(arrays))
    own = arrays[name]
    match int(draw.integers(7)):
        case 0:
            del arrays[name]
        case 1:
            arrays[pick(draw, ("x", "", "../x", name.upper()))] = own
        case 2:
            arrays[name] = Array(own.dtype, own.shape, own.stype, flipped(own.data, draw))
        case 3:
            shape = pick(draw, ((), (0,), (-1,), (10**12,), (*own.shape, 1), tuple(own.shape)[::-1]))
            arrays[name] = Array(own.dtype, shape, own.stype, own.data)
        case 4:
            arrays[name] = Array(pick(draw, ("float64", "int64", "object", "x", "")), own.shape, own.stype, own.data)
        case 5:
            arrays[name] = Array(own.dtype, own.shape, pick(draw, ("", "pickle", "torch", "x")), own.data)
        case _:
            array = own.numpy().copy()
            array.reshape(-1)[:1] = pick(draw, (math.nan, math.inf, -1e30, 0.0))
            arrays[name] = Array(pick(draw, (array, array.astype("float64"), array[None], array.reshape(-1)[:1])))
    return ArrayRecord(arrays)


class Requests(Reader):
    title = "requests of Flower servers"
    named = ("The server's message is refused",)

    def __init__(self, folder: Path):
        super().__init__(folder)
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as Flower's own programs set them
        self.plan = make_plan(write_sample(folder))[0]
        self.shared = tree_index(first_server_state(self.plan).shared, 0)

    def damage(self, draw: Draw) -> str:
        content = write_request(self.plan, to_record(self.shared), ABOUT | {"rollbacks": []})
        what = pick(draw, ("config", "config", "arrays", "gone"))
        if what == "config":
            try:
                content["config"] = ConfigRecord(damaged_values(dict(content["config"]), draw))
            except (TypeError, ValueError):  # nothing that Flower could send
                what = "nothing"
        elif what == "arrays":
            content["arrays"] = damaged_arrays(content.array_records["arrays"], draw)
        else:
            content = pick(
                draw,
                (RecordDict(), RecordDict({"config": content["config"]}), RecordDict({"arrays": content["arrays"]})),
            )
        self.message = Message(content, 1, pick(draw, (TRAIN, EVALUATE)))
        return what

    def read(self) -> object:
        return read_request(self.message, self.plan)

    def judge(self, found: Any) -> str:
        fits = layout_of(found.shared) == layout_of(self.shared) and not_finite(found.shared) is None
        sane = fits and 0 <= found.round <= found.num_rounds and math.isfinite(found.learning_rate)
        return "" if sane else "Leaves, rounds or the learning rate are not what a run has."


class Replies(Requests):
    title = "replies of Flower clients"
    named = ("is refused", "did not answer")

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.layout = upload_layout(self.plan, self.shared)
        self.node = Node.open(self.plan, folder / "shops.csv", "shop A")
        personal = self.node.first_personal(self.shared)
        self.upload, self.scores = (
            self.node.train(self.shared, personal, 0, 0.1)[0],
            self.node.score(self.shared, personal),
        )

    def damage(self, draw: Draw) -> str:
        content = write_reply(self.node, self.scores if draw.random() < 0.5 else {}, self.upload)
        what = pick(draw, ("config", "metrics", "metrics", "arrays", "gone"))
        try:
            if what == "config":
                content["config"] = ConfigRecord(damaged_values(dict(content["config"]), draw))
            elif what == "metrics":
                content["metrics"] = MetricRecord(damaged_values(dict(content["metrics"]), draw))
            elif what == "arrays":
                content["arrays"] = damaged_arrays(content.array_records["arrays"], draw)
            else:
                del content[pick(draw, ("config", "metrics", "arrays"))]
        except (TypeError, ValueError):  # nothing that Flower could send
            what = "nothing"
        self.message = Message(content, 1, TRAIN)
        return what

    def read(self) -> object:
        return read_reply(self.message, self.plan, self.layout)

    def judge(self, found: Any) -> str:
        fits = layout_of(found.upload) == self.layout and not_finite(found.upload) is None and found.num_samples >= 1
        sums = [number for entry in found.scores.values() for number in entry]
        return "" if fits and all(map(math.isfinite, sums)) else "Leaves or sums are not what a client has."


class FlatConfigs(Reader):
    title = "run and node configs of Flower"
    named = ("config", "allowed")

    def damage(self, draw: Draw) -> str:
        self.kind = pick(draw, (RunConfig, NodeConfig))
        valid = {"experiment": "x", "rounds": 3, "min-clients": 2, "wait": 1.0, "continue": True, "readmit": "a,b"}
        own = {"data": "x.csv", "client": "a", "state": "s", "device": "cpu", "partition-id": 0}
        self.values = damaged_values(valid if self.kind is RunConfig else own, draw)
        return self.kind.__name__

    def read(self) -> object:
        return self.kind.read(self.values)


# --- rollbacks of a deployed run


class Rollbacks(FolderReader):
    title = "deployed runs: rolled back"
    slowness = 4.0

    def build(self, folder: Path) -> None:
        with tempfile.TemporaryDirectory() as place:
            there = Deployed(Path(place))
            there.serve()
            shutil.copytree(there.run_folder, folder, dirs_exist_ok=True)

    def damage(self, draw: Draw) -> str:
        done = super().damage(draw)
        if "checkpoints" in done and draw.random() < 0.5:
            forge(self.folder, draw)
        self.target = pick(draw, (1, 2, 2, 3, 9))
        return done

    def read(self) -> object:
        return rollback(RunFolder(self.folder), self.target)

    def judge(self, found: object) -> str:
        last = RunFolder(self.folder).load().states["last"].round
        return "" if last == self.target else f"It is at round {last}."


# --- peers


class PeerDescriptions(Reader):
    title = "descriptions of peers: JSON"
    named = ("peer", "Client")

    def damage(self, draw: Draw) -> str:
        same = {"version": "1", "plan": "p", "met": False, "new_run": "abc"}
        told = [
            same | {"clients": [["ann", 5, 0, ""], ["bob", 3, 0, ""]]},
            same | {"clients": [["cem", 4, 1, "r"]]},
        ]
        self.messages = [json.dumps(each).encode() for each in told]
        place = int(draw.integers(len(told)))
        self.messages[place] = damaged_json(self.messages[place], draw)
        return "message"

    def read(self) -> object:
        present, new_run = read_present(self.messages)
        refusals(present, self.folder)
        return present, run_to_go_on_with(present) or new_run, round_to_go_on_with(present)

    def judge(self, found: Any) -> str:
        present, run, done = found
        sane = all(type(one.samples) is int and one.samples >= 1 and one.name for one in present)
        return "" if sane and isinstance(run, str) and done >= 0 else f"Clients are {present}."


class PeerModels(Reader):
    title = "models of peers: bytes"
    refuses = False
    like: ClassVar[Tree] = {"a": torch.randn(2, 3), "b": torch.zeros((), dtype=torch.float64), "n": torch.tensor(3)}

    def damage(self, draw: Draw) -> str:
        content = bytes(pack(self.like).numpy())
        changed = flipped(content, draw)[: len(content)].ljust(len(content), b"\xff")  # its length is agreed upon
        self.buffer = torch.frombuffer(bytearray(changed), dtype=torch.uint8)
        return "bytes"

    def read(self) -> object:
        tree = unpack(self.buffer, self.like)
        return tree, not_finite(tree)

    def judge(self, found: Any) -> str:
        tree, spoilt = found
        if layout_of(tree) != layout_of(self.like):
            return "The leaves have another layout."
        finite = all(bool(leaf.isfinite().all()) for leaf in tree.values())
        return "" if finite == (spoilt is None) else "Numbers that are not finite were not noticed."


class Seals(Reader):
    title = "sealed states of meetings, keys, secrets"
    named = ("The seal is wrong",)

    class _Store(RendezvousBackend):
        content = b""

        @property
        def name(self) -> str:
            return "store"

        def get_state(self) -> tuple[bytes, int]:
            return self.content, 1

        def set_state(self, state: bytes, token: object = None) -> tuple[bytes, int, bool]:
            self.content = state
            return state, 1, True

    def damage(self, draw: Draw) -> str:
        for path in self.folder.iterdir():
            path.rmdir() if path.is_dir() else path.unlink()
        make_key(self.folder)
        self.key, self.secret = self.folder / "meeting.key", make_secret(self.folder / "secret")
        store = self._Store()
        self.backend = SealedBackend(store, read_key(self.folder))
        self.backend.set_state(b"state")
        what = pick(draw, ("state", "key", "secret", "a folder"))
        if what == "state":
            store.content = flipped(store.content, draw)
        elif what == "a folder":
            path = pick(draw, (self.key, self.secret))
            path.unlink()
            path.mkdir()
        else:
            path = self.key if what == "key" else self.secret
            path.write_bytes(pick(draw, (flipped(path.read_bytes(), draw), b"", b"\xff" * 64, b"0" * 10**5)))
        self.is_same = store.content.endswith(b"state") and len(store.content) == 37
        return what

    def read(self) -> object:
        try:
            state = self.backend.get_state()
        except RendezvousStateError as error:  # which whoever meets says in a sentence of its own
            raise UserError(str(error)) from None
        return state, read_key(self.folder), token_of(self.secret)

    def judge(self, found: Any) -> str:
        (state, _), key, token = found
        return "" if state == b"state" and len(key) == 32 and len(token) == 64 else "What was changed was accepted."


class Authorities(FolderReader):
    title = "certificates of an authority: PEM"
    slowness = 4.0
    touched = ("ca.crt", "ca.key")

    def build(self, folder: Path) -> None:
        make_certificates(folder, ["localhost"])

    def read(self) -> object:
        make_certificates(self.folder, ["localhost"])
        return x509.load_pem_x509_certificate((self.folder / "ca.crt").read_bytes())

    def judge(self, found: object) -> str:
        same = found == x509.load_pem_x509_certificate(self.valid["ca.crt"])
        return "" if same else "The authority is not the one that was there."


READERS: tuple[type[Reader], ...] = (
    Plans, NodeSamples, KeptFiles, Requests, Replies, FlatConfigs, Rollbacks, PeerDescriptions, PeerModels, Seals,
    Authorities,
)  # fmt: skip

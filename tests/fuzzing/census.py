"""Everything in the source of fedem that reads from outside, and who tries it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import fedem

# Calls by which something is read: files, archives, messages, texts of a format.
READING = frozenset(
    {
        "DictReader",
        "GzipFile",
        "Image.open",
        "ParquetFile",
        "Unpickler",
        "ZipFile",
        "array.numpy",
        "csv.reader",
        "decompress",
        "extractfile",
        "frombuffer",
        "fromhex",
        "json.load",
        "json.loads",
        "load_file",
        "load_pem_private_key",
        "load_pem_x509_certificate",
        "np.load",
        "open",
        "parse_json",
        "parse_toml",
        "path.open",
        "read_array",
        "read_bytes",
        "read_csv",
        "read_json",
        "read_json_if_there",
        "read_table",
        "read_text",
        "read_toml",
        "safe_open",
        "tarfile.open",
        "tomllib.loads",
        "torch.load",
    }
)

# By module: the titles of the readers that try it or, where nothing from outside is read, why it is not tried.
TRIED: dict[str, tuple[str, ...]] = {
    "cli.deploy": ("configurations: TOML", "plans of deployments: TOML, JSON"),
    "cli.runs": ("new rows: predict, evaluate, personalize",),
    "cli.train": ("configurations: TOML",),
    "core.files": ("runs: shown and reported", "runs: fedem check, also --repair"),
    "core.schema": ("configurations: TOML", "runs: shown and reported"),
    "data.archives": ("tables: npz",),
    "data.files": ("tables: CSV, also packed",),
    "data.images": ("EMNIST: zip, gzip, idx", "CIFAR-10, CIFAR-100: tar, pickle", "FEMNIST: zip, JSON, PNG"),
    "data.shakespeare": ("Shakespeare: zip, gzip, text",),
    "data.store": ("prepared data: JSON, npy", "hashes of downloads at first use", "EMNIST: zip, gzip, idx"),
    "data.tables": ("tables: CSV, also packed", "tables: Parquet", "tables: npz"),
    "data.texts": ("tables: CSV, also packed",),
    "deploy.flower.certificates": ("certificates of an authority: PEM",),
    "deploy.flower.messages": ("requests of Flower servers", "replies of Flower clients"),
    "deploy.flower.superlink": ("sealed states of meetings, keys, secrets",),
    "deploy.history": ("deployed runs: rolled back",),
    "deploy.kept": ("kept files of clients: safetensors, JSON",),
    "deploy.node": ("samples of nodes under a plan: CSV",),
    "deploy.peers.meeting": ("sealed states of meetings, keys, secrets",),
    "deploy.peers.neighbours": ("descriptions of peers: JSON",),
    "deploy.plan": ("plans of deployments: TOML, JSON",),
    "export.folder": ("exported models: JSON, safetensors",),
    "graphs.topologies": ("graphs: text, CSV, npy, npz",),
    "models.images": ("weights to start from: pth, safetensors",),
    "report.runs": ("runs: shown and reported",),
    "runs.checkpoints": ("runs: loaded, predicting, personalised", "runs: gone on with"),
    "runs.config": ("configurations: TOML", "settings given by --set"),
    "runs.folder": ("runs: shown and reported", "runs: gone on with"),
    "studies.board": ("experiments: notes of the leaderboard",),
    "studies.checking": ("studies: comparison, search, trials, choice, theory",),
    "studies.experiments": ("experiments: TOML",),
    "studies.tuning": ("studies: comparison, search, trials, choice, theory",),
}
NOT_TRIED: dict[str, str] = {
    "core.memory": "the kernel's own figures",
    "core.random": "bytes of a hash that was just computed",
    "deploy.flower.database": "makes Flower's own file, and reads nothing of it",
    "deploy.flower.client": "opens a node, whose files others read",
    "deploy.flower.trial": "shows the log of a program that it started",
    "deploy.peers.group": "hands on the bytes of a message; deploy.peers.neighbours reads them",
    "deploy.peers.work": "opens a node and its kept file, which others read",
    "export.formats": "reads back the file that it has just written",
    "graphs.weights": "bytes of an array that was just made, as a key of a cache",
    "studies.choice": "a file of the package",
    "studies.sweep": "a file of the package",
}


def reading_modules() -> Iterator[tuple[str, str]]:
    """Yield the modules of fedem that read something, each with a call by which it does."""
    root = Path(fedem.__file__).parent
    for path in sorted(root.rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            words = [called.id] if isinstance(called, ast.Name) else []
            if isinstance(called, ast.Attribute):
                words = [called.attr]
                words += [f"{called.value.id}.{called.attr}"] if isinstance(called.value, ast.Name) else []
            if READING & {*words}:
                yield name, words[-1]

"""How stacked clients begin a round: scores, surveys, and the surrogates built from them.

Shapes: c clients of a chunk, n samples of the largest, N of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedem.algorithms.base import Algorithm, Local
from fedem.engines.batches import blocks
from fedem.engines.chunks import Chunk, similar
from fedem.tree import Tree, tree_cat, tree_map


def begin_clients(
    begin: Callable[..., Any], algorithm: Algorithm, chunk: Chunk, flat: Tree | None, rows: int
) -> tuple[Local, Tree, Tensor]:
    """Begin the clients' rounds, those of similar size together, so that little is padded.

    Returns:
        the clients' states ``[c, ...]``, what they made for each sample ``[..., columns]``, and the column of each
        client's first sample ``[c]``
    """
    locals_, columns, starts, total = [], [], [], 0
    for part in similar(chunk.sizes.tolist()):
        some = chunk.part(part)
        scores, mask = _padded_scores(algorithm, some, flat, rows)
        if type(algorithm).survey is not Algorithm.survey:
            scores = scores | _survey(algorithm, some)
        local, samples = begin(some.shared, some.personal, scores, mask)
        locals_.append(local)
        columns.append(tree_map(lambda leaf: leaf.movedim(0, -2).flatten(-2), samples))
        starts.append(total + mask.shape[1] * torch.arange(len(mask), device=mask.device))
        total += mask.numel()
    local = Local(*(tree_cat(trees) for trees in zip(*locals_, strict=True)))
    joined = {name: torch.cat([piece[name] for piece in columns], dim=-1) for name in columns[0]}
    return local, joined, torch.cat(starts)


def _survey(algorithm: Algorithm, chunk: Chunk) -> Tree:
    """Let each client look at all of its samples at once."""
    ((_, where),) = blocks(chunk.sizes, int(chunk.sizes.max()), chunk.starts.device)
    stacked = vmap(algorithm.survey, in_dims=(chunk.shared_dim, 0, 0, 0, 0))
    found: Tree = stacked(chunk.shared, chunk.personal, *chunk.read(where), where.mask)
    return found


def _padded_scores(algorithm: Algorithm, chunk: Chunk, flat: Tree | None, rows: int) -> tuple[Tree, Tensor]:
    """Return the chunk's scores padded to its largest client, ``[c, ..., n]``, and their mask ``[c, n]``."""
    ((_, where),) = blocks(chunk.sizes, int(chunk.sizes.max()), chunk.starts.device)
    if flat is not None:
        index = (chunk.places[:, None] + where.positions).flatten()
        # [..., N] -> [..., c, n] -> [c, ..., n]
        return tree_map(
            lambda leaf: leaf.index_select(-1, index).unflatten(-1, where.positions.shape).movedim(-2, 0), flat
        ), where.mask
    if type(algorithm).score is Algorithm.score:
        return {}, where.mask
    stacked = vmap(algorithm.score, in_dims=(chunk.shared_dim, 0, 0))
    pieces: list[Tree] = []
    for num_active, block in blocks(chunk.sizes, max(1, rows // len(chunk.sizes)), chunk.starts.device):
        shared, _ = chunk.active(num_active)
        piece = stacked(shared, *chunk.read(block))
        missing = len(chunk.sizes) - num_active
        pieces.append(tree_map(lambda leaf, k=missing: torch.cat([leaf, leaf.new_zeros(k, *leaf.shape[1:])]), piece))
    return {name: torch.cat([piece[name] for piece in pieces], dim=-1) for name in pieces[0]}, where.mask

"""What a device has to offer: how much memory, and what running out of it looks like."""

import gc
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from fedem.core.memory import free_host_bytes

_MOST_ON_CPU = 2 << 30  # more clients at once gain nothing there: what they work on leaves the caches


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be had on ``device``."""
    if device.type == "cuda":
        # What torch holds but does not use counts as free.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return free_host_bytes()


def peak_bytes(device: torch.device) -> dict[str, int]:
    """Return the most memory that this process has held: of the machine's and, if there is one, of the GPU's."""
    import resource

    # Linux counts in KiB, macOS in bytes.
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    gpu = {"peak_gpu_bytes": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}
    return {"peak_host_bytes": host} | gpu


def budget(device: torch.device) -> int:
    """Return the bytes that clients who train together may take: a share of what is free."""
    free = free_bytes(device)
    # Recordings on a GPU keep what they compute with to themselves, beside what is called plainly.
    return int(0.4 * free) if device.type == "cuda" else min(free // 4, _MOST_ON_CPU)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` of the CPU on a device, without waiting until that has done all that it has still to do."""
    return tensor.to(device, non_blocking=True)


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair to the first, on a GPU by a few launches for all of them."""
    alike: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for place, leaf in pairs:
        places, leaves = alike.setdefault(leaf.dtype, ([], []))
        places.append(place)
        leaves.append(leaf)
    for places, leaves in alike.values():
        torch._foreach_copy_(places, leaves)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Say whether torch failed for want of memory, on a GPU or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def release(device: torch.device) -> None:
    """Let go of what is no longer used; to be called once the error of a shortage, which holds on to it, is gone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

"""Whom peers refuse: names that are taken, states of another run, and numbers that are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peering import Deployment, Member, Threads, as_group, work_together
from torch import Tensor

from fedem.core.errors import UserError
from fedem.deploy.peers.group import PeersChangedError
from fedem.deploy.peers.meeting import AgentFolder
from fedem.deploy.peers.work import Peer, Task


def clash(deployment: Deployment, groups: Sequence[Member], names: Sequence[str]) -> list[Exception]:
    """Let peers of one client each meet, none of which gets through; returns what each fails with."""
    members = [Task(deployment.plan, deployment.data, (name,), deployment.state, print).open() for name in names]

    def run(rank: int) -> Exception:
        agent = AgentFolder(deployment.state.parent / f"clash{rank}", 0, 1)
        agent.path.mkdir()
        with pytest.raises((UserError, PeersChangedError)) as caught:
            Peer(as_group(groups[rank]), members[rank], agent, print).run_rounds()
        return caught.value

    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(run, range(len(names))))


def test_a_refused_process_hears_why_and_the_others_meet_again(tmp_path: Path) -> None:
    threads = Threads(2)
    groups = [Member(threads, rank) for rank in range(2)]
    first, second = clash(Deployment(tmp_path, 2), groups, ["ann", "ann"])
    assert isinstance(first, PeersChangedError)
    assert isinstance(second, UserError)
    assert "'ann'" in str(second)


def test_an_old_state_among_fresh_ones_is_refused(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, 4)
    work_together(deployment, [["ann"]], tmp_path)
    path = next(deployment.state.glob("*/ann.safetensors"))
    replace(deployment.kept("ann"), round=2).save(path)
    threads = Threads(3)
    ann, *others = clash(deployment, [Member(threads, rank) for rank in range(3)], ["ann", "bob", "cem"])
    assert isinstance(ann, UserError)
    assert str(path.parent) in str(ann)
    assert all(isinstance(error, PeersChangedError) for error in others)


def test_a_run_has_its_name_before_anything_is_kept(tmp_path: Path) -> None:
    deployment, agent = Deployment(tmp_path, 1), AgentFolder(tmp_path, 0, 1)
    members = Task(deployment.plan, deployment.data, ("ann",), deployment.state, print).open()
    agent.write("run", "the run of a worker before")
    Peer(as_group(Member(Threads(1), 0)), members, agent, print).run_rounds()
    assert deployment.kept("ann").run == "the run of a worker before"


class Spoiler(Member):
    """Sends what is no number, and is gone."""

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        spoilt = {rank: torch.full_like(buffer.view(torch.float32), torch.nan) for rank, buffer in outgoing.items()}
        super().exchange({rank: values.view(torch.uint8) for rank, values in spoilt.items()}, incoming)
        raise PeersChangedError("gone")


def test_a_neighbour_that_sends_no_numbers_is_named(tmp_path: Path) -> None:
    deployment, threads = Deployment(tmp_path, 2), Threads(2)
    ann, _ = clash(deployment, [Member(threads, 0), Spoiler(threads, 1)], ["ann", "bob"])
    assert isinstance(ann, UserError)
    assert "'bob'" in str(ann)
    assert "finite" in str(ann)
    assert not list(deployment.state.glob("*/ann.safetensors"))

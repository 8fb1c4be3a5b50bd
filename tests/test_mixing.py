from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedem.mixing.alone import Alone
from fedem.mixing.base import Mixing
from fedem.mixing.star import Star


def _uploads(count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"w": torch.randn(count, 2, 3, dtype=torch.float64, generator=generator), "steps": torch.arange(count)}


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6))
def test_a_star_averages_by_samples(sizes: list[int]) -> None:
    uploads, counts = _uploads(len(sizes)), torch.tensor(sizes)
    mixing = Star().plan(torch.arange(len(sizes)), counts)
    shared = {"w": torch.zeros(1, 2, 3, dtype=torch.float64), "steps": torch.zeros(1, dtype=torch.int64)}
    mixed = mixing.apply(shared, [(torch.arange(len(sizes)), uploads)])
    expected = (uploads["w"] * counts[:, None, None]).sum(0) / counts.sum()
    torch.testing.assert_close(mixed["w"][0], expected)
    assert mixed["steps"].tolist() == [len(sizes) - 1]  # a counter is not averaged


def test_uploads_may_come_in_pieces_and_in_any_order() -> None:
    uploads, sizes = _uploads(5), torch.tensor([4, 1, 7, 2, 2])
    shared = {name: torch.zeros_like(leaf[:1]) for name, leaf in uploads.items()}
    mixing = Star().plan(torch.arange(5), sizes)
    whole = mixing.apply(shared, [(torch.arange(5), uploads)])
    pieces = [(torch.tensor(index), {n: leaf[index] for n, leaf in uploads.items()}) for index in ([3, 1], [4], [0, 2])]
    for name, leaf in mixing.apply(shared, pieces).items():
        torch.testing.assert_close(leaf, whole[name])


def test_alone_replaces_the_own_tree_and_nothing_else() -> None:
    uploads = _uploads(2)
    shared = {"w": torch.ones(4, 2, 3, dtype=torch.float64), "steps": torch.zeros(4, dtype=torch.int64)}
    cohort = torch.tensor([3, 1])
    mixed = Alone().plan(cohort, torch.tensor([5, 6])).apply(shared, [(torch.arange(2), uploads)])
    assert torch.equal(mixed["w"][[3, 1]], uploads["w"])
    assert torch.equal(mixed["w"][[0, 2]], shared["w"][[0, 2]])
    assert Alone().reads(cohort).tolist() == [3, 1]


def test_alone_keeps_a_diverged_client_to_itself() -> None:
    uploads = {"w": torch.tensor([[1.0], [float("inf")]])}
    shared = {"w": torch.zeros(2, 1)}
    mixed = (
        Alone()
        .plan(torch.arange(2), torch.ones(2))
        .apply(shared, [(torch.tensor([0]), {"w": uploads["w"][:1]}), (torch.tensor([1]), {"w": uploads["w"][1:]})])
    )
    assert mixed["w"].flatten().tolist() == [1.0, float("inf")]


def test_any_matrix_mixes() -> None:
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.25, 0.75]], dtype=torch.float64)
    uploads = {"w": torch.randn(3, 4, dtype=torch.float64)}
    mixed = Mixing(torch.tensor([2, 0]), weights).apply(
        {"w": torch.zeros(3, 4, dtype=torch.float64)}, [(torch.arange(3), uploads)]
    )
    torch.testing.assert_close(mixed["w"][[2, 0]], weights @ uploads["w"])
    assert torch.equal(mixed["w"][1], torch.zeros(4, dtype=torch.float64))


def test_counters_of_several_groups_whose_members_come_one_by_one() -> None:
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    uploads = torch.tensor([-3, 4, -7])
    shared = {"steps": torch.tensor([-9, -8])}
    pieces = [(torch.tensor([c]), {"steps": uploads[c : c + 1]}) for c in range(3)]
    assert Mixing(torch.arange(2), weights).apply(shared, pieces)["steps"].tolist() == [4, -7]


def test_messages_and_groups() -> None:
    cohort = torch.arange(7)
    assert (Star().num_messages(cohort), Alone().num_messages(cohort)) == (7, 0)
    assert (Star().num_groups(9), Alone().num_groups(9)) == (1, 9)
    assert (Star().group_for_unseen(), Alone().group_for_unseen()) == (0, None)

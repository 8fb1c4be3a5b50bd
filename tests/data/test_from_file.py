"""A federation from a user's own file: every sample reaches its client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sample_files import (
    CLIENTS,
    INPUTS,
    TARGETS,
    write_csv,
    write_npz,
    write_samples_csv,
    write_samples_npz,
    write_samples_parquet,
)
from shops import make_shops, write_shops

from fedem.core.errors import UserError
from fedem.data import FromFile
from fedem.data.federation import PARTS, Federation
from fedem.data.partitions import Natural, Uniform


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    return write_samples_npz(tmp_path)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_samples_csv(tmp_path)


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    return write_samples_parquet(tmp_path)


def samples_of(federation: Federation) -> set[tuple[Any, ...]]:
    """All samples as (client, target, input, ...), whatever part they are in."""
    return {
        (name, target, *row)
        for part in PARTS
        for position, name in enumerate(federation.names)
        for row, target in zip(*(x.tolist() for x in federation.part(part).client(position)), strict=True)
    }


EXPECTED = {
    (client, target, *row)
    for client, target, row in zip(CLIENTS.tolist(), TARGETS.tolist(), INPUTS.tolist(), strict=True)
}


class TestFromFile:
    @pytest.mark.parametrize("kind", ["npz", "table", "parquet"])
    def test_every_sample_reaches_its_client(self, kind: str, request: pytest.FixtureRequest) -> None:
        federation, truth = FromFile(path=str(request.getfixturevalue(kind)), standardize=False).make(0)[:2]
        assert truth is None
        assert federation.names == ("ann", "bob")
        assert samples_of(federation) == EXPECTED

    def test_tables_of_any_kind_are_split_alike(self, table: Path, parquet: Path) -> None:
        first, second = (FromFile(path=str(path)).make(3).federation for path in (table, parquet))
        for part in PARTS:
            assert torch.equal(first.part(part).inputs, second.part(part).inputs)
            assert torch.equal(first.part(part).targets, second.part(part).targets)

    @pytest.mark.parametrize("kind", ["csv", "npz"])
    def test_the_order_of_rows_plays_no_part(self, tmp_path: Path, kind: str) -> None:
        rows = make_shops(12)
        found = []
        for name, some in (("forth", rows), ("back", rows[::-1])):
            path = tmp_path / f"{name}.{kind}"
            if kind == "csv":
                write_shops(path, some)
            else:
                x = [[row["price"], row["temperature"]] for row in some]
                write_npz(path, x=x, sold=[row["sold"] for row in some], shop=[row["shop"] for row in some])
            source = FromFile(path=str(path), target_column="sold", client_column="shop", standardize=False)
            found.append(source.make(1).federation)
        for part in PARTS:
            forth, back = (
                {(name, *row) for t, name in enumerate(one.names) for row in one.part(part).client(t).inputs.tolist()}
                for one in found
            )
            assert forth == back

    def test_the_encoding_is_part_of_the_fingerprint(self, table: Path) -> None:
        found = [FromFile(path=str(table), standardize=standardize).make(0) for standardize in (True, False)]
        assert found[0].federation.fingerprint != found[1].federation.fingerprint
        assert found[0].partition_hash == found[1].partition_hash
        assert found[0].label_names == ("0", "1", "2")

    def test_it_says_what_it_was_fitted_with(self, tmp_path: Path) -> None:
        path = write_shops(tmp_path / "shops.csv", make_shops(6))
        data = FromFile(path=str(path), target_column="sold", client_column="shop")
        made = data.make(3, unseen=0.25)
        assert (made.seed, made.unseen) == (3, 0.25)
        assert (data.make(3).seed, data.make(3).unseen) == (3, 0.0)

    def test_the_seed_decides_the_split(self, tmp_path: Path) -> None:
        path = write_npz(tmp_path / "samples.npz", x=np.arange(40.0)[:, None], y=np.arange(40), client=["ann"] * 40)
        first, again, other = (FromFile(path=str(path)).make(seed).federation.test.targets for seed in (0, 0, 1))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_shares_take_effect(self, tmp_path: Path) -> None:
        path = write_npz(tmp_path / "samples.npz", x=np.ones((10, 1)), y=np.arange(10), client=["ann"] * 10)
        federation = FromFile(path=str(path), validation=0.1, test=0.4).make(0).federation
        assert [len(federation.part(part)) for part in PARTS] == [5, 1, 4]

    def test_columns_take_effect(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "samples.csv", "x,label,hospital", "1,0,ann", "2,1,bob")
        source = FromFile(path=str(path), target_column="label", client_column="hospital", standardize=False)
        assert samples_of(source.make(0).federation) == {("ann", 0, 1.0), ("bob", 1, 2.0)}

    def test_a_partition_may_deal_the_rows_anew(self, table: Path) -> None:
        made = FromFile(path=str(table), standardize=False).make(0, Uniform(num_clients=3))
        assert made.federation.names == ("0", "1", "2")
        assert {row[1:] for row in samples_of(made.federation)} == {row[1:] for row in EXPECTED}
        assert made.partition_hash

    def test_a_table_without_clients_needs_such_a_partition(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "samples.csv", "a,y", "1,0", "2,1", "3,0")
        assert FromFile(path=str(path)).make(0, Uniform(num_clients=2)).federation.num_clients == 2
        for partition in (None, Natural()):
            with pytest.raises(UserError, match=r"samples\.csv has no column 'client'"):
                FromFile(path=str(path)).make(0, partition)

    @pytest.mark.parametrize("dtype", [np.uint8, np.float32])
    def test_arrays_stay_as_they_are(self, tmp_path: Path, dtype: type) -> None:
        images = np.arange(48).reshape(6, 2, 4).astype(dtype)
        path = write_npz(tmp_path / "samples.npz", x=images, y=TARGETS, client=CLIENTS)
        made = FromFile(path=str(path)).make(0).federation
        assert made.train.pool.inputs.numpy().dtype == dtype
        assert np.array_equal(made.train.pool.inputs.numpy(), images)

    def test_numbers_may_stay_as_they_are(self, table: Path) -> None:
        made = FromFile(path=str(table), standardize=False).make(0).federation
        assert made.train.pool.inputs.tolist() == INPUTS.tolist()
        for position, name in enumerate(made.names):
            parts = [made.part(part).take(torch.tensor([position])).rows for part in PARTS]
            assert sorted(torch.cat(parts).tolist()) == np.flatnonzero(name == CLIENTS).tolist()

    @pytest.mark.parametrize(("header", "missing"), [("a,b,client", "y"), ("a,b,y", "client"), ("a,b,target", "y")])
    def test_a_missing_column_is_named_in_csv(self, tmp_path: Path, header: str, missing: str) -> None:
        path = write_csv(tmp_path / "samples.csv", header, "1,2,0")
        with pytest.raises(UserError, match=rf"samples\.csv has no column '{missing}'"):
            FromFile(path=str(path)).make(0)

    @pytest.mark.parametrize(("present", "missing"), [("client", "y"), ("y", "client")])
    def test_a_missing_array_is_named_in_npz(self, tmp_path: Path, present: str, missing: str) -> None:
        path = write_npz(tmp_path / "samples.npz", x=INPUTS, **{present: TARGETS})
        with pytest.raises(UserError, match=rf"samples\.npz has no column '{missing}'"):
            FromFile(path=str(path)).make(0)

    def test_npz_inputs_that_are_not_finite_name_their_client(self, tmp_path: Path) -> None:
        inputs = INPUTS.copy()
        inputs[4] = np.nan
        path = write_npz(tmp_path / "samples.npz", x=inputs, y=TARGETS, client=CLIENTS)
        with pytest.raises(UserError, match="Client 'bob' has NaN or infinite inputs, first in row 4"):
            FromFile(path=str(path)).make(0)

    def test_npz_targets_that_are_not_finite_are_named(self, tmp_path: Path) -> None:
        for value, message in ((np.nan, r"1 in column 'y' \(first: .*, row 4\)"), (np.inf, "row 4, column 'y': inf")):
            targets = TARGETS.astype(float)
            targets[4] = value
            path = write_npz(tmp_path / "samples.npz", x=INPUTS, y=targets, client=CLIENTS)
            with pytest.raises(UserError, match=message):
                FromFile(path=str(path)).make(0)

    def test_an_archive_without_rows_is_refused(self, tmp_path: Path) -> None:
        path = write_npz(tmp_path / "samples.npz", x=INPUTS[:0], y=TARGETS[:0], client=CLIENTS[:0])
        with pytest.raises(UserError, match=r"'x' has shape .0, 2., which holds nothing; allowed: at least one row"):
            FromFile(path=str(path)).make(0)

    def test_shares_that_leave_nothing_are_refused(self, npz: Path) -> None:
        with pytest.raises(UserError, match=r"are 0\.6 and 0\.5; allowed"):
            FromFile(path=str(npz), validation=0.6, test=0.5).make(0)

    @pytest.mark.parametrize("key", ["validation", "test"])
    @pytest.mark.parametrize("value", [-0.1, 1.0, float("nan"), "half"])
    def test_a_share_out_of_range_is_refused(self, key: str, value: Any) -> None:
        with pytest.raises(UserError, match=rf"FromFile\.{key} is {value!r}; allowed"):
            FromFile(path="samples.csv", **{key: value})

    @pytest.mark.parametrize("name", ["third", "y"])
    def test_columns_to_ignore_must_be_there(self, table: Path, name: str) -> None:
        with pytest.raises(UserError, match=rf"data\.ignore names '{name}'; allowed: first, second"):
            FromFile(path=str(table), ignore=f"first,{name}").make(0)

    def test_a_path_is_needed(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"data\.path is empty"):
            FromFile().make(0)
        with pytest.raises(UserError, match=r"There is no file .*missing\.csv"):
            FromFile(path=str(tmp_path / "missing.csv")).make(0)

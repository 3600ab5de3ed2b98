"""``paraft table`` beside a running job, and tables whose rows come late, go and are narrow."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

import paraft  # noqa: E402
import paraft.torch  # noqa: E402
from torch import nn  # noqa: E402

COUNTS = {"kind": "sgd", "lr": 1.0}


class Counts:
    """A job whose rows count the steps that name them."""

    def __init__(self, fleet: Any, **options: Any) -> None:
        options = {"max_rows": 1000, "optimizer": COUNTS, "init": {"kind": "zeros"}, "partitions": 3, **options}
        self.table = paraft.torch.Table("items", 2, **options)
        self.model = nn.ModuleDict({"rows": paraft.torch.Embedding(self.table), "dense": nn.Linear(1, 1)})
        self.run = paraft.init(fleet, name="shop")
        self.optimizer = torch.optim.SGD(self.model["dense"].parameters(), lr=0.1)
        self.run.prepare(self.model, self.optimizer)
        self.servers = ",".join(fleet.servers)

    def step(self, *ids: int) -> None:
        rows = self.model["rows"](torch.tensor(ids))
        (-rows.sum() + self.model["dense"](torch.ones(1)).sum()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def rows(self, *ids: int) -> list[float]:
        found: list[float] = self.table.rows(torch.tensor(ids))[:, 0].tolist()
        return found

    def asks(self, *args: Any, code: int = 0) -> str:
        command = [os.environ["PARAFT_PROGRAM"], "table", *map(str, args), "--fleet", self.servers]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout if code == 0 else done.stderr


def exported(folder: Path) -> tuple[dict[int, Any], set[int]]:
    tensors = safetensors.load_file(folder / "table-items.safetensors")
    removed = safetensors.load_file(folder / "removed.safetensors")["ids"]
    return dict(zip(tensors["ids"].tolist(), tensors["weights"])), set(removed.tolist())


def test_rows_are_shown_exported_removed_and_imported_while_the_job_trains(start_fleet: Any, tmp_path: Path) -> None:
    job = Counts(start_fleet(3))
    job.step(*range(10))
    assert "items" in job.asks("ls", "shop")
    shown = [json.loads(line) for line in job.asks("get", "shop", "items", 3, 500, "--json").splitlines()]
    assert [(row["id"], row["updates"], row["weights"]) for row in shown] == [(3, 1, [1, 1]), (500, 0, [0, 0])]
    assert "10 rows, 0 removed" in job.asks("export", "shop", "items", "--to", tmp_path / "all")
    rows, removed = exported(tmp_path / "all")
    assert {k: v.tolist() for k, v in rows.items()} == {i: [1, 1] for i in range(10)} and not removed

    job.step(*range(5, 15))
    assert "1 of 2 ids had a row" in job.asks("evict", "shop", "items", 0, 500)
    assert job.rows(0, 1, 5, 14) == [0, 1, 2, 1]
    assert "10 changed rows, 1 removed" in job.asks("export", "shop", "items", "--to", tmp_path / "more", "--since", tmp_path / "all")
    rows, removed = exported(tmp_path / "more")
    assert set(rows) == set(range(5, 15)) and removed == {0} and rows[5].tolist() == [2, 2]
    top = [json.loads(line) for line in job.asks("top", "shop", "items", "-n", 2, "--json").splitlines()]
    assert [(row["id"], row["updates"]) for row in top] == [(5, 2), (6, 2)]

    assert "10 of 10 rows written, 0 removed" in job.asks("import", "shop", "items", "--from", tmp_path / "all")
    assert job.rows(0, 5, 9, 14) == [1, 1, 1, 1]
    assert "10 of 10 rows written, 1 removed" in job.asks("import", "shop", "items", "--from", tmp_path / "more")
    assert job.rows(0, 5, 9, 14) == [0, 2, 2, 1]
    job.step(0)
    assert job.rows(0) == [1], "training continues"

    for args, code, words in (
        (("get", "shop", "users", 1), 78, "no table `users`; its tables: items"),
        (("get", "shopp", "items", 1), 78, "shopp"),
        (("export", "shop", "items", "--to", tmp_path / "all"), 65, "is there already"),
        (("export", "shop", "items", "--to", tmp_path / "new", "--since", tmp_path), 65, "no export of a table"),
        (("import", "shop", "items", "--from", tmp_path), 65, "no export of a table"),
        (("evict", "shop", "items", "-1"), 2, "-1"),
    ):
        assert words in job.asks(*args, code=code)
    file = tmp_path / "all" / "table-items.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    assert "not as it was written" in job.asks("import", "shop", "items", "--from", tmp_path / "all", code=65)
    assert not list(tmp_path.glob(".tmp*"))
    job.run.finish()


def test_an_id_becomes_a_row_when_it_was_named_often_enough(start_fleet: Any) -> None:
    job = Counts(start_fleet(3), min_count=3)
    for _ in range(5):
        job.step(7)
    job.step(8)
    assert job.rows(7, 8) == [3, 0], "the third update is the row's first"
    status = subprocess.run(
        [os.environ["PARAFT_PROGRAM"], "status", "--json", "--fleet", job.servers], capture_output=True, text=True, check=True
    )
    replies = [json.loads(line) for line in status.stdout.splitlines()]
    led = [s for r in replies for s in r.get("shards", []) if s["role"] == "leader"]
    assert sum(t["too_rare"] for s in led for t in s["tables"]) == 3
    assert sum(t["rows"] for s in led for t in s["tables"]) == 1
    job.run.finish()


def test_rows_that_no_step_names_expire_and_start_again(start_fleet: Any) -> None:
    job = Counts(start_fleet(1), expire={"after": 5, "norm_below": 1.5})
    job.step(1, 2)
    job.step(2)
    for _ in range(12):
        job.step(3)
    assert job.rows(1, 2, 3) == [0, 2, 12], "1 has expired; the norm of 2 is too large"
    job.step(1)
    assert job.rows(1) == [1]
    job.run.finish()


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_many_small_updates_of_a_narrow_row_add_up(dtype: str, start_fleet: Any) -> None:
    job = Counts(start_fleet(3), dtype=dtype)
    job.step(*range(64))
    job.table.lr = 2.0**-12  # behind 1.0 a bf16 has steps of 2^-7, an f16 of 2^-10
    for _ in range(200):
        job.step(*range(64))
    mean = sum(job.rows(*range(64))) / 64
    assert abs(mean - 1 - 200 / 4096) < 0.01, mean
    rows = job.table.rows(torch.arange(64))
    assert torch.equal(rows, rows.to({"bf16": torch.bfloat16, "f16": torch.float16}[dtype]).float())
    job.run.finish()

"""A small recommender over one table, its batches, and rules of rows written naively: for the tests of tables."""

from __future__ import annotations

import math
from typing import Any, Optional

import paraft
import paraft.torch
import torch
from torch import nn

torch.set_num_threads(1)

IDS, DIM, BAGS = 40, 4, 6
SGD = {"kind": "sgd", "lr": 0.5}
#: An id that the servers must not take for a number of a row.
FAR = 2**62

#: What is trained: the layer's options, the table's optimizer, and what is special about its batches.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "sum": ({"mode": "sum"}, {"kind": "sgd", "lr": 0.5}, ""),
    "mean": ({"mode": "mean"}, {"kind": "adagrad", "lr": 0.1}, ""),
    "max": ({"mode": "max"}, {"kind": "sgd", "lr": 0.5}, ""),
    "weighted": ({"mode": "sum", "include_last_offset": True}, {"kind": "adagrad", "lr": 0.1}, "weights"),
    "padding": ({"mode": "mean", "padding_idx": 3}, {"kind": "sgd", "lr": 0.5}, ""),
    "padding max": ({"mode": "max", "padding_idx": 3}, {"kind": "adagrad", "lr": 0.1}, ""),
    "all rows": ({"mode": "sum"}, {"kind": "adam", "lr": 0.01}, "all"),
    "some rows": ({"mode": "sum"}, {"kind": "adam", "lr": 0.01}, ""),
    "rowwise": ({"mode": "sum"}, {"kind": "rowwise-adagrad", "lr": 0.1}, ""),
    "ftrl": ({"mode": "sum"}, {"kind": "ftrl", "lr": 0.5, "l1": 0.01, "l2": 0.1}, ""),
    "embedding": ({"padding_idx": 5}, {"kind": "sgd", "lr": 0.5}, "twice"),
    "accumulated": ({"mode": "sum"}, {"kind": "adagrad", "lr": 0.1}, "accumulated"),
    "far ids": ({"mode": "mean"}, {"kind": "sgd", "lr": 0.5}, "far"),
}


def table(case: str) -> paraft.torch.Table:
    """Its table, named as the case is."""
    rule = CASES[case][1]
    init = {"kind": "zeros"} if rule["kind"] == "ftrl" else {"kind": "normal", "std": 0.3}
    return paraft.torch.Table(case.replace(" ", "-"), DIM, max_rows=1000, optimizer=rule, init=init, seed=2, partitions=3)


class Net(nn.Module):
    """A layer of rows, and dense layers over it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        torch.manual_seed(1)
        self.dense = nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, b: dict[str, Any]) -> torch.Tensor:
        if "other" in b:
            return self.dense(self.layer(b["ids"]).sum(1) - self.layer(b["other"]).sum(1))
        weights = {"per_sample_weights": b["weights"]} if "weights" in b else {}
        return self.dense(self.layer(b["ids"], b["offsets"], **weights))


def ours(case: str) -> tuple[paraft.torch.Table, Net]:
    made = table(case)
    options = CASES[case][0]
    return made, Net(paraft.torch.EmbeddingBag(made, **options) if "mode" in options else paraft.torch.Embedding(made, **options))


def batch(case: str, rank: int, step: int, far: bool = False) -> dict[str, Any]:
    """The minibatch of a worker: bags of few ids, some empty, some with repeated ids. ``far``: their ids are large."""
    (options, _, special), g = CASES[case], torch.Generator().manual_seed(1000 * step + rank)
    target = torch.randn(BAGS, 1, generator=g)
    if special == "twice":
        ids = torch.randint(0, IDS, (2, BAGS, 3), generator=g)
        return {"ids": ids[0], "other": ids[1], "target": target}
    lengths = torch.tensor([2, 0, 5, 1, 0, 3])
    ids = torch.randint(0, IDS // 4, (int(lengths.sum()),), generator=g)
    if special == "all":
        lengths[0] += IDS
        ids = torch.cat([torch.arange(IDS), ids])
    ends = lengths.cumsum(0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    b = {"ids": ids + FAR if far else ids, "offsets": offsets if options.get("include_last_offset") else offsets[:-1], "target": target}
    if special == "weights":
        b["weights"] = torch.randn(len(ids), generator=g)
    return b


def loss(m: Any, b: dict[str, Any]) -> torch.Tensor:
    return ((m(b) - b["target"]) ** 2).mean()


class Lazily:
    """Steps the rows that a step has named, each value by the published formula, with a row's own number of updates."""

    def __init__(self, weight: nn.Parameter, rule: dict[str, Any]) -> None:
        self.weight, self.rule = weight, rule
        self.a, self.b = torch.zeros_like(weight), torch.zeros_like(weight)
        self.updates = [0] * len(weight)

    def step(self, ids: set[int]) -> None:
        kind, lr = self.rule["kind"], self.rule["lr"]
        with torch.no_grad():
            for i in ids:
                w, g, a, b = (x[i] for x in (self.weight, self.weight.grad, self.a, self.b))
                self.updates[i] += 1
                if kind == "adam":
                    a.mul_(0.9).add_(0.1 * g)
                    b.mul_(0.999).add_(0.001 * g * g)
                    one, two = 1 - 0.9 ** self.updates[i], 1 - 0.999 ** self.updates[i]
                    w.sub_(lr / one * a / (b.sqrt() / math.sqrt(two) + 1e-8))
                elif kind == "rowwise-adagrad":
                    a.add_((g * g).mean())
                    w.sub_(lr * g / (a.sqrt() + 1e-8))
                else:
                    n = b + g * g
                    a.add_(g - (n.sqrt() - b.sqrt()) / lr * w)
                    b.copy_(n)
                    beyond = a.abs() - self.rule["l1"]
                    w.copy_(torch.where(beyond <= 0, 0.0, -a.sign() * beyond / ((1 + n.sqrt()) / lr + self.rule["l2"])))


def trained_by_torch(case: str, rows: torch.Tensor, workers: int, steps: int, rates: Optional[list[float]] = None) -> tuple[torch.Tensor, Net]:
    """The rows and the model that one process has after these steps on the batches of all workers."""
    options, rule, special = CASES[case]
    kind = rule["kind"]
    # Torch's largest values have no sparse gradient.
    if "mode" in options:
        layer: Any = nn.EmbeddingBag(IDS, DIM, sparse=options["mode"] != "max" and kind in ("sgd", "adagrad") or case == "all rows", **options)
    else:
        layer = nn.Embedding(IDS, DIM, sparse=True)
    m = Net(layer)
    layer.weight.data.copy_(rows)
    makes = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    if case == "all rows":
        o: Any = torch.optim.SparseAdam([layer.weight], lr=rule["lr"])
    elif kind in makes:
        o = makes[kind]([layer.weight], lr=rule["lr"])
    else:
        o = Lazily(layer.weight, rule)
    dense = torch.optim.SGD(m.dense.parameters(), lr=0.1)
    for step in range(steps):
        named: set[int] = set()
        for rank in range(workers):
            passes = [batch(case, rank, step), batch(case, rank, step + 500)] if special == "accumulated" else [batch(case, rank, step)]
            for b in passes:
                named |= set(b["ids"].flatten().tolist())
                (own(m, b) / workers).backward()
        if rates:
            o.param_groups[0]["lr"] = rates[step]
        o.step(named) if isinstance(o, Lazily) else o.step()
        dense.step()
        m.zero_grad()
    return layer.weight.detach(), m


def own(m: Net, b: dict[str, Any]) -> torch.Tensor:
    """The loss in torch alone, whose layer has no zeros for padding unless its row has them."""
    padding = getattr(m.layer, "padding_idx", None) if isinstance(m.layer, nn.EmbeddingBag) else 5
    if "other" in b and padding is not None:
        def found(ids: torch.Tensor) -> torch.Tensor:
            return (m.layer(ids) * (ids != padding).unsqueeze(-1)).sum(1)

        return ((m.dense(found(b["ids"]) - found(b["other"])) - b["target"]) ** 2).mean()
    return loss(m, b)


def new(fleet: paraft.Fleet, layer: Any = paraft.torch.EmbeddingBag, *, prepare: Optional[dict[str, Any]] = None, **of: Any) -> Any:
    """The only worker of a job: its run, table, model and optimizer."""
    of = {"max_rows": 1000, "optimizer": SGD, "init": {"kind": "normal", "std": 0.3}, **of}
    table = paraft.torch.Table("t", DIM, **of)
    torch.manual_seed(0)
    m = nn.Sequential(layer(table), nn.Linear(DIM, 1))
    o = torch.optim.SGD(m.parameters(), lr=0.1)
    run = paraft.init(fleet)
    run.prepare(m, o, **(prepare or {}))
    return run, table, m, o

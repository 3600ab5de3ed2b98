"""Seconds of training until a model of the computed clicks (examples/clicks.py) has 0.95 of what there is to learn.

    paraft launch --workers 2 --mode asp clicks_time.py paraft
    python clicks_time.py torch                                   # `torch dense`: gradients of the whole table
    pip install vowpalwabbit && python clicks_time.py vw          # `vw -q ::`: with more of its arguments

A factorisation machine with Paraft's table, and in one process of PyTorch with two threads, and a logistic regression of
Vowpal Wabbit. Samples are in memory before the clock starts; Vowpal Wabbit reads its as text. At every 50,000th sample the
weights are kept, with the clock stopped, and judged later: by the AUC of 100,000 other samples, less 0.5, of the teacher's."""

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import paraft.data
import torch

warnings.filterwarnings("ignore")
SAMPLES, TEST, BATCH, FACTORS, EVERY, AIM = 2_000_000, 100_000, 256, 8, 50_000, 0.95
STREAM: dict[str, Any] = {"max_categories": 20, "drift": 0.0}
TRAIN, HELD = paraft.data.clicks(SAMPLES, **STREAM), paraft.data.clicks(TEST, first=SAMPLES, **STREAM)
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Scores = list[tuple[float, int, Any]]  # seconds and samples of training; what the model then says of HELD


def batch(data: paraft.data.Samples, indices: range) -> Batch:
    """Ids, plain values and labels."""
    of = data.batch(indices)
    ids = np.stack([field.ids for field in of.fields], 1)
    return torch.from_numpy(ids), torch.from_numpy(of.dense), torch.from_numpy(of.labels)


IDS = batch(TRAIN, range(EVERY))[0].unique()


class Machine(torch.nn.Module):
    """A row has factors and, last, a weight."""

    def __init__(self, rows: torch.nn.Module) -> None:
        super().__init__()
        self.rows, self.dense = rows, torch.nn.Linear(13, 1)

    def score(self, rows: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        vectors = rows[..., :FACTORS]
        pairs = (vectors.sum(1) ** 2 - (vectors**2).sum(1)).sum(1) / 2
        score: torch.Tensor = self.dense(dense).squeeze(-1) + rows[..., FACTORS].sum(1) + pairs
        return score

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        return self.score(self.rows(ids), dense)


def train(model: Machine, optimizer: Any, batches: list[Batch], soon: Any, rows: Callable[[], torch.Tensor]) -> Scores:
    """The clock is that of this process; `rows` gives the rows of IDS, `soon` is told the next batch's ids."""
    kept, due, began = [], EVERY, time.perf_counter()
    for i, (ids, dense, labels) in enumerate(batches):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids, dense), labels)
        optimizer.zero_grad()
        loss.backward()
        if i + 1 < len(batches):
            soon(batches[i + 1][0])
        optimizer.step()
        if (i + 1) * BATCH >= due or i + 1 == len(batches):
            now = time.perf_counter()
            weights = {name: of.clone() for name, of in model.dense.state_dict().items()}
            kept.append((now - began, (i + 1) * BATCH, rows().clone(), weights))
            due, began = due + EVERY, began + time.perf_counter() - now
    ids, dense, _ = batch(HELD, range(TEST))
    places, judged = torch.searchsorted(IDS, ids), Machine(torch.nn.Identity())
    scores: Scores = []
    with torch.no_grad():
        for seconds, samples, table, weights in kept:
            judged.dense.load_state_dict(weights)
            scores.append((seconds, samples, judged.score(table[places], dense).numpy()))
    return scores


def ours() -> Scores:
    from paraft.torch import Embedding, Table

    torch.set_num_threads(1)
    run = paraft.init()
    share = BATCH // run.workers
    batches = [batch(TRAIN, range(i, i + share)) for i in range(run.rank * share, SAMPLES - BATCH + 1, BATCH)]
    table = Table("ids", FACTORS + 1, max_rows=100_000, optimizer={"kind": "adagrad", "lr": 0.1})
    model = Machine(Embedding(table))
    model, optimizer = run.prepare(model, torch.optim.Adagrad(model.parameters(), lr=0.05))
    scores = train(model, optimizer, batches, table.prefetch, lambda: table.rows(IDS))
    run.finish()
    return scores if run.rank == 0 else []


def theirs(sparse: bool) -> Scores:
    torch.set_num_threads(2)
    batches = [batch(TRAIN, range(i, i + BATCH)) for i in range(0, SAMPLES - BATCH + 1, BATCH)]
    batches = [(torch.searchsorted(IDS, ids), dense, labels) for ids, dense, labels in batches]
    table = torch.nn.Embedding(len(IDS), FACTORS + 1, sparse=sparse)
    torch.nn.init.uniform_(table.weight, -0.05, 0.05)
    model = Machine(table)
    groups = [{"params": table.parameters(), "lr": 0.1}, {"params": model.dense.parameters(), "lr": 0.05}]
    return train(model, torch.optim.Adagrad(groups), batches, lambda ids: None, lambda: table.weight.detach())


def write(path: str, data: paraft.data.Samples, indices: range) -> None:
    ids, dense, labels = batch(data, indices)
    with open(path, "w") as f:
        for places, values, label in zip(torch.searchsorted(IDS, ids).tolist(), dense.tolist(), labels.tolist()):
            plain = " ".join(f"p{i}:{v:.6g}" for i, v in enumerate(values))
            f.write(f"{1 if label else -1} | {plain} {' '.join(f'c{i}' for i in places)}\n")


def vowpal(more: list[str]) -> Scores:
    from vowpalwabbit import Workspace

    scores: Scores = []
    with tempfile.TemporaryDirectory() as folder:
        part, held, model, said = (os.path.join(folder, name) for name in ("part", "held", "model", "said"))
        write(held, HELD, range(TEST))
        seconds, begin = 0.0, f"--loss_function logistic -b 20 {' '.join(more)}"
        for first in range(0, SAMPLES, EVERY):
            write(part, TRAIN, range(first, first + EVERY))
            began = time.perf_counter()
            Workspace(f"{begin} -d {part} -f {model} --save_resume --quiet").finish()
            seconds, begin = seconds + time.perf_counter() - began, f"-i {model}"
            Workspace(f"-t -i {model} -d {held} -r {said} --quiet").finish()
            scores.append((seconds, first + EVERY, np.loadtxt(said, dtype=np.float32)))
    return scores


what = sys.argv[1]
found = ours() if what == "paraft" else theirs(sys.argv[2:] != ["dense"]) if what == "torch" else vowpal(sys.argv[2:])
if found:
    truth = HELD.batch(range(TEST)).labels
    best = (paraft.data.auc(HELD.teacher(range(TEST)), truth) or 0.5) - 0.5
    shares = [(seconds, n, ((paraft.data.auc(scores, truth) or 0.5) - 0.5) / best) for seconds, n, scores in found]
    reached = next((f"after {s:.2f} s and {n} samples" for s, n, share in shares if share >= AIM), "never")
    seconds, n, most = max(shares, key=lambda at: at[2])
    print(f"{what}: {AIM} {reached}; most {most:.4f} after {seconds:.2f} s and {n}; all took {shares[-1][0]:.2f} s")

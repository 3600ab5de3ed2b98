"""A factorisation machine over a sparse table, on the computed stream of clicks: how much it learns of what there is to learn, as in
docs/tables.md.

    paraft launch --workers 4 --mode asp examples/clicks.py

The stream's teacher is such a machine. The share is that of its AUC's distance from 0.5, the AUC of a constant.
"""

import argparse

import numpy as np
import paraft.data
import paraft.torch
import torch
from paraft.torch import Embedding, Table

parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=2_000_000)
parser.add_argument("--categories", type=int, default=20, help="the most of a field; Criteo has up to 10,131,227")
parser.add_argument("--linear", action="store_true", help="a logistic model, without factors")
args = parser.parse_args()
FACTORS, BATCH, TEST = 8, 256, 100_000  # BATCH: samples of a step, over all workers


class Machine(torch.nn.Module):
    """A row has factors and, last, a weight."""

    def __init__(self):
        super().__init__()
        adagrad = {"kind": "adagrad", "lr": 0.1}
        self.rows = Embedding(Table("ids", FACTORS + 1, max_rows=100_000, optimizer=adagrad))
        self.dense = torch.nn.Linear(13, 1)

    def forward(self, ids, dense):
        rows = self.rows(ids)
        score = self.dense(dense).squeeze(-1) + rows[..., FACTORS].sum(1)
        if not args.linear:
            vectors = rows[..., :FACTORS]
            score = score + (vectors.sum(1) ** 2 - (vectors**2).sum(1)).sum(1) / 2
        return score


def tensors(batch):
    return torch.from_numpy(np.stack([field.ids for field in batch.fields], 1)), torch.from_numpy(batch.dense)


run = paraft.init()
stream = {"max_categories": args.categories, "drift": 0.0}
train = paraft.data.clicks(args.samples, **stream)
test = paraft.data.clicks(TEST, first=args.samples, **stream)
model = Machine()
model, optimizer = run.prepare(model, torch.optim.Adagrad(model.parameters(), lr=0.05))
share = BATCH // run.workers
batches = range(run.rank * share, args.samples - BATCH + 1, BATCH)
following = train.batch(range(batches[0], batches[0] + share))
for start in batches:
    batch = following
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(*tensors(batch)), torch.from_numpy(batch.labels))
    optimizer.zero_grad()
    loss.backward()
    if start != batches[-1]:
        following = train.batch(range(start + BATCH, start + BATCH + share))
        model.rows.table.prefetch(tensors(following)[0])
    optimizer.step()
if run.rank == 0:
    scores, chances, labels = [], [], []
    with torch.no_grad():
        for start in range(0, TEST, 10_000):
            batch = test.batch(range(start, start + 10_000))
            scores.append(model(*tensors(batch)).numpy())
            labels.append(batch.labels)
            chances.append(test.teacher(range(start, start + 10_000)))
    ours, best = (paraft.data.auc(np.concatenate(of), np.concatenate(labels)) for of in (scores, chances))
    print(f"AUC {ours:.4f}, teacher {best:.4f}, share {(ours - 0.5) / (best - 0.5):.4f}", flush=True)
run.finish()

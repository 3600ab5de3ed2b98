"""Logistic regression with FTRL over a sparse table, on Criteo's click logs: AUC of docs/tables.md.

    paraft launch --workers 4 --mode asp examples/criteo.py train.tiny.csv.gz --split 1

train.tiny.csv has 1,999 rows of the Kaggle challenge of 2014: https://github.com/guestwalk/kaggle-2014-criteo
"""

import argparse

import numpy as np
import paraft.data
import paraft.torch
import torch
from paraft.torch import EmbeddingBag, Table

parser = argparse.ArgumentParser()
parser.add_argument("logs")
parser.add_argument("--split", type=int, default=1, help="the random fifth that is held out")
args = parser.parse_args()
BATCH, EPOCHS = 16, 5  # samples of a step, over all workers; passes


class LogisticRegression(torch.nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.weights = EmbeddingBag(weights, mode="sum")
        self.dense = torch.nn.Linear(13, 1)
        torch.nn.init.zeros_(self.dense.weight)
        torch.nn.init.zeros_(self.dense.bias)

    def forward(self, batch):
        ids = torch.from_numpy(np.stack([field.ids for field in batch.fields], 1))
        return (self.weights(ids) + self.dense(torch.from_numpy(batch.dense))).squeeze(-1)


run = paraft.init()
# Fields share a table: a hash of field and id keeps them apart.
train, test = paraft.data.criteo(args.logs, hash_bits=22).split(0.2, args.split)
ftrl = {"kind": "ftrl", "lr": 0.1}
model = LogisticRegression(Table("weights", 1, max_rows=100_000, partitions=4, optimizer=ftrl, init={"kind": "zeros"}))
model, optimizer = run.prepare(model, torch.optim.Adagrad(model.parameters(), lr=0.02))
draw = np.random.default_rng(args.split)
share = max(1, BATCH // run.workers)
steps = len(train) // (share * run.workers)
for _ in range(EPOCHS):
    for indices in draw.permutation(len(train))[: steps * run.workers * share].reshape(steps, run.workers, share)[:, run.rank]:
        batch = train.batch(indices)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), torch.from_numpy(batch.labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if run.rank == 0:
    with torch.no_grad():
        batch = test.batch(range(len(test)))
        print(f"split {args.split}: AUC {paraft.data.auc(model(batch).numpy(), batch.labels):.4f}", flush=True)
run.finish()

"""Logistic regression with FTRL over a sparse table, on a libsvm file: accuracy and AUC of docs/tables.md.

    paraft launch --workers 8 --mode asp examples/a9a.py a9a.gz a9a.t.gz
    paraft launch --workers 8 --mode bsp examples/a9a.py a9a.gz a9a.t.gz --rate 0.4

a9a is among the LIBSVM data sets: https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary.html
"""

import argparse

import numpy as np
import paraft.data
import paraft.torch
import torch
from paraft.torch import EmbeddingBag, Table

parser = argparse.ArgumentParser()
parser.add_argument("train")
parser.add_argument("test")
parser.add_argument("--rate", type=float, default=0.1)
args = parser.parse_args()
BATCH, EPOCHS = 16, 3  # samples a worker and step; passes


class LogisticRegression(torch.nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.weights = EmbeddingBag(weights, mode="sum", include_last_offset=True)
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, field):
        values = np.ones(len(field.ids), np.float32) if field.values is None else field.values
        ids, offsets, values = (torch.from_numpy(x) for x in (field.ids, field.offsets, values))
        return self.weights(ids, offsets, values).squeeze(-1) + self.bias


run = paraft.init()
ftrl = {"kind": "ftrl", "lr": args.rate, "l1": 0.1}
model = LogisticRegression(Table("weights", 1, max_rows=1000, partitions=4, optimizer=ftrl, init={"kind": "zeros"}))
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
train, test = paraft.data.libsvm(args.train), paraft.data.libsvm(args.test)
draw = np.random.default_rng(1)
for _ in range(EPOCHS):
    steps = len(train) // (BATCH * run.workers)
    for indices in draw.permutation(len(train))[: steps * run.workers * BATCH].reshape(steps, run.workers, BATCH)[:, run.rank]:
        batch = train.batch(indices)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch.fields[0]), torch.from_numpy(batch.labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if run.rank == 0:
    with torch.no_grad():
        batch = test.batch(range(len(test)))
        logits = model(batch.fields[0]).numpy()
    print(f"accuracy {((logits > 0) == (batch.labels > 0.5)).mean():.4f}, AUC {paraft.data.auc(logits, batch.labels):.4f}", flush=True)
run.finish()

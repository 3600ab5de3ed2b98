"""Matrix factorisation with biases over two sparse tables, on MovieLens' ratings: the error of docs/tables.md.

    paraft launch --workers 8 --mode asp examples/movielens.py ratings.csv.gz --split 1

ratings.csv is that of ml-latest-small: https://grouplens.org/datasets/movielens/latest/
"""

import argparse

import numpy as np
import paraft.data
import paraft.torch
import torch
from paraft.torch import Embedding, Table, TableOptimizer

parser = argparse.ArgumentParser()
parser.add_argument("ratings")
parser.add_argument("--split", type=int, default=1, help="the random tenth that is held out")
args = parser.parse_args()
FACTORS, BATCH, EPOCHS = 32, 1024, 60  # BATCH: samples of a step, over all workers
RATE, DECAY = 0.01, 0.1


class Factors(torch.nn.Module):
    """A row has factors and, last, a bias."""

    def __init__(self, mean):
        super().__init__()
        sgd = {"kind": "sgd", "lr": RATE}
        tables = [Table(name, FACTORS + 1, max_rows=100_000, optimizer=sgd, seed=seed) for seed, name in enumerate(("users", "items"))]
        self.users, self.items = map(Embedding, tables)
        self.mean = mean

    def forward(self, users, items):
        users, items = self.users(users), self.items(items)
        squares = (users**2).sum(1) + (items**2).sum(1)
        return self.mean + (users * items)[:, :FACTORS].sum(1) + users[:, FACTORS] + items[:, FACTORS], squares


def tensors(samples, indices):
    batch = samples.batch(indices)
    return [torch.from_numpy(of) for of in (batch.fields[0].ids, batch.fields[1].ids, batch.labels)]


run = paraft.init()
train, test = paraft.data.ratings(args.ratings).split(0.1, args.split)
model = Factors(float(train.batch(range(len(train))).labels.mean()))
model, optimizer = run.prepare(model, TableOptimizer())
draw = np.random.default_rng(args.split)
share = BATCH // run.workers
steps = len(train) // (share * run.workers)
# Each sample counts fully: a round of bsp divides by its workers.
times = run.workers if run.mode == "bsp" else 1
for _ in range(EPOCHS):
    for indices in draw.permutation(len(train))[: steps * run.workers * share].reshape(steps, run.workers, share)[:, run.rank]:
        users, items, ratings = tensors(train, indices)
        guesses, squares = model(users, items)
        loss = ((guesses - ratings) ** 2 + DECAY * squares).sum() * times / 2
        optimizer.zero_grad()
        loss.backward()
        run.log(loss.item(), len(ratings))
        optimizer.step()
if run.rank == 0:
    with torch.no_grad():
        users, items, ratings = tensors(test, range(len(test)))
        guesses, _ = model(users, items)
    print(f"split {args.split}: RMSE {float(((guesses.clamp(0.5, 5) - ratings) ** 2).mean().sqrt()):.4f}", flush=True)
run.finish()

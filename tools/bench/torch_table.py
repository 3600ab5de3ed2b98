"""PyTorch's way to train a sparse table, for `paraft bench table`: prints the seconds of each batch.

Arguments: rows, values of a row, ids of a batch, exponent of the Zipf distribution (0: uniform)."""

import json
import sys
import time
import warnings

import torch

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
rows, dim, batch, skew = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
bag = 16
bags = max(batch // bag, 1)
table = torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True)
optimizer = torch.optim.Adagrad(table.parameters(), lr=0.01)
u = torch.rand((20, bags * bag), dtype=torch.float64)
ranks = ((rows ** (1 - skew) - 1) * u + 1) ** (1 / (1 - skew)) - 1 if skew else u * rows
order = torch.randperm(rows)
batches = order[ranks.long().clamp(0, rows - 1)]
offsets = torch.arange(0, bags * bag, bag)


def step(ids: torch.Tensor) -> None:
    table(ids, offsets).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


for ids in batches[:4]:
    step(ids)
seconds = []
for ids in batches[4:]:
    began = time.perf_counter()
    step(ids)
    seconds.append(time.perf_counter() - began)
print(json.dumps(seconds))

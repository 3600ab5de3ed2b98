r"""FBGEMM's table on a CPU, beside `paraft bench table`: prints the seconds of each batch, as torch_table.py does.

    pip install torch==2.14.1 fbgemm-gpu-cpu==1.9.0 numpy
    printf '#!/bin/sh\nshift 2\nexec python tools/bench/fbgemm_table.py "$@"\n' >fbgemm && chmod +x fbgemm
    paraft bench table --torch ./fbgemm            # in its place: "PyTorch's EmbeddingBag" is then FBGEMM's

Arguments: rows, values of a row, ids of a batch, exponent of the Zipf distribution (0: uniform). A batch is a sum over bags
and an update of EXACT_ROWWISE_ADAGRAD, on one thread. `paraft bench table` names each row once; FBGEMM also sums rows into
bags, and the gradients of repeated ids."""

import json
import sys
import time

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

torch.set_num_threads(1)
rows, dim, batch, skew = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
bag = 16
bags = max(batch // bag, 1)
table = SplitTableBatchedEmbeddingBagsCodegen(
    [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
    optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    pooling_mode=PoolingMode.SUM,
    learning_rate=0.01,
    eps=1e-8,
    stochastic_rounding=False,
)
table.init_embedding_weights_uniform(-0.05, 0.05)
u = torch.rand((20, bags * bag), dtype=torch.float64)
ranks = ((rows ** (1 - skew) - 1) * u + 1) ** (1 / (1 - skew)) - 1 if skew else u * rows
order = torch.randperm(rows)
batches = order[ranks.long().clamp(0, rows - 1)]
offsets = torch.arange(0, bags * bag + 1, bag)


def step(ids: torch.Tensor) -> None:
    table(ids, offsets).sum().backward()


for ids in batches[:4]:
    step(ids)
seconds = []
for ids in batches[4:]:
    began = time.perf_counter()
    step(ids)
    seconds.append(time.perf_counter() - began)
print(json.dumps(seconds))

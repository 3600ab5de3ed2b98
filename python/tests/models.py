"""Small models, data and optimizers that the tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)

#: Such that the small models have several of each kind.
SMALL_BUCKETS = {"cluster.bucket_bytes": 1024}

Batch = tuple[torch.Tensor, torch.Tensor]


class Transformer(nn.Module):
    """Two layers over a vocabulary of 50, with the output tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(32, 50, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(self.embed(x))).transpose(1, 2)


def model(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
    if kind == "conv":
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)
        )
    return Transformer()


def batches(kind: str, rank: int, steps: int, size: int = 16) -> Iterator[Batch]:
    g = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        if kind == "mlp":
            yield torch.randn(size, 20, generator=g), torch.randint(0, 10, (size,), generator=g)
        elif kind == "conv":
            yield torch.randn(size, 1, 8, 8, generator=g), torch.randint(0, 10, (size,), generator=g)
        else:
            x = torch.randint(0, 50, (size, 12), generator=g)
            yield x, x.roll(1, 1)


def loss(m: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(m(batch[0]), batch[1])


#: Names of optimizers, with how each is made and how far 50 steps in lock-step may be from DDP's, of the largest weight. SGD's
#: gradients differ by the last bit of a mean; what divides by a root of their squares makes more of it where they are small.
OPTIMIZERS: dict[str, tuple[Any, float]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), 2e-7),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4), 1e-6),
    "nesterov": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True), 1e-6),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.05), 1e-5),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, lr=1e-3), 1e-4),
    "adam": (lambda p: torch.optim.Adam(p, lr=1e-3), 1e-4),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=1e-3), 1e-4),
    "adadelta": (lambda p: torch.optim.Adadelta(p, lr=1.0), 1e-5),
    "adamax": (lambda p: torch.optim.Adamax(p, lr=2e-3), 1e-4),
    "nadam": (lambda p: torch.optim.NAdam(p, lr=2e-3), 1e-4),
    "radam": (lambda p: torch.optim.RAdam(p, lr=5e-3), 1e-4),
}


def optimizer(name: str, m: nn.Module) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = OPTIMIZERS[name][0](m.parameters())
    return made


def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference of a parameter, of the largest one."""
    keys = [k for k in a if "running" not in k and "num_batches" not in k]
    largest = max(float(b[k].abs().max()) for k in keys)
    return max(float((a[k] - b[k]).abs().max()) for k in keys) / largest

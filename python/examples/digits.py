"""The data of the examples: MNIST's four files if there is a folder with them, else the 8x8 digits that Paraft carries for its demo."""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

EMBEDDED = Path(__file__).resolve().parents[2] / "worker" / "data" / "assets" / "digits.csv.gz"


def load(folder: str | None) -> tuple[TensorDataset, TensorDataset]:
    """Images of 28 x 28 (or 8 x 8, made larger) in 0 to 1, and their labels: to train, and to test."""
    if folder:
        return _idx(Path(folder), "train"), _idx(Path(folder), "t10k")
    rows = [[float(v) for v in line.split(",")] for line in gzip.open(EMBEDDED, "rt") if line[0].isdigit()]
    table = torch.tensor(rows)
    x = torch.nn.functional.interpolate(table[:, None, :64].unflatten(2, (8, 8)) / 16, size=28)
    y = table[:, 64].long()
    held_out = torch.arange(len(y)) % 5 == 0
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


def _idx(folder: Path, part: str) -> TensorDataset:
    def read(kind: str, header: int) -> torch.Tensor:
        path = next(folder.glob(f"{part}-{kind}-ubyte*"))
        raw = (gzip.open(path) if path.suffix == ".gz" else open(path, "rb")).read()
        return torch.frombuffer(bytearray(raw[header:]), dtype=torch.uint8)

    images = read("images-idx3", 16).view(-1, 1, 28, 28).float() / 255
    return TensorDataset(images, read("labels-idx1", 8).long())

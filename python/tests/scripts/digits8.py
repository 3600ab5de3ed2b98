"""The data of some of these scripts: the 8x8 digits that Paraft carries for its demo."""

import gzip
from pathlib import Path

import torch

EMBEDDED = Path(__file__).resolve().parents[3] / "worker" / "data" / "assets" / "digits.csv.gz"


def load():
    """Images [n, 1, 8, 8] in 0 to 1, and their labels."""
    rows = [[float(v) for v in line.split(",")] for line in gzip.open(EMBEDDED, "rt") if line[0].isdigit()]
    table = torch.tensor(rows)
    return table[:, :64].reshape(-1, 1, 8, 8) / 16, table[:, 64].long()

"""Sparse data: samples that name a few of very many ids, for the tables of :mod:`paraft.torch` and :mod:`paraft.numpy`::

    train = paraft.data.libsvm("a9a")
    for indices in batches(len(train)):
        batch = train.batch(indices)            # NumPy arrays
        offsets, ids, values = batch.fields[0]  # as torch.nn.EmbeddingBag takes them, with include_last_offset

Ids are 64-bit keys as the file has them. Classes are labels 0 and 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple, Optional, Union

import numpy as np
from numpy.typing import NDArray

from . import _paraft
from .errors import MisuseError

__all__ = ["Batch", "ClickMetrics", "Field", "Samples", "auc", "clicks", "criteo", "libsvm", "ratings", "vowpal"]

_Path = Union[str, "os.PathLike[str]"]


class Field(NamedTuple):
    """The ids of one field of some samples: sample ``i`` has ``ids[offsets[i]:offsets[i + 1]]``."""

    offsets: NDArray[np.int64]
    ids: NDArray[np.int64]
    #: float32, one for each id; None: all are 1.
    values: Optional[NDArray[np.float32]]


class Batch(NamedTuple):
    """Some samples."""

    #: float32, ``[n]``.
    labels: NDArray[np.float32]
    #: Factors of the samples' losses, float32; None: all are 1.
    importance: Optional[NDArray[np.float32]]
    #: Plain values, float32, ``[n, k]``.
    dense: NDArray[np.float32]
    fields: list[Field]


class Samples:
    """Samples of a file, in memory, or of a stream, which are computed when they are asked for."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, indices: Iterable[int]) -> Batch:
        """The samples with these indices, from 0.

        Raises:
            IndexError: there is no such sample.
        """
        labels, importance, dense, fields = self._data.take([int(i) for i in indices])
        n = len(labels) // 4
        return Batch(
            np.frombuffer(labels, np.float32),
            np.frombuffer(importance, np.float32) if importance else None,
            np.frombuffer(dense, np.float32).reshape(n, self._data.dense()),
            [
                Field(
                    np.frombuffer(offsets, np.uint32).astype(np.int64),
                    np.frombuffer(ids, np.int64),
                    np.frombuffer(values, np.float32) if values else None,
                )
                for offsets, ids, values in fields
            ],
        )

    def teacher(self, indices: Iterable[int]) -> Optional[NDArray[np.float32]]:
        """For samples of :func:`clicks`: the chances of label 1 by which their labels are drawn, ``[n]``. No model has a better AUC.
        None: the samples are a file's.

        Raises:
            IndexError: there is no such sample.
        """
        chances = self._data.teacher([int(i) for i in indices])
        return None if chances is None else np.frombuffer(chances, np.float32)

    def split(self, fraction: float, seed: int = 0) -> tuple[Samples, Samples]:
        """The samples without, and with, this fraction of them, which ``seed`` draws; of a stream its end."""
        rest, part = self._data.split(fraction, seed)
        return Samples(rest), Samples(part)


def _read(
    kind: str,
    path: _Path,
    *,
    classes: bool = True,
    bits: int = 18,
    strings: bool = True,
    texts: bool = False,
    hash_bits: int = 0,
) -> Samples:
    return Samples(_paraft.SparseData.read(kind, os.fspath(path), classes, (bits, strings), texts, hash_bits))


def libsvm(path: _Path, *, classes: bool = True, hash_bits: int = 0) -> Samples:
    """A libsvm (svmlight) file, plain or ``.gz``: one field, whose ids are the indices as written. ``classes``: labels
    are two classes (-1 and +1, or 0 and 1); otherwise numbers. ``hash_bits``: maps ids to so many bits; 0: keeps them.

    Raises:
        DataError: the file cannot be read; with line and column.
    """
    return _read("libsvm", path, classes=classes, hash_bits=hash_bits)


def vowpal(path: _Path, *, classes: bool = True, bits: int = 18, strings: bool = False) -> Samples:
    """A file of Vowpal Wabbit's text, plain or ``.gz``: one field with VW's own indices, its constant included. ``bits``: as
    VW's ``-b``. ``strings``: as ``--hash strings``.

    Raises:
        DataError: the file cannot be read; with line and column.
    """
    return _read("vowpal", path, classes=classes, bits=bits, strings=strings)


def criteo(path: _Path, *, hash_bits: int = 0) -> Samples:
    """Criteo's click logs, plain or ``.gz``: TSV, or CSV with a header. 13 plain values, ln(1 + max(x, 0)) of the counts, and
    26 fields of one id each; a missing one is 0.

    Raises:
        DataError: the file cannot be read; with line and column.
    """
    return _read("criteo", path, hash_bits=hash_bits)


def ratings(path: _Path, *, texts: bool = False) -> Samples:
    """Ratings, as MovieLens has them (``ratings.csv``, ``u.data``, ``::``): the fields user and item, and the rating as label.
    ``texts``: ids are texts, and become hashes.

    Raises:
        DataError: the file cannot be read; with line and column.
    """
    return _read("ratings", path, texts=texts, hash_bits=63 if texts else 0)


def clicks(
    samples: int,
    *,
    seed: int = 0,
    first: int = 0,
    max_categories: Optional[int] = None,
    day: int = 1_000_000,
    drift: float = 0.01,
    hash_bits: int = 63,
) -> Samples:
    """A computed stream with Criteo's numbers of categories and a known teacher (a factorisation machine): 13 plain values, 26
    fields, a quarter of the labels 1. Any worker computes any sample. ``drift``: the part of categories that each ``day`` (in
    samples) are replaced by new ones. ``hash_bits``: bits of an id.

    Raises:
        DataError: an option is out of its range.
    """
    most = (1 << 64) - 1 if max_categories is None else max_categories
    return Samples(_paraft.SparseData.clicks(seed, first, samples, most, day, drift, hash_bits))


def _floats(values: Any) -> bytes:
    return np.ascontiguousarray(np.asarray(values).reshape(-1), dtype=np.float32).tobytes()


def auc(scores: Any, labels: Any) -> Optional[float]:
    """The exact area under the ROC curve, for labels 0 and 1; ties count half. None: all labels are the same.

    Raises:
        MisuseError: there is not one label for each score.
    """
    if np.size(scores) != np.size(labels):
        raise MisuseError(f"{np.size(scores)} scores for {np.size(labels)} labels")
    return _paraft.area_under_curve(_floats(scores), _floats(labels))


class ClickMetrics:
    """AUC, log loss and normalised entropy of two classes, as sums that add up over workers::

        metrics.add(logits, labels)
        metrics.merge(bytes_of_another_worker)   # in any order: the same bits
    """

    def __init__(self) -> None:
        self._sums = _paraft.ClickMetrics()

    def add(self, logits: Any, labels: Any) -> None:
        """Adds samples: the log odds of label 1, and the labels."""
        if np.size(logits) != np.size(labels):
            raise MisuseError(f"{np.size(logits)} logits for {np.size(labels)} labels")
        self._sums.add(_floats(logits), _floats(labels))

    def merge(self, theirs: bytes) -> None:
        """Adds the sums of another worker's :meth:`to_bytes`."""
        self._sums.merge(bytes(theirs))

    def to_bytes(self) -> bytes:
        """The sums, to be sent to another worker."""
        return bytes(self._sums.to_bytes())

    @property
    def auc(self) -> Optional[float]:
        """By a histogram of the scores."""
        return self._sums.values()[0]

    @property
    def log_loss(self) -> Optional[float]:
        """The mean over all samples."""
        return self._sums.values()[1]

    @property
    def normalized_entropy(self) -> Optional[float]:
        """The log loss of that of the labels' mean rate: below 1 the scores say something (He et al. 2014)."""
        return self._sums.values()[2]

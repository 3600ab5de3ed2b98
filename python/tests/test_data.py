"""Files of sparse samples, the stream of clicks, and metrics."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import paraft.data as data
import pytest
from paraft.errors import ConfigError, DataError, MisuseError


def test_a_batch_of_a_libsvm_file_has_its_ids_values_and_labels(tmp_path: Path) -> None:
    path = tmp_path / "a.svm.gz"
    with gzip.open(path, "wt") as f:
        f.write("+1 3:0.5 9000000000:2\n-1\n+1 3:1\n")
    samples = data.libsvm(path)
    assert len(samples) == 3
    batch = samples.batch([2, 0, 1])
    assert batch.labels.tolist() == [1.0, 1.0, 0.0] and batch.importance is None and batch.dense.shape == (3, 0)
    (field,) = batch.fields
    assert field.offsets.tolist() == [0, 1, 3, 3] and field.ids.tolist() == [3, 3, 9_000_000_000]
    assert field.values is not None and field.values.tolist() == [1.0, 0.5, 2.0]
    assert samples.batch([]).labels.shape == (0,)
    rest, part = samples.split(1 / 3)
    assert (len(rest), len(part)) == (2, 1)
    with pytest.raises(IndexError):
        samples.batch([3])


def test_numbers_stay_numbers_and_hashed_ids_are_below_their_bits(tmp_path: Path) -> None:
    path = tmp_path / "r.svm"
    path.write_text("2.5 1:1 900000:1\n")
    batch = data.libsvm(path, classes=False, hash_bits=10).batch([0])
    assert batch.labels.tolist() == [2.5] and len(batch.fields[0].ids) == 2 and int(batch.fields[0].ids.max()) < 1 << 10


def test_ratings_have_users_items_and_a_number(tmp_path: Path) -> None:
    path = tmp_path / "ratings.csv"
    path.write_text("userId,movieId,rating,timestamp\n7,31,2.5,1260759144\n7,1029,3.0,1260759179\n")
    batch = data.ratings(path).batch([0, 1])
    assert batch.labels.tolist() == [2.5, 3.0]
    assert [field.ids.tolist() for field in batch.fields] == [[7, 7], [31, 1029]]


def test_a_file_that_cannot_be_read_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.svm"
    path.write_text("+1 3:0.5\n+1 three:1\n")
    with pytest.raises(DataError, match="2"):
        data.libsvm(path)
    with pytest.raises(DataError, match="missing"):
        data.libsvm(tmp_path / "missing")


def test_any_worker_computes_any_click() -> None:
    all_of_them, later = data.clicks(100, seed=3), data.clicks(50, seed=3, first=50)
    here, there = all_of_them.batch(range(50, 100)), later.batch(range(50))
    assert len(here.fields) == 26 and here.dense.shape == (50, 13)
    assert np.array_equal(here.labels, there.labels) and np.array_equal(here.dense, there.dense)
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(here.fields, there.fields))
    with pytest.raises((ConfigError, DataError)):
        data.clicks(1, hash_bits=99)


def test_no_score_is_better_than_the_teachers(tmp_path: Path) -> None:
    stream = data.clicks(5_000, seed=3)
    batch, chances = stream.batch(range(5_000)), stream.teacher(range(5_000))
    assert chances is not None and chances.shape == (5_000,) and 0 < chances.min() < chances.max() < 1
    assert abs(float(chances.mean() - batch.labels.mean())) < 0.02 and (data.auc(chances, batch.labels) or 0) > 0.75
    assert np.array_equal(data.clicks(9, seed=3, first=7).teacher([2]), chances[9:10])
    with pytest.raises(IndexError):
        stream.teacher([5_000])
    (tmp_path / "file").write_text("1 3:1\n0 4:1\n")
    assert data.libsvm(tmp_path / "file").teacher([0]) is None


def test_metrics_of_two_workers_add_up_in_any_order() -> None:
    logits = np.linspace(-3, 3, 400)
    labels = (np.arange(400) % 3 == 0).astype(np.float32)
    halves = []
    for half in (slice(0, 150), slice(150, 400)):
        halves.append(data.ClickMetrics())
        halves[-1].add(logits[half], labels[half])
    one, other = (h.to_bytes() for h in halves)
    halves[0].merge(other)
    halves[1].merge(one)
    a, b = halves
    assert (a.auc, a.log_loss, a.normalized_entropy) == (b.auc, b.log_loss, b.normalized_entropy)
    loss = float(np.mean(np.log1p(np.exp(-np.where(labels == 1, logits, -logits)))))
    rate = float(labels.mean())
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert a.log_loss == pytest.approx(loss, rel=1e-6) and a.normalized_entropy == pytest.approx(loss / entropy, rel=1e-6)
    exact = data.auc(logits, labels)
    assert exact is not None and a.auc == pytest.approx(exact, abs=2e-3)
    with pytest.raises(MisuseError, match="2 scores for 1 labels"):
        data.auc([0.1, 0.2], [1])


def test_the_area_under_the_curve_counts_ties_by_half() -> None:
    assert data.auc([0.1, 0.4, 0.4, 0.8], [0, 0, 1, 1]) == 0.875
    assert data.auc([0.1, 0.2], [1, 1]) is None

#!/usr/bin/env bash
# What the models of `implicit` take a stored zero of a sparse matrix for, and which of them look at the values at all.
#
# Seen with implicit 0.7.3. Expected from memory: a stored zero is as good as none (scipy says the two matrices are equal); values are
# confidences; a negative one is a dislike. In fact:
#   - ALS: an absent cell is a negative example of weight 1, a stored zero one of weight 0, which takes it out of the loss;
#   - BPR: every stored cell is a positive example, be its value 3, 0 or -1; values are never looked at;
#   - logistic MF: a stored zero counts neither as an absent cell nor as a 1; values matter.
# What this means for us: a reader of ratings says what a zero is (an interaction with weight 0, or none) and keeps to it in all models. A
# comparison with `implicit` drops stored zeros first (`eliminate_zeros()`), and states the values' meaning for each model.
#
#   findings/implicit-stored-zeros.sh
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check implicit==0.7.3 numpy==2.4.6 scipy==1.17.1
cd "$folder"
cat >zeros.py <<'PY'
import logging
import warnings

import numpy as np
from implicit.als import AlternatingLeastSquares
from implicit.bpr import BayesianPersonalizedRanking
from implicit.lmf import LogisticMatrixFactorization
from scipy.sparse import csr_matrix

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
USERS, ITEMS = 30, 20
rng = np.random.default_rng(0)
kind = rng.choice(3, (USERS, ITEMS), p=[0.6, 0.3, 0.1])  # absent, 1, stored zero


def matrix(of_stored):
    """Ones, and for each stored zero this; None: nothing is stored."""
    rows, columns = np.nonzero(kind if of_stored is not None else kind == 1)
    values = np.where(kind[rows, columns] == 1, 1, of_stored or 0).astype(np.float32)
    return csr_matrix((values, (rows, columns)), shape=kind.shape)


def trained(model, of):
    one = model(factors=4, iterations=5, random_state=1, num_threads=1)
    one.fit(of.copy(), show_progress=False)
    return one


absent, stored = matrix(None), matrix(0)
assert (absent != stored).nnz == 0 and absent.nnz < stored.nnz
same = {}
for model in (AlternatingLeastSquares, BayesianPersonalizedRanking, LogisticMatrixFactorization):
    zero = trained(model, stored).user_factors
    others = {"absent": absent, "one": matrix(1), "minus one": matrix(-1), "three times all": 3 * stored}
    same[model.__name__] = [name for name, m in others.items() if np.array_equal(zero, trained(model, m).user_factors)]
    print(f"{model.__name__:27} trains with stored zeros the same as with: {same[model.__name__] or 'none of these'}")
assert same["BayesianPersonalizedRanking"] == ["one", "minus one", "three times all"], "it has changed"
assert same["AlternatingLeastSquares"] == same["LogisticMatrixFactorization"] == [], "it has changed"

als = trained(AlternatingLeastSquares, absent)
y, target = als.item_factors.astype(np.float64), (kind[0] == 1).astype(np.float64)
got = als.recalculate_user(0, stored[0])
for name, weight in (("weight 1", np.ones(ITEMS)), ("weight 0", (kind[0] != 2).astype(np.float64))):
    row = np.linalg.solve((y.T * weight) @ y + als.regularization * np.eye(4), y.T @ target)
    off = np.abs(row - got).max()
    print(f"ALS by the formula, stored zeros of {name}: off by {off:.5f}")
    assert (off < 1e-3) == (name == "weight 0"), "it has changed"
PY
venv/bin/python zeros.py

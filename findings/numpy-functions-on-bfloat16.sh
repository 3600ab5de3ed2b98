#!/usr/bin/env bash
# Which NumPy functions do something else for arrays of ml_dtypes' bfloat16 (what JAX and safetensors give) than for float16.
#
# Seen with numpy 2.4.6 and ml_dtypes 0.6.0. Expected from memory: the same, less exactly, with sums in a wider type. In fact NumPy does
# not take bfloat16 for a floating point type (`np.issubdtype(bfloat16, np.floating)` is false), and without a word:
#   - `nan_to_num` returns NaN and infinity as they were; `nansum`, `nanmean`, `nanstd`, `nancumsum` return NaN; `nanmax` is right;
#   - `sort`, `argsort`, `unique` of an array with a NaN leave numbers unsorted; `nanargmax` gives the NaN's place;
#   - `sum` and `mean` of 4096 ones are 256 and 0.0625; of float16 4096 and 1, as `mean` sums in float32;
#   - `astype` from float64 rounds twice, by way of float32: a number just above the middle of two goes down.
# What this means for us: weights that a reader gives as bfloat16 are made float32 before anything is computed or checked in Python, as
# `paraft.numpy` asks for float32 only. A test's expected bfloat16 values are made from float32.
#
#   findings/numpy-functions-on-bfloat16.sh
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check numpy==2.4.6 ml_dtypes==0.6.0
cd "$folder"
cat >functions.py <<'PY'
import warnings

import numpy as np
from ml_dtypes import bfloat16

warnings.simplefilter("ignore")
SMALL, ONES = [3, np.nan, 1], np.ones(4096)
calls = {
    "nan_to_num": lambda t: np.nan_to_num(np.array([np.nan, -np.inf, 1], t)).astype(np.float32),
    "nansum": lambda t: np.nansum(np.array(SMALL, t)),
    "nanmean": lambda t: np.nanmean(np.array(SMALL, t)),
    "nanstd": lambda t: np.nanstd(np.array(SMALL, t)),
    "nancumsum": lambda t: np.nancumsum(np.array(SMALL, t)),
    "nanmax": lambda t: np.nanmax(np.array(SMALL, t)),
    "nanargmax": lambda t: np.nanargmax(np.array(SMALL, t)),
    "sort": lambda t: np.sort(np.array(SMALL, t)),
    "argsort": lambda t: np.argsort(np.array(SMALL, t)),
    "unique": lambda t: np.unique(np.array(SMALL, t)),
    "sum": lambda t: ONES.astype(t).sum(),
    "mean": lambda t: ONES.astype(t).mean(),
}
differs = set()
for name, call in calls.items():
    half, brain = (np.asarray(call(t)).astype(np.float64) for t in (np.float16, bfloat16))
    print(f"{name:10}  float16 {half!s:24} bfloat16 {brain}")
    if not np.array_equal(half, brain, equal_nan=True):
        differs.add(name)
assert not np.issubdtype(bfloat16, np.floating), "it has changed"
assert differs == calls.keys() - {"nanmax"}, f"it has changed: {differs}"
assert (ONES.astype(bfloat16).sum(), ONES.astype(bfloat16).mean()) == (256, 0.0625), "it has changed"

above = 1 + 2.0**-8 + 2.0**-40  # bfloat16 has 1 and 1 + 2^-7 beside it
print(f"rounding    {above:.13f} becomes {float(np.array([above]).astype(bfloat16)[0])}, not {1 + 2.0**-7}")
assert np.array([above]).astype(bfloat16)[0] == 1, "it has changed"
PY
venv/bin/python functions.py

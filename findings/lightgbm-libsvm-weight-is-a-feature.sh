#!/usr/bin/env bash
# What LightGBM does with libsvm files that XGBoost and scikit-learn read.
#
# Seen with lightgbm 4.7.0 and xgboost 3.2.0. Expected from memory: LightGBM counts features from 0, and refuses what it does not know:
# `label:weight`, `qid:`, comments. In fact:
#   - `1:0.5 1:2` is label 1 of weight 0.5 for XGBoost; for LightGBM it is label 1 and feature 0 of value 0.5, without a word;
#   - of a feature that is twice in a row it takes the last value, XGBoost keeps both;
#   - two rows without features at the beginning make a file "Unknown format"; further down, or one alone, they are fine;
#   - a file that has no other feature than 0, and one with comments, end in an internal check (`max_col_idx > 0`);
#   - `qid:` is refused as expected, blank lines and unsorted features are read.
# What this means for us: a reader of libsvm files takes no label with a colon in silence, and looks at no part of a file to guess what it
# is. What it refuses it names: line, text, remedy. The files of this script are tests of it.
#
#   findings/lightgbm-libsvm-weight-is-a-feature.sh
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
pip lightgbm==4.7.0 numpy scipy
pip --no-deps xgboost==3.2.0 # its NCCL is large, and not used here
cd "$folder"
cat >reads.py <<'PY'
import warnings

import lightgbm
import xgboost

warnings.simplefilter("ignore")
ROWS = range(1, 9)
SMALL = {"verbosity": -1, "min_data_in_bin": 1, "min_data_in_leaf": 1, "num_leaves": 2, "objective": "regression"}


class Quiet:
    def info(self, _):
        pass

    warning = info


def read(lines):
    """The highest and lowest value that LightGBM saw of each feature, or its error; the rows; the weights and numbers of XGBoost."""
    with open("x.libsvm", "w") as out:
        out.writelines(lines)
    try:
        data = lightgbm.Dataset("x.libsvm", params=SMALL)
        infos = lightgbm.train(SMALL, data, 1).dump_model()["feature_infos"]
        got = {name.split("_")[1]: (info["min_value"], info["max_value"]) for name, info in infos.items()}
        got = f"{data.num_data()} rows, {got}"
    except lightgbm.basic.LightGBMError as e:
        got = str(e).strip().split(" at /")[0]
    other = xgboost.DMatrix("x.libsvm?format=libsvm")
    return got, f"{other.num_row()} rows, {other.num_nonmissing()} values, weights {[round(float(w), 1) for w in other.get_weight()][:2]}"


lightgbm.register_logger(Quiet())
plain = [f"{i % 2} 1:{i} 3:{i * 2}\n" for i in ROWS]
cases = {
    "plain": plain,
    "weights": [f"{i % 2}:0.{i} 1:{i} 3:{i * 2}\n" for i in ROWS],
    "feature 1 twice": [f"{i % 2} 1:{i} 1:{i * 10} 3:{i * 2}\n" for i in ROWS],
    "first row empty": ["1\n", *plain],
    "first two rows empty": ["1\n", "0\n", *plain],
    "last two rows empty": [*plain, "1\n", "0\n"],
    "feature 0 alone": [f"{i % 2} 0:{i}\n" for i in ROWS],
    "comments": [line.replace("\n", " # a comment\n") for line in plain],
    "qid": [line.replace(" ", f" qid:{i // 5} ", 1) for i, line in zip(ROWS, plain)],
    "unsorted": [f"{i % 2} 3:{i * 2} 1:{i}\n" for i in ROWS],
}
seen = {}
for name, lines in cases.items():
    seen[name], other = read(lines)
    print(f"{name:21} LightGBM: {seen[name]}\n{'':21} XGBoost:  {other}")
check, of_plain = "Check failed: (max_col_idx) > (0)", "8 rows, {'1': (1, 8), '3': (2, 16)}"
assert seen["plain"] == seen["unsorted"] == of_plain, "it has changed"
assert seen["weights"] == "8 rows, {'0': (0.1, 0.8), '1': (1, 8), '3': (2, 16)}", "it has changed"
assert seen["feature 0 alone"] == seen["comments"] == check, "it has changed"
assert seen["first two rows empty"].startswith("Unknown format"), "it has changed"
assert seen["first row empty"].startswith("9 rows") and seen["last two rows empty"].startswith("10 rows"), "it has changed"
assert seen["qid"].startswith("Input format error"), "it has changed"
PY
venv/bin/python reads.py

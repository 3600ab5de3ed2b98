#!/usr/bin/env bash
# Whether the codes of a polars `Categorical` column can serve as row numbers of an embedding table.
#
# Seen with polars 2.1.0. Expected from memory: each column's codes count from 0 in order of first appearance, so that the same file
# gives the same codes. In fact all columns of a process share one numbering:
#   - a file gets other codes when other columns were read before it: [1, 2] instead of [0, 1];
#   - the numbering is forgotten when the last column of the process is freed, and then starts at 0 again;
#   - so the same value has two codes in one process, according to what was garbage collected in between;
#   - `polars.Categories("name")` has its own numbering, which is shared and forgotten the same way; `Enum` has fixed codes.
# What this means for us: docs of sparse tables say that codes are not ids: hash the text, or keep an `Enum` beside the job. pandas'
# `cat.codes` are no better, they depend on the values that are in the file.
#
#   findings/polars-categorical-codes.sh
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check polars==2.1.0
cd "$folder"
printf 'user\nbo\nal\n' >monday.csv
printf 'user\nal\ncy\n' >tuesday.csv
cat >codes.py <<'PY'
import gc

import polars

WORDS = polars.Enum(["al", "bo", "cy"])


def read(name, dtype=polars.Categorical):
    return polars.read_csv(name, schema={"user": dtype})["user"]


def codes(column):
    return column.to_physical().to_list()


seen = {}
tuesday = read("tuesday.csv")
seen["tuesday alone"] = codes(tuesday)
del tuesday
gc.collect()
monday, tuesday = read("monday.csv"), read("tuesday.csv")
seen["monday"], seen["tuesday after it"] = codes(monday), codes(tuesday)
del monday
gc.collect()
seen["tuesday again"] = codes(read("tuesday.csv"))
del tuesday
gc.collect()
seen["tuesday, others freed"] = codes(read("tuesday.csv"))
named = polars.Categorical(polars.Categories("users"))
monday = read("monday.csv", named)
seen["tuesday after it, named"] = codes(read("tuesday.csv", named))
del monday
gc.collect()
seen["tuesday alone, named"] = codes(read("tuesday.csv", named))
kept = read("monday.csv", WORDS)
seen["tuesday after it, Enum"] = codes(read("tuesday.csv", WORDS))
for name, what in seen.items():
    print(f"{name:26} {what}")
said = [[0, 1], [0, 1], [1, 2], [1, 2], [0, 1], [1, 2], [0, 1], [0, 2]]
assert list(seen.values()) == said, "it has changed"
PY
venv/bin/python codes.py

#!/usr/bin/env bash
# Whether safetensors writes the same file for the same tensors and the same notes (`metadata=`).
#
# Seen with safetensors 0.8.0. Expected from memory: yes, as tensors are sorted by width and name. In fact the notes are written in the
# order of a hash table with a new seed each time: with five of them hardly two of 20 files are equal, even in one process.
# Without notes, or with one (`format`, as transformers writes), all are equal.
# What this means for us: two files of the same weights are compared by names, shapes and bytes of tensors, never by a checksum of the file
# (as `paraft checkpoint diff` does). Our own writer sorts the notes (`worker/checkpoint/src/tensors.rs`), and must go on doing so: a
# publication that is written twice has to have one digest.
#
#   findings/safetensors-notes-in-any-order.sh
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check safetensors==0.8.0 numpy
cd "$folder"
cat >order.py <<'PY'
import numpy as np
from safetensors.numpy import load, save

tensors = {"b": np.zeros(3, np.float32), "a": np.ones(2, np.float64), "c": np.zeros(1, np.int8)}
NOTES = {"format": "np", "step": "120", "run": "digits", "version": "7", "base_version": "6"}

files = {}
for name, notes in (("no notes", None), ("one note", {"format": "np"}), ("five notes", NOTES)):
    all_of = [save(tensors, metadata=notes) for _ in range(20)]
    files[name] = len(set(all_of))
    print(f"{name:12} {files[name]} different files of 20")
    again = load(all_of[0])
    assert all(np.array_equal(again[n], t) for n, t in tensors.items())
    assert len({len(one) for one in all_of}) == 1
assert files["no notes"] == files["one note"] == 1 and files["five notes"] > 5, "it has changed"
PY
venv/bin/python order.py

#!/usr/bin/env bash
# What ZipNN, a lossless compressor of weights, does to the bytes that it is given.
#
# Seen with zipnn 0.5.4. Expected from memory: it reads them. In fact `compress` reorders the bits of every number in place:
#   - a `bytearray`, a view of an array and even an immutable `bytes` object hold other bytes afterwards, as bfloat16 and as float32;
#     float16 and NumPy arrays (input_format="numpy") stay as they were;
#   - what was compressed unpacks to the right bytes, so that a test of the round trip alone passes if it keeps its own copy;
#   - a second `compress` of the same object packs the damaged bytes, without an error.
# What this means for us: a comparison of codes gives ZipNN a copy, and the copying is part of its time. Weights that a reader has
# mapped are never given to it. A test of our own codes compares the input afterwards too.
#
#   findings/zipnn-changes-its-input.sh
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
pip numpy==2.4.6 safetensors==0.8.0 zstandard==0.25.0
pip --no-deps zipnn==0.5.4 # it imports torch, of 2 GB, and does not need it for bytes
cd "$folder"
cat >changes.py <<'PY'
import sys
from unittest.mock import MagicMock

for module in ("torch", "safetensors.torch"):
    sys.modules[module] = MagicMock()

import numpy as np
from zipnn import ZipNN

normal = np.random.default_rng(0).standard_normal(1 << 14).astype(np.float32)
numbers = {
    "bfloat16": (normal.view(np.uint32) >> 16).astype(np.uint16),
    "float32": normal,
    "float16": normal.astype(np.float16),
}
for dtype, array in numbers.items():
    for kind in (bytes, bytearray, memoryview):
        right = array.tobytes()
        data = kind(bytearray(right))
        first = ZipNN(bytearray_dtype=dtype).compress(data)
        changed = np.mean(np.frombuffer(data, array.dtype) != array)
        second = ZipNN(bytearray_dtype=dtype).compress(data)
        good, bad = (bytes(ZipNN(bytearray_dtype=dtype).decompress(packed)) == right for packed in (first, second))
        print(f"{dtype:8} {kind.__name__:10} changed {changed:4.0%}; unpacked right: first {good}, second {bad}")
        assert good and (bad, changed < 0.5) == ((True, True) if dtype == "float16" else (False, False)), "it has changed"
copy = normal.copy()
packed = ZipNN(input_format="numpy").compress(copy)
assert np.array_equal(copy, normal), "it has changed"
assert np.array_equal(ZipNN(input_format="numpy").decompress(packed), normal), "it has changed"
print("float32  NumPy      as before")
PY
venv/bin/python changes.py

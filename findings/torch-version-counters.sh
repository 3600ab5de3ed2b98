#!/usr/bin/env bash
# Which writes to a tensor PyTorch's version counter (`Tensor._version`) counts, and which it does not.
#
# Seen with torch 2.15.0 on the CPU. Expected from memory: every in-place operation counts, and only writes through `.data`, NumPy or
# DLPack pass unseen. In fact:
#   - fused optimizers (SGD, Adam, AdamW, Adagrad with fused=True) write parameters and count nothing; loops and foreach count;
#   - BatchNorm's forward pass writes its running mean and counts nothing; InstanceNorm's counts, and so does a compiled BatchNorm;
#   - `p.data.clamp_()` counts nothing, but counts inside of torch.compile;
#   - `torch.utils.swap_tensors` swaps the counters too: a counter can go back.
# What this means for us: weights and buffers that a script writes between steps are found by a digest, not by counters alone
# (python/tests/test_writes.py, `by_a_fused_optimizer`).
#
#   findings/torch-version-counters.sh         # PYTHON=... uses a Python that has torch 2.15.0 instead of installing it (2 GB)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [[ -z ${PYTHON:-} ]]; then
    python3 -m venv "$folder/venv"
    PYTHON=$folder/venv/bin/python
    "$PYTHON" -m pip install --quiet --disable-pip-version-check torch==2.15.0 numpy
fi
cd "$folder"
cat >counters.py <<'PY'
import logging
import warnings

import torch

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
assert torch.__version__.split("+")[0] == "2.15.0", torch.__version__


def counted(tensor, write):
    before, old = tensor._version, tensor.detach().clone()
    write()
    assert not torch.equal(old, tensor.detach()), "nothing was written"
    return tensor._version - before


def parameter():
    p = torch.nn.Parameter(torch.linspace(1, 2, 4))
    p.grad = torch.ones(4)
    return p


seen = {}
for kind in ("SGD", "Adam", "AdamW", "Adagrad"):
    for how in ({}, {"foreach": True}, {"fused": True}):
        p = parameter()
        step = getattr(torch.optim, kind)([p], lr=0.1, **how).step
        seen[f"{kind} {' '.join(how) or 'loop'}"] = counted(p, step) > 0
for norm, shape in ((torch.nn.BatchNorm1d(4), (8, 4)), (torch.nn.InstanceNorm1d(4, track_running_stats=True), (2, 4, 8))):
    seen[type(norm).__name__] = counted(norm.running_mean, lambda norm=norm, shape=shape: norm(torch.randn(shape))) > 0
norm = torch.nn.BatchNorm1d(4)
compiled = torch.compile(norm, backend="aot_eager")
seen["BatchNorm1d compiled"] = counted(norm.running_mean, lambda: compiled(torch.randn(8, 4))) > 0


def clamp(p):
    p.data.clamp_(-0.1, 0.1)


for name, f in (("data.clamp_", clamp), ("data.clamp_ compiled", torch.compile(clamp, backend="aot_eager"))):
    p = parameter()
    seen[name] = counted(p, lambda f=f, p=p: f(p)) > 0
p, q = parameter(), torch.nn.Parameter(torch.zeros(4))
with torch.no_grad():
    p.add_(1)
before = p._version
torch.utils.swap_tensors(p, q)
seen["swap_tensors goes back"] = p._version < before

print("counted?")
for name, counts in seen.items():
    print(f"{name:24} {'yes' if counts else 'no'}")
silent = {"SGD fused", "Adam fused", "AdamW fused", "Adagrad fused", "BatchNorm1d", "data.clamp_"}
other = {name for name, counts in seen.items() if counts == (name in silent)}
assert not other, f"it has changed: {other}"
print("as seen with torch 2.15.0")
PY
"$PYTHON" counters.py

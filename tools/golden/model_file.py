"""Writes model files as PyTorch users do, and the values a reader must find in them.

    python tools/golden/model_file.py        (needs torch and safetensors; made with 2.15.0 and 0.8.0)

A linear layer, a BatchNorm (whose state has a counter that our
models do not keep) and a second linear layer, in f32, f16 and bf16.
"""

import json
import pathlib

import torch
from safetensors.torch import save_file

out = pathlib.Path(__file__).resolve().parent.parent.parent / "worker" / "checkpoint" / "tests" / "golden"
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
model(torch.randn(8, 5))  # moves the running statistics and the counter

for name, dtype in [("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)]:
    state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in model.state_dict().items()}
    save_file(state, out / f"{name}.safetensors", metadata={"format": "pt"})
    # Widening to f64 is exact, and so is reading it back.
    values = {k: v.double().flatten().tolist() for k, v in state.items() if v.is_floating_point()}
    (out / f"{name}.json").write_text(json.dumps(values) + "\n")

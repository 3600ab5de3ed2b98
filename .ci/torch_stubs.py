"""Makes PyTorch of PyPI importable on a machine without a GPU and without the CUDA wheels, which are four times its size.

PyPI has one build of PyTorch for Linux, and it is linked to CUDA's libraries. On a CPU nothing of them is called but what asks
whether there is a GPU; yet the loader wants each library, each symbol, and each symbol's version. So for each library that is
missing this compiles one whose functions do nothing: those that ask for a device answer "there is none", all others 0, as code
that registers kernels runs when a library is loaded.

    pip install --no-deps torch
    python .ci/torch_stubs.py      # finds torch beside this Python; needs cc and binutils
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

#: Symbols that none of PyTorch's own libraries defines and that are CUDA's, and not libc's.
CUDA = re.compile(r"_{0,2}(cu|nccl|nvrtc|nvtx|nvjit|nvshmem)\w*", re.IGNORECASE)
#: cudaErrorNoDevice, CUDA_ERROR_NO_DEVICE.
NO_DEVICE = 100
ASK_FOR_DEVICES = {"cudaGetDeviceCount", "cudaGetDevice", "cuInit"}


def said(*command: object) -> str:
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True).stdout


class Wanted:
    """What the libraries of a folder want of others."""

    def __init__(self, folder: Path) -> None:
        self.libraries: set[str] = set()
        #: The versions of each library's symbols.
        self.versions: dict[str, set[str]] = defaultdict(set)
        #: The versions in which a symbol is wanted; "" is none.
        self.symbols: dict[str, set[str]] = defaultdict(set)
        defined = set()
        for library in folder.glob("*.so*"):
            self.libraries |= set(re.findall(r"\(NEEDED\).*\[(.+?)\]", said("readelf", "-dW", library)))
            of = ""
            for line in said("readelf", "-VW", library).splitlines():
                if file := re.search(r"File: (\S+)", line):
                    of = file[1]
                elif of and (name := re.search(r"Name: (\S+) +Flags", line)):
                    self.versions[of].add(name[1])
            for line in said("nm", "--dynamic", library).splitlines():
                *_, kind, symbol = line.split()
                called, _, version = symbol.partition("@")
                if kind == "U":
                    self.symbols[called].add(version.strip("@"))
                else:
                    defined.add(called)
        self.symbols = {n: v for n, v in self.symbols.items() if n not in defined and CUDA.fullmatch(n)}

    def of(self, library: str) -> dict[str, set[str]]:
        """The symbols of a library by version. Which library has one without a version nobody says: all have it."""
        by = {version: {s for s, v in self.symbols.items() if version in v} for version in self.versions[library]}
        return by or {"": {s for s, v in self.symbols.items() if "" in v}}


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def stub(to: Path, symbols: dict[str, set[str]]) -> None:
    """Compiles a library of functions that do nothing."""
    code = "".join(
        f"long {name}(void) {{ return {NO_DEVICE if name in ASK_FOR_DEVICES else 0}; }}\n"
        for name in sorted(set().union(*symbols.values()))
    )
    nodes = "".join(
        f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names))} }};\n"
        for version, names in sorted(symbols.items())
        if version
    )
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch, "stub.c"), Path(scratch, "stub.map")
        source.write_text(code)
        script.write_text(nodes)
        command = ["cc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{to.name}", "-o", str(to), str(source)]
        subprocess.run(command + ([f"-Wl,--version-script={script}"] if nodes else []), check=True)


def main() -> None:
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        sys.exit("there is no torch beside this Python")
    folder = Path(torch.origin).parent / "lib"
    wanted = Wanted(folder)
    here = {path.name for path in folder.iterdir()}
    missing = sorted(library for library in wanted.libraries - here if not loads(library))
    for library in missing:
        stub(folder / library, wanted.of(library))
    print(f"{len(missing)} libraries of CUDA's that do nothing: {' '.join(missing)}")


if __name__ == "__main__":
    main()

"""The build backend of this package (PEP 517): maturin, with the program ``paraft`` in the wheel beside the extension.

``pip install ./python`` and ``pip wheel ./python`` call it. It needs a Rust toolchain, and is of the repository: the crates that
the package is made of lie beside this folder, so that there is no source distribution of it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Optional

import maturin
from maturin import (  # noqa: F401  what pip asks for, and maturin answers alone
    get_requires_for_build_editable,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
#: What maturin puts into a wheel's scripts; named in pyproject.toml.
SCRIPTS = HERE / "paraft.data" / "scripts"

Settings = Optional[dict[str, Any]]


def program() -> Path:
    """Builds ``paraft`` as the repository's own release build does, and takes from it."""
    cargo = [os.environ.get("CARGO", "cargo"), "build", "--release", "--locked", "--package", "paraft-deploy"]
    command = [*cargo, "--message-format", "json-render-diagnostics"]
    built = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    said = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    return next(Path(m["executable"]) for m in said if m.get("executable"))


def place() -> None:
    """Puts the program where maturin looks, without what only debuggers read: half of it."""
    SCRIPTS.mkdir(parents=True, exist_ok=True)
    to = SCRIPTS / "paraft"
    to.unlink(missing_ok=True)
    shutil.copy2(program(), to)
    strip = shutil.which("strip")
    if strip is not None:
        subprocess.run([strip, str(to)], check=True)


def build_wheel(folder: str, settings: Settings = None, metadata: Optional[str] = None) -> str:
    """The wheel, in ``folder``: its name."""
    place()
    return str(maturin.build_wheel(folder, settings, metadata))


def build_editable(folder: str, settings: Settings = None, metadata: Optional[str] = None) -> str:
    """The same, of modules that stay here (``pip install --editable``)."""
    place()
    return str(maturin.build_editable(folder, settings, metadata))


def build_sdist(folder: str, settings: Settings = None) -> str:
    """There is none."""
    raise SystemExit("paraft has no source distribution: build a wheel in its repository, with `pip wheel ./python`")

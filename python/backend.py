"""The build backend of this package (PEP 517): maturin, and the program ``paraft`` in the wheel beside the extension.

``pip install ./python`` and ``pip wheel ./python`` call it. It needs a Rust toolchain, and is of the repository: the crates that
the package is made of lie beside this folder, so that there is no source distribution of it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Optional

import maturin
from maturin import (  # noqa: F401  what pip asks for, and maturin answers alone
    get_requires_for_build_editable,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

ROOT = Path(__file__).resolve().parent.parent

Settings = Optional[dict[str, Any]]

#: Named for the oldest manylinux that it runs on, as an index wants it. maturin's default here is a wheel for this machine's Linux.
NAMED: dict[str, Any] = {"build-args": "--compatibility pypi"}


def build_wheel(folder: str, settings: Settings = None, metadata: Optional[str] = None) -> str:
    """The wheel, in ``folder``: its name."""
    paraft = program()
    return with_program(folder, maturin.build_wheel(folder, {**NAMED, **(settings or {})}, metadata), paraft)


def build_editable(folder: str, settings: Settings = None, metadata: Optional[str] = None) -> str:
    """The same, of modules that stay here (``pip install --editable``)."""
    paraft = program()
    return with_program(folder, maturin.build_editable(folder, settings, metadata), paraft)


def build_sdist(folder: str, settings: Settings = None) -> str:
    """There is none."""
    raise SystemExit("paraft has no source distribution: build a wheel in its repository, with `pip wheel ./python`")


def program() -> bytes:
    """``paraft`` as the repository's own release build makes it, without what only debuggers read."""
    cargo = [os.environ.get("CARGO", "cargo"), "build", "--release", "--locked", "--package", "paraft-deploy"]
    command = [*cargo, "--message-format", "json-render-diagnostics"]
    built = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    said = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    executable = next(m["executable"] for m in said if m.get("executable"))
    with tempfile.TemporaryDirectory() as scratch:
        own = shutil.copy2(executable, scratch)
        strip = shutil.which("strip")
        if strip is not None:
            subprocess.run([strip, own], check=True)
        return Path(own).read_bytes()


def with_program(folder: str, name: str, paraft: bytes) -> str:
    """Puts the program where pip takes an environment's ``bin/`` from, and into the wheel's record."""
    package = "-".join(name.split("-")[:2])
    path = f"{package}.data/scripts/paraft"
    record = f"{package}.dist-info/RECORD"
    old, new = Path(folder, name), Path(folder, name + ".new")
    digest = base64.urlsafe_b64encode(hashlib.sha256(paraft).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(old) as wheel, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as whole:
        for entry in wheel.infolist():
            if entry.filename != record:
                whole.writestr(entry, wheel.read(entry), compresslevel=9)
        program = zipfile.ZipInfo(path)
        program.external_attr = 0o100755 << 16
        whole.writestr(program, paraft, zipfile.ZIP_DEFLATED, 9)
        lines = f"{path},sha256={digest},{len(paraft)}\n{wheel.read(record).decode()}"
        whole.writestr(wheel.getinfo(record), lines)
    new.replace(old)
    return name

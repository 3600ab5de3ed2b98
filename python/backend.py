"""The build backend of this package (PEP 517): maturin, and the program ``paraft`` in the wheel beside the extension.

``pip install ./python`` and ``pip wheel ./python`` call it. It needs a Rust toolchain, and the crates that lie beside this folder: a
source distribution is the repository's files.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
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
    """The repository's files, with a ``pyproject.toml`` at their root: its name, in ``folder``."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if not listed.stdout:
        raise SystemExit("a source distribution is made of the files that git knows: make it in a clone of the repository")
    with tempfile.TemporaryDirectory() as scratch:
        described = maturin.prepare_metadata_for_build_wheel(scratch)
        metadata = Path(scratch, described, "METADATA").read_bytes()
    package = described.rpartition(".")[0]
    with tarfile.open(Path(folder, package + ".tar.gz"), "w:gz") as whole:
        for name in filter(None, listed.stdout.split("\0")):
            whole.add(ROOT / name, f"{package}/{name}", recursive=False)
        for name, content in (("pyproject.toml", at_root()), ("PKG-INFO", metadata)):
            entry = tarfile.TarInfo(f"{package}/{name}")
            entry.size, entry.mode = len(content), 0o644
            whole.addfile(entry, io.BytesIO(content))
    return package + ".tar.gz"


def at_root() -> bytes:
    """This folder's ``pyproject.toml`` as it is for the folder above."""
    text = Path(__file__).with_name("pyproject.toml").read_text()
    for here, above in (
        ('backend-path = ["."]', 'backend-path = ["python"]'),
        ('readme = "README.md"', 'readme = "python/README.md"'),
        ("[tool.maturin]", '[tool.maturin]\nmanifest-path = "python/Cargo.toml"\npython-source = "python"'),
    ):
        before, found, after = text.partition(here)
        if not found:
            raise SystemExit(f"pyproject.toml has no line `{here}`, which a source distribution changes")
        text = before + above + after
    return text.encode()


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

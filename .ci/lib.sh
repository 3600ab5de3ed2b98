# What `.ci/run` and `.ci/nightly` have in common: steps, and where their tools come from. Sourced by them, from the repository's root.

# A clean checkout gains nothing from incremental builds, and they double what the disk must hold.
export CARGO_INCREMENTAL=${CARGO_INCREMENTAL:-0}
target=${CARGO_TARGET_DIR:-target}
scratch=$(mktemp -d)
background=()
trap 'for job in "${background[@]}"; do pkill -P "$job" 2>/dev/null || true; kill "$job" 2>/dev/null || true; done; rm -rf "$scratch" python/paraft/_paraft.abi3.so' EXIT
skipped=()

say() { printf '\n==> %s\n' "$*"; }

# Seconds of processor time of all commands that have ended: where it is near twice a step's seconds, two cores have no more to give.
processor() { awk '{ print int(($16 + $17) / 100) }' "/proc/$$/stat" 2>/dev/null || echo 0; }

step() { # what it is for, then the command
    local began=$SECONDS used
    used=$(processor)
    say "$1: ${*:2}"
    "${@:2}"
    printf '    ok, %d s, %d s of processor time\n' "$((SECONDS - began))" "$(($(processor) - used))"
}

# Runs a script behind the others; its number is in $!. The kernel weighs sessions before processes, and each server of a test has a
# session of its own: so has what must not slow it down.
behind() { # its log, the script
    setsid bash -c "{ echo 19 >/proc/self/autogroup; renice -n 19 \$\$; } >/dev/null 2>&1; set -e; $2" >"$1" 2>&1 &
    background+=($!)
}

skip() {
    say "SKIPPED $*"
    skipped+=("$*")
}

# A full disk shows in the middle of a build, in errors that do not name it as the cause.
check_disk() { # GiB
    mkdir -p "$target"
    local has free needs=$(($1 * 1024))
    has=$(du -smD "$target" | cut -f1) free=$(df --output=avail -BM "$target" | tail -n 1 | tr -dc 0-9)
    say "$(rustc --version), $(cargo --version), $(nproc) cores; $((free / 1024)) GiB of disk are free, $target has $((has / 1024)) GiB"
    ((has + free >= needs && free >= 2048)) || { echo "it needs about $1 GiB for $target: free some first" >&2; exit 1; }
}

report() {
    say "all passed in $((SECONDS / 60)) min $((SECONDS % 60)) s"
    if ((${#skipped[@]})); then printf '    skipped: %s\n' "${skipped[@]}"; fi
}

# A Python that has tensorboard, in PARAFT_PYTHON; without one, cargo test skips two tests.
find_tensorboard() {
    if [[ -n ${PARAFT_PYTHON:-} ]]; then
        say "PARAFT_PYTHON is $PARAFT_PYTHON"
        return
    fi
    local venv=$target/tensorboard-venv why="tensorboard's reader:"
    if ! command -v python3 >/dev/null; then
        skip "$why no python3"
    elif "$venv/bin/python" -c 'import tensorboard' 2>/dev/null; then
        PARAFT_PYTHON=$(realpath -s "$venv/bin/python")
    # tensorboard imports pkg_resources, which setuptools 81 dropped.
    elif python3 -m venv "$venv" && "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        tensorboard 'setuptools<81' && "$venv/bin/python" -c 'import tensorboard'; then
        PARAFT_PYTHON=$(realpath -s "$venv/bin/python")
    else
        skip "$why it could not be installed with pip"
    fi
    if [[ -n ${PARAFT_PYTHON:-} ]]; then
        export PARAFT_PYTHON
        say "event files are read back with $PARAFT_PYTHON"
    fi
}

# A Python that has grpcio, in PARAFT_GRPC_PYTHON, for the client that was written from docs/protocol.md; without one, cargo
# test skips three tests.
find_grpc() {
    if [[ -n ${PARAFT_GRPC_PYTHON:-} ]]; then
        say "PARAFT_GRPC_PYTHON is $PARAFT_GRPC_PYTHON"
        return
    fi
    local venv=$target/grpc-venv why="the second client, in Python:"
    if ! command -v python3 >/dev/null; then
        skip "$why no python3"
    elif "$venv/bin/python" -c 'import grpc, grpc_tools' 2>/dev/null; then
        PARAFT_GRPC_PYTHON=$(realpath -s "$venv/bin/python")
    elif python3 -m venv "$venv" && "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --requirement tests/second-client/requirements.txt && "$venv/bin/python" -c 'import grpc, grpc_tools'; then
        PARAFT_GRPC_PYTHON=$(realpath -s "$venv/bin/python")
    else
        skip "$why grpcio could not be installed with pip"
    fi
    if [[ -n ${PARAFT_GRPC_PYTHON:-} ]]; then
        export PARAFT_GRPC_PYTHON
        say "the second client runs with $PARAFT_GRPC_PYTHON"
    fi
}

# What runs on fakes of CUDA's libraries is not to be skipped where there is a C++ compiler.
find_cxx() {
    if command -v c++ >/dev/null; then export PARAFT_REQUIRE_FAKE_CUDA=1; else skip "no c++: nothing of the GPU workers is tested"; fi
}

# NVIDIA's compiler of kernels, which needs no GPU; its folder in PARAFT_NVRTC. Without it, cargo test skips one test.
find_nvrtc() {
    local folder=$target/nvrtc-13.0.88 lib
    if [[ -n ${PARAFT_NVRTC:-} ]]; then
        say "PARAFT_NVRTC is $PARAFT_NVRTC"
    elif [[ ! -e $folder/done ]] && ! { command -v python3 >/dev/null && python3 -m pip install --quiet \
        --disable-pip-version-check --no-deps --target "$folder" nvidia-cuda-nvrtc==13.0.88 && touch "$folder/done"; }; then
        skip "NVRTC could not be installed with pip: kernels are not compiled by NVIDIA's compiler"
    else
        lib=$(dirname "$(find "$folder" -name 'libnvrtc.so*' | head -n 1)")
        PARAFT_NVRTC=$(realpath "$lib")
    fi
    if [[ -n ${PARAFT_NVRTC:-} ]]; then
        export PARAFT_NVRTC PARAFT_REQUIRE_NVRTC=1
        say "kernels are compiled with $PARAFT_NVRTC"
    fi
}

# A Python with PyTorch and what the package's tests need besides, in PARAFT_TORCH_PYTHON. Without it the package is not tested.
find_torch() {
    local venv=$target/torch-venv tests=python/tests why="the Python package:"
    if [[ -n ${PARAFT_TORCH_PYTHON:-} ]]; then
        say "PARAFT_TORCH_PYTHON is $PARAFT_TORCH_PYTHON"
        return
    fi
    if ! command -v python3 >/dev/null; then
        skip "$why no python3"
    elif [[ -e $venv/done ]] || { say "PyTorch, once" && python3 -m venv "$venv" && install_torch "$venv/bin/python" && touch "$venv/done"; }; then
        PARAFT_TORCH_PYTHON=$(realpath -s "$venv/bin/python")
        say "the package is tested with $PARAFT_TORCH_PYTHON"
    else
        skip "$why PyTorch could not be installed with pip"
    fi
}

# A Python with the oldest PyTorch that the package works with, in PARAFT_OLDEST_TORCH_PYTHON. Without it nothing is tested with that.
find_oldest_torch() {
    local venv=$target/oldest-torch-venv tests=python/tests/oldest why="the oldest PyTorch:"
    if [[ -n ${PARAFT_OLDEST_TORCH_PYTHON:-} ]]; then
        say "PARAFT_OLDEST_TORCH_PYTHON is $PARAFT_OLDEST_TORCH_PYTHON"
        return
    fi
    if ! command -v python3 >/dev/null; then
        skip "$why no python3"
    elif [[ -e $venv/done ]] || { say "the oldest PyTorch, once" && python3 -m venv "$venv" && install_torch "$venv/bin/python" && touch "$venv/done"; }; then
        PARAFT_OLDEST_TORCH_PYTHON=$(realpath -s "$venv/bin/python")
    else
        skip "$why it could not be installed with pip"
    fi
}

# Without CUDA's libraries: empty ones are put in their place.
install_torch() { # the Python; $tests has the requirements
    local install=("$1" -m pip install --quiet --disable-pip-version-check)
    "${install[@]}" --requirement "$tests/requirements.txt" &&
        "${install[@]}" --no-deps --requirement "$tests/requirements-torch.txt" &&
        { "$1" -c 'import torch' 2>/dev/null || "$1" .ci/torch_stubs.py; } && "$1" -c 'import torch'
}

# mdBook, which builds the site of docs/; in $mdbook. Without it the site is not built.
find_mdbook() {
    local version=0.5.4 why="the site of docs/:"
    mdbook=$target/mdbook/bin/mdbook
    if ! command -v python3 >/dev/null; then
        mdbook=
        skip "$why no python3 to follow its links"
    elif [[ $("$mdbook" --version 2>/dev/null) == "mdbook v$version" ]]; then
        say "$mdbook is mdBook $version"
    elif say "mdBook $version, once" && cargo install mdbook --version "=$version" --locked --no-default-features --quiet \
        --root "$target/mdbook" --target-dir "$target/mdbook/build"; then
        rm -rf "$target/mdbook/build"
    else
        mdbook=
        skip "$why mdBook could not be installed with cargo"
    fi
}

# The site of docs/, with every link followed.
check_site() {
    local log=$scratch/mdbook.log
    "$mdbook" build --dest-dir "$(realpath -m "$target/book")" 2>&1 | tee "$log"
    ! grep -E 'WARN|ERROR' "$log" || { echo "mdBook warns" >&2; return 1; }
    python3 .ci/links.py "$target/book" docs
}

# The demo as a program sees it: one JSON object for each mode, with the promised keys, within its minute.
check_demo() { # the program
    local out=$scratch/demo.jsonl mode key line
    timeout 60 "$1" demo --json --run-dir "$scratch/demo" >"$out"
    cat "$out"
    [[ $(wc -l <"$out") -eq 2 ]] || { echo "expected one line for each of two modes" >&2; return 1; }
    for mode in bsp asp; do
        line=$(grep -F "\"mode\":\"$mode\"" "$out") || { echo "no line for $mode" >&2; return 1; }
        for key in workers samples seconds samples_per_s final_loss final_accuracy seconds_to_target delay_p50 \
            delay_p99; do
            [[ $line == *"\"$key\":"* ]] || { echo "$mode: no $key" >&2; return 1; }
        done
        [[ $line != *'"seconds_to_target":null'* ]] || { echo "$mode: target not reached" >&2; return 1; }
    done
    [[ -s $scratch/demo/report.html ]] || { echo "no report" >&2; return 1; }
}

# The commands of README.md and docs/, as they are written.
check_blocks() { # the program, and flags of blocks.py
    if command -v python3 >/dev/null; then python3 .ci/blocks.py "$@"; else skip "no python3: the commands of the documents are not run"; fi
}

# A suite of tests/engines, twice where it fails: engines have moods of their own.
check_engine() { # the program, the engine, its seconds
    local code=0 began=$SECONDS
    say "$2: tests/engines/run"
    timeout "$3" tests/engines/run "$1" "$2" || code=$?
    if [[ $code -ne 0 && $code -ne 77 ]]; then
        say "$2: failed with $code; once more" && code=0
        timeout "$3" tests/engines/run "$1" "$2" || code=$?
    fi
    case $code in
    0) printf '    ok, %d s\n' "$((SECONDS - began))" ;;
    77) skip "nothing is tested with $2, which is not here" ;;
    *) return "$code" ;;
    esac
}

# The Python package from its source, with the extension and the program of the development build.
use_source() {
    extension=python/paraft/_paraft.abi3.so
    cp "$target/debug/lib_paraft.so" "$scratch/extension" && mv "$scratch/extension" "$extension"
    PARAFT_PROGRAM=$(realpath "$target/debug/paraft")
    export PARAFT_PROGRAM PYTHONPATH=$PWD/python
}

test_python() {
    local python=$PARAFT_TORCH_PYTHON extension
    use_source
    "$python" -m mypy --strict --cache-dir "$scratch/mypy" python/paraft .ci/torch_stubs.py
    (cd "$scratch" && "$python" -m mypy.stubtest paraft._paraft)
    # Tests wait for other processes more than they compute.
    "$python" -m pytest --quiet -p no:cacheprovider --numprocesses 2 --dist worksteal python/tests "$@"
    rm -f "$extension"
}

# What trains with PyTorch, with its oldest release; groups of ranks by FSDP2 and frameworks over PyTorch need newer ones.
test_oldest_torch() {
    local python=$PARAFT_OLDEST_TORCH_PYTHON extension name suites=()
    use_source
    for name in torch plain misuse mean mean_clip clipping together writes untrained checkpoints scripts; do suites+=("python/tests/test_$name.py"); done
    "$python" -c 'import sys, torch; print(f"    torch {torch.__version__}, Python {sys.version.split()[0]}")'
    "$python" -m pytest --quiet -p no:cacheprovider --numprocesses 2 --dist worksteal "${suites[@]}"
    rm -f "$extension"
}

# The Python package as pip makes it of its source distribution, installed and tested there: not what lies in python/.
test_wheel() {
    local python=$PARAFT_TORCH_PYTHON wheel at bytes
    # maturin is looked for in the PATH.
    local PATH=$(dirname "$python"):$PATH
    (cd python && "$python" -c 'import sys, backend; backend.build_sdist(sys.argv[1])' "$scratch") >"$scratch/sdist.log" 2>&1 ||
        { cat "$scratch/sdist.log" >&2; return 1; }
    CARGO_TARGET_DIR=$(realpath "$target") "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
        --wheel-dir "$scratch/wheel" "$scratch"/paraft-*.tar.gz
    wheel=$(echo "$scratch"/wheel/paraft-*-cp39-abi3-*.whl)
    bytes=$(stat -c %s "$wheel")
    say "$(basename "$wheel") has $bytes bytes"
    ((bytes <= 18000000)) || { echo "more than 18 MB" >&2; return 1; }
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$wheel"
    check_tag "$wheel"
    python3.9 -c '' 2>/dev/null || skip "the wheel with Python 3.9, its oldest, which is not here"
    for at in $(oldest_and_newest); do check_bare "$wheel" "$at"; done
    for _ in {1..11}; do
        "$python" -c 'import time, torch; a = time.process_time(); import paraft.torch; print((time.process_time() - a) * 1e3)'
    done | sort -n | sed -n '6s/.*/    paraft.torch beside torch: & ms of processor time/p'
    PARAFT_TEST_INSTALLED=1 "$python" -m pytest --quiet -p no:cacheprovider --numprocesses 2 --dist worksteal python/tests
}

# The wheel's name says on which systems extension and program run.
check_tag() { # the wheel
    local tag=${1##*-}
    tag=${tag%.whl}
    [[ $tag == manylinux* ]] || { echo "$1 is for no manylinux" >&2; return 1; }
    "$PARAFT_TORCH_PYTHON" -m auditwheel show "$1" | grep -F "\"$tag\"" || { echo "$1 is not of $tag" >&2; return 1; }
}

# Of the Pythons from 3.9 that are here.
oldest_and_newest() {
    local minor found=()
    for minor in {9..30}; do ! "python3.$minor" -c '' 2>/dev/null || found+=("python3.$minor"); done
    printf '%s\n' "${found[0]}" "${found[-1]}" | uniq
}

# The wheel where there is no compiler: a new environment with nothing else in its PATH trains with it.
check_bare() { # the wheel, the Python
    local at=$scratch/bare-$2
    say "the wheel with $("$2" --version), without a compiler"
    "$2" -m venv "$at"
    "$at/bin/pip" install --quiet --disable-pip-version-check --only-binary :all: "$1" numpy
    local bare=(env -i HOME="$scratch" PATH="$at/bin")
    "${bare[@]}" python -c 'import paraft'
    "${bare[@]}" paraft --version
    (cd "$scratch" && "${bare[@]}" paraft launch --workers 2 --run-dir "$at/run" "$OLDPWD/python/examples/numpy_digits.py")
}

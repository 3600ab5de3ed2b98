#!/usr/bin/env bash
# Which settings of an optimizer Vowpal Wabbit keeps in a saved model, so that `-i MODEL` alone goes on as if it had never stopped.
#
# Seen with vowpalwabbit 9.11.9. Expected from memory: all of them, as a model keeps its bits, its interactions and the optimizer's
# state. In fact:
#   - kept: --learning_rate, --power_t, --bit_precision, --noconstant, and which algorithm (--ftrl, --pistol, --coin);
#   - forgotten without a word: --loss_function, --l1, --l2, --ftrl_alpha, --ftrl_beta, which continue at their defaults: a logistic
#     regression goes on with the squared loss, an FTRL of alpha 0.1 with 0.5;
#   - with the same settings given again, the continued training has the same bits as one that never stopped.
# What this means for us: a checkpoint of a sparse table holds each number of its optimizer, and a resume with another number is refused or
# said. Who compares with a VW that goes on from a model gives it its settings again.
#
#   findings/vw-model-forgets-its-loss.sh
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check vowpalwabbit==9.11.9 numpy
cd "$folder"
cat >goes_on.py <<'PY'
import numpy as np
from vowpalwabbit import Workspace

KEPT = ["", "-l 0.1", "--power_t 0.2", "-b 10", "--noconstant", "--ftrl", "--pistol", "--coin"]
FORGOTTEN = ["--loss_function logistic", "--l1 0.01", "--l2 0.001", "--ftrl --l1 0.01", "--ftrl --l2 0.1"]
FORGOTTEN += ["--ftrl --ftrl_alpha 0.1", "--ftrl --ftrl_beta 3"]

rng = np.random.default_rng(0)
features = [" ".join(f"f{i}:{rng.integers(-8, 9) / 4}" for i in rng.choice(50, 5, replace=False)) for _ in range(400)]
lines = [f"{rng.choice([-1, 1])} | {x}" for x in features]


def train(arguments, lines, save=None):
    with Workspace(f"--quiet {arguments}") as workspace:
        for line in lines:
            workspace.learn(line)
        if save:
            workspace.save(save)
        return np.array([workspace.predict(f"| {x}") for x in features[:50]])


for settings in KEPT + FORGOTTEN:
    whole = train(settings, lines)
    train(settings, lines[:200], save="half.vw")
    alone = np.abs(train("-i half.vw", lines[200:]) - whole).max()
    again = np.abs(train(f"-i half.vw {settings}", lines[200:]) - whole).max()
    print(f"{settings:24} differs by {alone:7.4f} with -i alone, by {again} with the settings again")
    assert again == 0, "it has changed"
    assert (alone > 0.001) == (settings in FORGOTTEN), "it has changed"
PY
venv/bin/python goes_on.py

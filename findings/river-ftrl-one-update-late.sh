#!/usr/bin/env bash
# When the weights of river's FTRLProximal hold what was learned.
#
# Seen with river 0.26.1, beside vowpalwabbit 9.11.9. Expected from memory: after `learn_one`, and L1 makes weights exactly zero, which is
# what FTRL is for (McMahan et al. 2013). In fact:
#   - `learn_one` first computes the weights of its sample from the state before, then updates the state: predictions lack each
#     feature's last update. A feature that was seen once has weight 0 until it is learned again, however many other samples follow;
#   - its gradients are taken at such weights too, so that later steps are not FTRL's;
#   - a weight that isn't 0 never becomes 0 again: within the threshold of L1 it keeps its last value.
# What this means for us: river is no reference for FTRL. In a table a pull after an acknowledged push sees that push, and a
# row within the threshold is exactly 0; both are tests against the formula.
#
#   findings/river-ftrl-one-update-late.sh
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check river==0.26.1 vowpalwabbit==9.11.9
cd "$folder"
cat >late.py <<'PY'
import math

from river import linear_model, optim
from vowpalwabbit import Workspace

ALPHA, BETA = 0.5, 1.0


def river(l1):
    return linear_model.LogisticRegression(optim.FTRLProximal(alpha=ALPHA, beta=BETA, l1=l1, l2=0), intercept_lr=0)


class Formula:
    """FTRL-Proximal of one feature of value 1."""

    def __init__(self, l1):
        self.l1, self.z, self.n, self.w = l1, 0.0, 0.0, 0.0

    def learn(self, label):
        g = 1 / (1 + math.exp(-self.w)) - label
        sigma = (math.sqrt(self.n + g * g) - math.sqrt(self.n)) / ALPHA
        self.z, self.n = self.z + g - sigma * self.w, self.n + g * g
        over = max(abs(self.z) - self.l1, 0)
        self.w = -math.copysign(over, self.z) / ((BETA + math.sqrt(self.n)) / ALPHA)


model, formula = river(0), Formula(0)
workspace = Workspace(f"--quiet --noconstant --loss_function logistic --ftrl --ftrl_alpha {ALPHA} --ftrl_beta {BETA}")
model.learn_one({"a": 1.0}, True)
formula.learn(1)
workspace.learn("1 | a")
for _ in range(100):
    model.learn_one({"b": 1.0}, True)
vw = workspace.predict("| a")
workspace.finish()
print(f"seen once:        formula {formula.w:.4f}, VW {vw:.4f}, river {model.weights['a']:.4f}")
assert abs(vw - formula.w) < 1e-6 and model.weights["a"] == 0, "it has changed"

first = formula.w
model.learn_one({"a": 1.0}, True)
formula.learn(1)
print(f"seen twice:       formula {formula.w:.4f}, river {model.weights['a']:.4f}")
assert model.weights["a"] == first != formula.w, "it has changed"

model, formula = river(0.8), Formula(0.8)
zeroes, held = 0, set()
for label in [1, 1, 1, 0, 0, 0, 0, 1] * 20:
    before, old = model.weights.get("a", 0), formula.w
    within = abs(model.optimizer.z["a"]) <= 0.8 and before != 0
    model.learn_one({"a": 1.0}, bool(label))
    formula.learn(label)
    zeroes += old != 0 and formula.w == 0
    if within:
        held.add(model.weights["a"] == before)
print(f"within L1:        formula from a weight to exactly 0: {zeroes} times; river keeps the weight as it was: {held}")
assert zeroes > 0 and held == {True}, "it has changed"
PY
venv/bin/python late.py

"""Digits of 8 x 8 points, drawn here, learnt by a network of NumPy: its gradients are written out below.

    python numpy_digits.py                                 # one worker, and a server of its own
    paraft launch --workers 2 numpy_digits.py
"""

import os

import numpy as np

import paraft
import paraft.numpy

FONT = "111101101101111 010110010010111 111001111100111 111001111001111 101101111001001"
FONT += " 111100111001111 111100111101111 111001001001001 111101111101111 111101111001111"
GLYPHS = [np.array([int(c) for c in glyph], np.float32).reshape(5, 3) for glyph in FONT.split()]


def digits(n, rng):
    """n pictures of 3 x 5 points near the middle of a noisy 8 x 8, and what they are."""
    y = rng.integers(0, 10, n)
    x = rng.normal(0.0, 0.2, (n, 8, 8)).astype(np.float32)
    for picture, digit in zip(x, y):
        top, left = rng.integers(1, 3), rng.integers(2, 4)
        picture[top : top + 5, left : left + 3] += GLYPHS[digit]
    return x.reshape(n, 64), y


def forward(params, x):
    hidden = np.maximum(x @ params["w1"] + params["b1"], 0.0)
    logits = hidden @ params["w2"] + params["b2"]
    p = np.exp(logits - logits.max(1, keepdims=True))
    return hidden, p / p.sum(1, keepdims=True)


def gradients(params, x, y):
    hidden, p = forward(params, x)
    rows = np.arange(len(y))
    loss = -np.log(p[rows, y] + 1e-12).mean()
    p[rows, y] -= 1.0
    p /= len(y)
    back = (p @ params["w2"].T) * (hidden > 0.0)
    return loss, {"w1": x.T @ back, "b1": back.sum(0), "w2": hidden.T @ p, "b2": p.sum(0)}


def main():
    run = paraft.init() if "PARAFT_SERVERS" in os.environ else paraft.init(paraft.local(servers=1))
    rng = np.random.default_rng(1 + run.rank)  # workers draw their own samples
    first = np.random.default_rng(0)
    params = {
        "w1": first.normal(0.0, 0.18, (64, 96)).astype(np.float32),
        "b1": np.zeros(96, np.float32),
        "w2": first.normal(0.0, 0.14, (96, 10)).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }
    trainer = paraft.numpy.prepare(run, params, optimizer={"kind": "adam", "lr": 3e-3})
    for _ in range(600):
        x, y = digits(64, rng)
        loss, grads = gradients(trainer.params, x, y)
        run.log(loss, samples=64)
        trainer.step(grads)
    run.finish()
    if run.is_first:
        x, y = digits(2000, np.random.default_rng(99))
        right = (forward(trainer.params, x)[1].argmax(1) == y).mean()
        print(f"held-out accuracy {right:.3f}")


if __name__ == "__main__":
    main()

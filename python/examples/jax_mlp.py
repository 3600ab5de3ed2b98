"""The same digits as numpy_digits.py, learnt by a network of JAX.

    python jax_mlp.py                                      # one worker, and a server of its own
    paraft launch --workers 2 jax_mlp.py
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
from numpy_digits import digits

import paraft
import paraft.numpy


def logits(params, x):
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


@jax.jit
@jax.value_and_grad
def gradients(params, x, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits(params, x)), y[:, None], 1).mean()


def main():
    run = paraft.init() if "PARAFT_SERVERS" in os.environ else paraft.init(paraft.local(servers=1))
    rng = np.random.default_rng(1 + run.rank)  # workers draw their own samples
    sizes = [64, 96, 48, 10]
    first = np.random.default_rng(0)
    params = [
        (jnp.asarray(first.normal(0.0, (2.0 / n) ** 0.5, (n, m)), jnp.float32), jnp.zeros(m, jnp.float32))
        for n, m in zip(sizes, sizes[1:])
    ]
    trainer = paraft.numpy.prepare(run, params, optimizer={"kind": "adam", "lr": 3e-3}, clip_norm=1.0)
    params = trainer.params
    for _ in range(600):
        x, y = digits(64, rng)
        loss, grads = gradients(params, x, y)
        run.log(loss, samples=64)
        params = trainer.step(grads)
    run.finish()
    if run.is_first:
        x, y = digits(2000, np.random.default_rng(99))
        right = (logits(trainer.params, x).argmax(1) == y).mean()
        print(f"held-out accuracy {right:.3f}")


if __name__ == "__main__":
    main()

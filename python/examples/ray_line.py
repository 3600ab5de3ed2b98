"""A line that two workers fit in a Ray cluster, with three servers; or on this machine alone.

    ray job submit --working-dir . -- python ray_line.py /shared/runs/line
"""

import sys

import torch

import paraft
import paraft.ray


def train(steps):
    run = paraft.init()
    model = torch.nn.Linear(8, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    # 0, or where an interrupted run continues.
    for _ in range(run.step, steps):
        x = torch.randn(32, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        run.log(loss, samples=32)
        optimizer.step()
        optimizer.zero_grad()
    run.finish()


if __name__ == "__main__":
    # A folder that all nodes share.
    result = paraft.ray.fit(train, 500, workers=2, run_dir=sys.argv[1])  # resources_per_worker={"GPU": 1}
    loss = result.metrics["final_loss"]
    print("no step was left to train" if loss is None else f"loss {loss:.6f}")

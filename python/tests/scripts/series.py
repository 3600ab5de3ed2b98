"""A temporal convolutional network that forecasts a signal, with weight normalization, OneCycleLR and an average of the weights;
of the kind of locuslab/TCN, TCN/adding_problem/add_test.py, and pytorch/examples, time_sequence_prediction.

    torchrun --nproc-per-node 2 series.py --out FOLDER
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def signal(length):
    """Two waves and noise."""
    t = torch.arange(length, dtype=torch.float32)
    noise = torch.randn(length, generator=torch.Generator().manual_seed(0))
    return torch.sin(0.21 * t) + 0.5 * torch.sin(0.047 * t + 1.0) + 0.1 * noise


class Layer(nn.Module):
    """A convolution that sees no future, and a way around it."""

    def __init__(self, inner, outer, dilation):
        super().__init__()
        self.past = 2 * dilation
        self.conv = weight_norm(nn.Conv1d(inner, outer, 3, dilation=dilation))
        self.around = nn.Conv1d(inner, outer, 1) if inner != outer else nn.Identity()
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return F.relu(self.drop(F.relu(self.conv(F.pad(x, (self.past, 0))))) + self.around(x))


class TCN(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.layers = nn.Sequential(Layer(1, width, 1), Layer(width, width, 2), Layer(width, width, 4))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return self.out(self.layers(x[:, None])[:, :, -1])[:, 0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, help="folder for each rank's weights and losses")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    windows = signal(800).unfold(0, 33, 1)
    model = TCN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = OneCycleLR(optimizer, 0.05, total_steps=args.steps + 1)
    ddp = nn.parallel.DistributedDataParallel(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    losses = []
    for step in range(args.steps):
        torch.manual_seed(1000 * rank + step)  # a step's windows are the same whenever it is made
        batch = windows[torch.randint(len(windows), (32,))]
        loss = F.smooth_l1_loss(ddp(batch[:, :-1]), batch[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
        losses.append(loss.item())
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()
    weights = {**model.state_dict(), **{f"average.{key}": value for key, value in average.module.state_dict().items()}}
    torch.save({"weights": weights, "losses": losses}, f"{args.out}/{rank}.pt")


if __name__ == "__main__":
    main()

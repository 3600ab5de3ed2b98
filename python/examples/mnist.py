"""A convolutional network on MNIST, trained on a fleet that survives its servers; beside it, the same by DistributedDataParallel:

    paraft launch --workers 2 mnist.py
"""

import argparse

import paraft.torch
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import digits


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.fc1 = nn.Linear(32 * 12 * 12, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = torch.flatten(F.max_pool2d(x, 2), 1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def train(model, loader, optimizer):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model, loader):
    model.eval()
    hits = sum((model(data).argmax(1) == target).sum().item() for data, target in loader)
    return hits / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description="MNIST")
    parser.add_argument("--data", help="a folder with MNIST's four files; default: small digits")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    args = parser.parse_args()

    torch.manual_seed(1)
    torch.set_num_threads(1)
    run = paraft.init()
    rank, world = run.rank, run.workers
    train_set, test_set = digits.load(args.data)
    sampler = DistributedSampler(train_set, world, rank, seed=1)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    test_loader = DataLoader(test_set, 1000)

    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    ddp, optimizer = run.prepare(model, optimizer)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        loss = train(ddp, train_loader, optimizer)
        scheduler.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {test(model, test_loader):.4f}")
    run.finish()
    if rank == 0:
        torch.save(model.state_dict(), "mnist.pt")


if __name__ == "__main__":
    main()

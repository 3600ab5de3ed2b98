"""An image classifier with mixup, label smoothing and ReduceLROnPlateau; of the kind of pytorch/vision,
references/classification/train.py.

    torchrun --nproc-per-node 2 classifier.py --out FOLDER
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import digits8


class Block(nn.Module):
    """Two convolutions beside a way around them."""

    def __init__(self, inner, outer, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.around = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.around(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(1, 8, 1), Block(8, 16, 2))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.blocks(x).mean((2, 3)))


def mixup(x, y, alpha):
    """Each image blended with another one of the batch, and so their labels."""
    share = float(torch.distributions.Beta(alpha, alpha).sample())
    other = torch.randperm(len(x))
    y = F.one_hot(y, 10).float()
    return share * x + (1 - share) * x[other], share * y + (1 - share) * y[other]


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    loss = sum(F.cross_entropy(model(x), y, reduction="sum").item() for x, y in loader)
    model.train()
    return loss / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, help="folder for each rank's weights and losses")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels = digits8.load()
    held_out = torch.arange(len(labels)) % 5 == 0
    train_set = TensorDataset(images[~held_out], labels[~held_out])
    sampler = DistributedSampler(train_set, world, rank)
    train_loader = DataLoader(train_set, 64, sampler=sampler, drop_last=True)
    test_loader = DataLoader(TensorDataset(images[held_out], labels[held_out]), 180)

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.4)
    model = nn.parallel.DistributedDataParallel(model)

    torch.manual_seed(100 + rank)  # each rank blends its own images
    losses, rates = [], []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            x, y = mixup(x, y, 0.2)
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step(evaluate(model, test_loader))
        rates.append(optimizer.param_groups[0]["lr"])
        if rank == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}, rate {rates[-1]:g}")
    dist.destroy_process_group()
    torch.save({"weights": model.state_dict(), "losses": losses, "rates": rates}, f"{args.out}/{rank}.pt")


if __name__ == "__main__":
    main()

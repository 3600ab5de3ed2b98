"""A variational autoencoder of small images; of the kind of pytorch/examples, vae/main.py.

    torchrun --nproc-per-node 2 vae.py --out FOLDER
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import digits8


class VAE(nn.Module):
    def __init__(self, pixels=64, width=48, codes=8):
        super().__init__()
        self.encoder = nn.Linear(pixels, width)
        self.mean, self.log_variance = nn.Linear(width, codes), nn.Linear(width, codes)
        self.decoder = nn.Sequential(nn.Linear(codes, width), nn.ReLU(), nn.Linear(width, pixels))

    def encode(self, x):
        h = F.relu(self.encoder(x.flatten(1)))
        return self.mean(h), self.log_variance(h)

    def forward(self, x):
        mean, log_variance = self.encode(x)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(code), mean, log_variance


def loss_of(logits, x, mean, log_variance):
    """What is lost of an image, and the divergence of its code from a normal one, of the batch."""
    lost = F.binary_cross_entropy_with_logits(logits, x.flatten(1), reduction="sum")
    divergence = -0.5 * torch.sum(1 + log_variance - mean.square() - log_variance.exp())
    return (lost + divergence) / len(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, help="folder for each rank's weights and losses")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    images, _ = digits8.load()
    images = images[rank::world]
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    ddp = nn.parallel.DistributedDataParallel(model)

    losses = []
    for step in range(args.steps):
        torch.manual_seed(1000 * rank + step)  # a step's images and noise are the same whenever it is made
        x = images[torch.randint(len(images), (64,))]
        optimizer.zero_grad()
        logits, mean, log_variance = ddp(x)
        loss = loss_of(logits, x, mean, log_variance)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()
    torch.save({"weights": model.state_dict(), "losses": losses}, f"{args.out}/{rank}.pt")


if __name__ == "__main__":
    main()

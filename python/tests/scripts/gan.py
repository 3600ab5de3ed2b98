"""A GAN of small images, whose two networks have an optimizer each; of the kind of pytorch/examples, dcgan/main.py.

    torchrun --nproc-per-node 2 gan.py --out FOLDER
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import digits8

NOISE = 16


def generator():
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 16, 2, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 1, 4, 2, 1),
        nn.Sigmoid(),
    )


def discriminator():
    return nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(8, 16, 4, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 1, 2),
        nn.Flatten(0),
    )


def initialize(layer):
    if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(layer.weight, 0.0, 0.05)
    elif isinstance(layer, nn.BatchNorm2d):
        nn.init.normal_(layer.weight, 1.0, 0.02)


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
    net_g, net_d = generator().apply(initialize), discriminator().apply(initialize)
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
    net_g, net_d = (nn.parallel.DistributedDataParallel(net) for net in (net_g, net_d))

    torch.manual_seed(100 + rank)
    ones, zeros = torch.ones(32), torch.zeros(32)
    losses = []
    for step in range(args.steps):
        # The discriminator tells real images from made ones.
        optimizer_d.zero_grad()
        real = images[torch.randint(len(images), (32,))]
        loss_real = F.binary_cross_entropy_with_logits(net_d(real), ones)
        loss_real.backward()
        made = net_g(torch.randn(32, NOISE, 1, 1))
        loss_made = F.binary_cross_entropy_with_logits(net_d(made.detach()), zeros)
        loss_made.backward()
        optimizer_d.step()
        # The generator has its images taken for real ones. What this leaves in the discriminator's gradients is thrown away.
        optimizer_g.zero_grad()
        loss_g = F.binary_cross_entropy_with_logits(net_d(made), ones)
        loss_g.backward()
        optimizer_g.step()
        losses += [loss_real.item() + loss_made.item(), loss_g.item()]
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: discriminator {losses[-2]:.4f}, generator {losses[-1]:.4f}")
    dist.destroy_process_group()
    weights = {f"{name}.{key}": value for name, net in (("g", net_g), ("d", net_d)) for key, value in net.state_dict().items()}
    torch.save({"weights": weights, "losses": losses}, f"{args.out}/{rank}.pt")


if __name__ == "__main__":
    main()

"""A graph convolutional network that finds the two sides of a karate club; of the kind of pytorch/examples, gcn/main.py. Each rank
leaves out edges of its own, and has half of the labels.

    torchrun --nproc-per-node 2 graph.py --out FOLDER
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

#: Zachary, "An Information Flow Model for Conflict and Fission in Small Groups", 1977: each member's friends with a higher number.
FRIENDS = {
    0: [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 17, 19, 21, 31],
    1: [2, 3, 7, 13, 17, 19, 21, 30],
    2: [3, 7, 8, 9, 13, 27, 28, 32],
    3: [7, 12, 13],
    4: [6, 10],
    5: [6, 10, 16],
    6: [16],
    8: [30, 32, 33],
    9: [33],
    13: [33],
    14: [32, 33],
    15: [32, 33],
    18: [32, 33],
    19: [33],
    20: [32, 33],
    22: [32, 33],
    23: [25, 27, 29, 32, 33],
    24: [25, 27, 31],
    25: [31],
    26: [29, 33],
    27: [33],
    28: [31, 33],
    29: [32, 33],
    30: [32, 33],
    31: [32, 33],
    32: [33],
}
EDGES = torch.tensor([(a, b) for a, friends in FRIENDS.items() for b in friends])
#: Those who stayed with the teacher.
STAYED = [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 16, 17, 19, 21]
MEMBERS = 34


def adjacency(edges):
    """The sparse matrix of friends and selves, each row and column scaled by the root of how many they are."""
    both = torch.cat((edges, edges.flip(1), torch.arange(MEMBERS)[:, None].expand(-1, 2)))
    scale = torch.bincount(both[:, 0], minlength=MEMBERS).rsqrt()
    return torch.sparse_coo_tensor(both.t(), scale[both[:, 0]] * scale[both[:, 1]], (MEMBERS, MEMBERS), check_invariants=True)


class GCN(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.enter, self.leave = nn.Linear(MEMBERS, width, bias=False), nn.Linear(width, 2, bias=False)
        self.bias = nn.ParameterList([torch.zeros(width), torch.zeros(2)])

    def forward(self, x, friends):
        h = torch.sparse.mm(friends, self.enter(x)) + self.bias[0]
        h = F.dropout(F.relu(h), 0.5, self.training)
        return torch.sparse.mm(friends, self.leave(h)) + self.bias[1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, help="folder for each rank's weights and losses")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    labels = torch.ones(MEMBERS, dtype=torch.long).index_fill(0, torch.tensor(STAYED), 0)
    known = torch.arange(MEMBERS)[rank::world][::2]
    x = torch.eye(MEMBERS)
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
    ddp = nn.parallel.DistributedDataParallel(model)

    losses = []
    for step in range(args.steps):
        torch.manual_seed(1000 * rank + step)  # a step leaves out the same edges whenever it is made
        friends = adjacency(EDGES[torch.rand(len(EDGES)) < 0.8])
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(x, friends)[known], labels[known])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    model.eval()
    if rank == 0:
        hits = model(x, adjacency(EDGES)).argmax(1) == labels
        print(f"{int(hits.sum())} of {MEMBERS} members are on the right side")
    dist.destroy_process_group()
    torch.save({"weights": model.state_dict(), "losses": losses}, f"{args.out}/{rank}.pt")


if __name__ == "__main__":
    main()

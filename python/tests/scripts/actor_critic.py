"""An actor and a critic with an optimizer each, that learn to balance a pole on a cart: one step of the actor, several of the
critic; of the kind of pytorch/examples, reinforcement_learning/actor_critic.py, and openai/spinningup, vpg.py.

    torchrun --nproc-per-node 2 actor_critic.py --out FOLDER
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical


class Carts:
    """Several carts with a pole each, which is pushed to the left or to the right; one that falls begins again."""

    def __init__(self, count):
        self.state = torch.zeros(count, 4).uniform_(-0.05, 0.05)

    def push(self, actions):
        """Whether each pole fell."""
        x, v, angle, turn = self.state.unbind(1)
        force, half, mass = actions * 20.0 - 10.0, 0.5, 1.1
        push = (force + 0.05 * turn.square() * angle.sin()) / mass
        turns = (9.8 * angle.sin() - angle.cos() * push) / (half * (4 / 3 - 0.1 * angle.cos().square() / mass))
        moves = push - 0.05 * turns * angle.cos() / mass
        self.state = self.state + 0.02 * torch.stack((v, moves, turn, turns), 1)
        fell = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.2)
        self.state = torch.where(fell[:, None], torch.zeros_like(self.state).uniform_(-0.05, 0.05), self.state)
        return fell


def network(outputs):
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, outputs))


def returns_of(fell, last, discount=0.98):
    """The discounted rewards behind each moment, one for each moment that a pole stands."""
    returns, now = [], last
    for down in reversed(fell):
        now = torch.where(down, torch.zeros_like(now), 1.0 + discount * now)
        returns.append(now)
    return torch.stack(returns[::-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, help="folder for each rank's weights and losses")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    actor, critic = network(2), network(1)
    optimizer_a = torch.optim.Adam(actor.parameters(), lr=1e-2)
    optimizer_c = torch.optim.Adam(critic.parameters(), lr=2e-2)
    actor, critic = (nn.parallel.DistributedDataParallel(net) for net in (actor, critic))

    torch.manual_seed(100 + rank)
    carts = Carts(8)
    losses = []
    for step in range(args.steps):
        states, actions, fell = [], [], []
        with torch.no_grad():
            for _ in range(16):
                states.append(carts.state)
                actions.append(Categorical(logits=actor(carts.state)).sample())
                fell.append(carts.push(actions[-1]))
            last = critic(carts.state).squeeze(1)
        states, actions = torch.stack(states), torch.stack(actions)
        returns = returns_of(fell, last)

        advantage = returns - critic(states).squeeze(2).detach()
        choice = Categorical(logits=actor(states))
        loss_a = -(choice.log_prob(actions) * advantage).mean() - 0.01 * choice.entropy().mean()
        optimizer_a.zero_grad()
        loss_a.backward()
        optimizer_a.step()
        for _ in range(3):
            loss_c = (critic(states).squeeze(2) - returns).square().mean()
            optimizer_c.zero_grad()
            loss_c.backward()
            optimizer_c.step()
        losses += [loss_a.item(), loss_c.item()]
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: actor {losses[-2]:.4f}, critic {losses[-1]:.4f}, {int(torch.stack(fell).sum())} fell")
    dist.destroy_process_group()
    weights = {f"{name}.{key}": value for name, net in (("a", actor), ("c", critic)) for key, value in net.state_dict().items()}
    torch.save({"weights": weights, "losses": losses}, f"{args.out}/{rank}.pt")


if __name__ == "__main__":
    main()

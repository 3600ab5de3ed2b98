"""A language model of words: an LSTM with truncated backpropagation, clipping, and a rate that falls when the held-out loss does
not; of the kind of pytorch/examples, word_language_model/main.py.

    torchrun --nproc-per-node 2 lstm.py --out FOLDER
"""

import argparse
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

SUBJECTS, VERBS, THINGS = "the-cat a-dog my-friend".split(), "sees hears follows finds".split(), "the-moon a-bird some-bread water".split()


def sentences(count, seed):
    """Words of a small language, in which a verb decides on what follows."""
    draw = random.Random(seed)
    for _ in range(count):
        verb = draw.randrange(len(VERBS))
        thing = verb if draw.random() < 0.8 else draw.randrange(len(THINGS))
        yield from (*draw.choice(SUBJECTS).split("-"), VERBS[verb], *THINGS[thing].split("-"), "<eos>")


class Model(nn.Module):
    """Its output is tied to the embedding."""

    def __init__(self, words, width=32):
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.encoder = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width)
        self.decoder = nn.Linear(width, words)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, x, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
        return self.decoder(self.drop(output)), hidden

    def first_hidden(self, columns):
        return tuple(torch.zeros(self.rnn.num_layers, columns, self.rnn.hidden_size) for _ in range(2))


def in_columns(ids, columns):
    """The text in columns, each of which goes on from row to row."""
    return ids[: len(ids) // columns * columns].view(columns, -1).t().contiguous()


def detached(hidden):
    """The state without its past: backpropagation ends here."""
    return tuple(h.detach() for h in hidden)


def loss_of(model, data, row, length, hidden):
    x, y = data[row : row + length], data[row + 1 : row + 1 + length]
    output, hidden = model(x[: len(y)], hidden)
    return F.cross_entropy(output.flatten(0, 1), y.flatten()), hidden


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, help="folder for each rank's weights and losses")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--bptt", type=int, default=12)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    words = sorted(set(sentences(200, 0)))
    data, held_out = (
        in_columns(torch.tensor([words.index(w) for w in sentences(count, seed)]), 8) for count, seed in ((220, 1 + rank), (50, 0))
    )
    data = data[:150]
    model = Model(len(words))
    rate, best = 10.0, float("inf")
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    ddp = nn.parallel.DistributedDataParallel(model)

    torch.manual_seed(100 + rank)
    losses = []
    for epoch in range(args.epochs):
        hidden = model.first_hidden(8)
        for row in range(0, len(data) - 1, args.bptt):
            loss, hidden = loss_of(ddp, data, row, args.bptt, detached(hidden))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            now = loss_of(model, held_out, 0, len(held_out), model.first_hidden(8))[0].item()
        model.train()
        if rank == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}, held out {now:.4f}, rate {rate:g}")
        if now > best:
            rate /= 4.0
            optimizer.param_groups[0]["lr"] = rate
        best = min(best, now)
    dist.destroy_process_group()
    torch.save({"weights": model.state_dict(), "losses": losses}, f"{args.out}/{rank}.pt")


if __name__ == "__main__":
    main()

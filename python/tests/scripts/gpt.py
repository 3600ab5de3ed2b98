"""A GPT of characters with gradient accumulation, clipping, and a warm-up before a cosine; of the kind of karpathy/nanoGPT,
train.py.

    torchrun --nproc-per-node 2 gpt.py --out FOLDER
"""

import argparse
import contextlib
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

#: William Shakespeare, Sonnet 18.
TEXT = """Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date;
Sometime too hot the eye of heaven shines,
And often is his gold complexion dimm'd;
And every fair from fair sometime declines,
By chance or nature's changing course untrimm'd;
But thy eternal summer shall not fade,
Nor lose possession of that fair thou ow'st;
"""
CHARACTERS = sorted(set(TEXT))
CONTEXT, WIDTH, HEADS = 32, 32, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        heads = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, 2))
        x = x + self.proj(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(len(CHARACTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.ln = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, len(CHARACTERS), bias=False)
        self.head.weight = self.token.weight
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, x, y):
        h = self.token(x) + self.place(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.ln(h))
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())


def rate(step, steps, high=1e-2, low=1e-3, warm=5):
    if step < warm:
        return high * (step + 1) / warm
    return low + 0.5 * (high - low) * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, help="folder for each rank's weights and losses")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--accumulate", type=int, default=3)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)  # rank 0's weights count; dropout and batches are each rank's own
    text = torch.tensor([CHARACTERS.index(c) for c in TEXT])
    model = GPT()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    ddp = nn.parallel.DistributedDataParallel(model)

    losses = []
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, args.steps)
        total = 0.0
        for micro in range(args.accumulate):
            starts = torch.randint(len(text) - CONTEXT - 1, (8,))
            x = torch.stack([text[i : i + CONTEXT] for i in starts])
            y = torch.stack([text[i + 1 : i + 1 + CONTEXT] for i in starts])
            last = micro == args.accumulate - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                _, loss = ddp(x, y)
                (loss / args.accumulate).backward()
            total += loss.item() / args.accumulate
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {total:.4f}")
    dist.destroy_process_group()
    torch.save({"weights": model.state_dict(), "losses": losses}, f"{args.out}/{rank}.pt")


if __name__ == "__main__":
    main()

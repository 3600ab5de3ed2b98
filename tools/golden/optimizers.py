"""Writes the vectors that paraft-common's optimizer tests compare with.

    python tools/golden/optimizers.py        (needs torch; made with 2.15.0 on CPU)

Each case runs 20 updates of one torch.optim optimizer on 16 weights with fixed gradients and keeps the weights
after each. Values are the hex of the f32's bits, so nothing is lost in print. The schedules are the factors
torch.optim.lr_scheduler gives for a base rate of 1.
"""

import math
import pathlib
import struct

import torch
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LinearLR, StepLR

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE.parent.parent / "common" / "src" / "optim" / "golden"
STEPS, WEIGHTS = 20, 16

CASES = [  # name, table as the job file has it, optimizer class, its arguments, clip by value, rate falls
    ("sgd", {"kind": "sgd", "lr": 0.1}, "SGD", {}, None, False),
    ("sgd-decay-clip", {"kind": "sgd", "lr": 0.1, "weight_decay": 0.05}, "SGD", {}, 0.5, False),
    ("sgd-falling", {"kind": "sgd", "lr": 0.1}, "SGD", {}, None, True),
    ("momentum", {"kind": "momentum", "lr": 0.05}, "SGD", {"momentum": 0.9}, None, False),
    ("momentum-dampened", {"kind": "momentum", "lr": 0.05, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.01},
     "SGD", {}, None, False),
    ("nesterov", {"kind": "nesterov", "lr": 0.05}, "SGD", {"momentum": 0.9, "nesterov": True}, None, False),
    ("nesterov-decay", {"kind": "nesterov", "lr": 0.05, "momentum": 0.7, "weight_decay": 0.02},
     "SGD", {"nesterov": True}, 0.7, True),
    ("adagrad", {"kind": "adagrad", "lr": 0.1}, "Adagrad", {}, None, False),
    ("adagrad-options", {"kind": "adagrad", "lr": 0.1, "eps": 1e-6, "initial_accumulator": 0.1, "lr_decay": 0.05,
                         "weight_decay": 0.01}, "Adagrad", {}, None, False),
    ("rmsprop", {"kind": "rmsprop", "lr": 0.01}, "RMSprop", {}, None, False),
    ("rmsprop-momentum", {"kind": "rmsprop", "lr": 0.01, "alpha": 0.9, "momentum": 0.9, "weight_decay": 0.01},
     "RMSprop", {}, None, False),
    ("rmsprop-centered", {"kind": "rmsprop", "lr": 0.01, "centered": True}, "RMSprop", {}, None, False),
    ("rmsprop-centered-momentum", {"kind": "rmsprop", "lr": 0.01, "alpha": 0.95, "eps": 1e-6, "momentum": 0.5,
                                   "centered": True}, "RMSprop", {}, 1.0, False),
    ("adam", {"kind": "adam"}, "Adam", {}, None, False),
    ("adam-options", {"kind": "adam", "lr": 0.05, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1},
     "Adam", {}, None, False),
    ("adam-small-beta1", {"kind": "adam", "lr": 0.05, "beta1": 0.3}, "Adam", {}, None, True),
    ("adamw", {"kind": "adamw"}, "AdamW", {}, None, False),
    ("adamw-options", {"kind": "adamw", "lr": 0.05, "beta1": 0.85, "beta2": 0.98, "weight_decay": 0.2},
     "AdamW", {}, 0.8, True),
    ("adadelta", {"kind": "adadelta"}, "Adadelta", {}, None, False),
    ("adadelta-options", {"kind": "adadelta", "lr": 0.5, "rho": 0.8, "eps": 1e-4, "weight_decay": 0.05},
     "Adadelta", {}, 0.9, True),
    ("adamax", {"kind": "adamax"}, "Adamax", {}, None, False),
    ("adamax-options", {"kind": "adamax", "lr": 0.05, "beta1": 0.8, "beta2": 0.9, "eps": 1e-4, "weight_decay": 0.1},
     "Adamax", {}, 0.7, True),
    ("nadam", {"kind": "nadam"}, "NAdam", {}, None, False),
    ("nadam-options", {"kind": "nadam", "lr": 0.05, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "momentum_decay": 0.5,
                       "weight_decay": 0.1}, "NAdam", {}, None, True),
    ("nadam-decoupled", {"kind": "nadam", "lr": 0.05, "weight_decay": 0.2, "decoupled_weight_decay": True},
     "NAdam", {}, 0.8, False),
    # beta2 of 0.9: the mean square is trusted from the 7th update on, so both ways of the rule are in the 20.
    ("radam", {"kind": "radam"}, "RAdam", {}, None, False),
    ("radam-options", {"kind": "radam", "lr": 0.05, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.1},
     "RAdam", {}, None, True),
    ("radam-decoupled", {"kind": "radam", "lr": 0.05, "beta2": 0.95, "weight_decay": 0.2,
                         "decoupled_weight_decay": True}, "RAdam", {}, 0.8, False),
]

SCHEDULES = [  # name, table, function from optimizer to scheduler
    ("step", {"kind": "step", "steps": 3, "gamma": 0.5}, lambda o: StepLR(o, 3, 0.5)),
    ("cosine", {"kind": "cosine", "steps": 20, "min_factor": 0.1}, lambda o: CosineAnnealingLR(o, 20, 0.1)),
    ("cosine-to-zero", {"kind": "cosine", "steps": 25}, lambda o: CosineAnnealingLR(o, 25)),
    ("warmup", {"warmup": 5}, lambda o: LinearLR(o, 1 / 5, 1.0, 4)),
    ("warmup-step", {"kind": "step", "steps": 4, "gamma": 0.1, "warmup": 6},
     lambda o: ChainedScheduler([LinearLR(o, 1 / 6, 1.0, 5), StepLR(o, 4, 0.1)])),
]


def bits(tensor):
    return " ".join(struct.pack(">f", x).hex() for x in tensor.tolist())


def literal(value):
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)


def table(options):
    return "{ " + ", ".join(f"{k} = {literal(v)}" for k, v in options.items()) + " }"


def arguments(options, extra):
    """The job file's names in torch's words."""
    args = {k: v for k, v in options.items() if k not in ("kind", "beta1", "beta2", "initial_accumulator")}
    if "beta1" in options or "beta2" in options:
        args["betas"] = (options.get("beta1", 0.9), options.get("beta2", 0.999))
    if "initial_accumulator" in options:
        args["initial_accumulator_value"] = options["initial_accumulator"]
    return {**args, **extra}


def run(options, cls, extra, clip, falls, start, grads):
    weights = torch.nn.Parameter(start.clone())
    optimizer = getattr(torch.optim, cls)([weights], foreach=False, **arguments(options, extra))
    base = optimizer.param_groups[0]["lr"]
    rates, after = [], []
    for t in range(STEPS):
        # The rate reaches our servers as an f32: give torch the same number.
        rate = struct.unpack("f", struct.pack("f", base * (0.9**t if falls else 1.0)))[0]
        optimizer.param_groups[0]["lr"] = rate
        rates.append(rate)
        weights.grad = grads[t].clone()
        if clip is not None:
            torch.nn.utils.clip_grad_value_([weights], clip)
        optimizer.step()
        after.append(weights.detach().clone())
    return rates, after


def main():
    torch.manual_seed(20170612)
    torch.set_num_threads(1)
    # Every other weight starts near 0, where the rounding of a large weight cannot hide an error of the update.
    start = torch.randn(WEIGHTS) * torch.tensor([1.0, 1e-4]).repeat(WEIGHTS // 2)
    # Sizes from 1e-4 to about 10: a rule that is right for one size only is caught.
    size = torch.logspace(-4, 1, WEIGHTS)
    grads = [torch.randn(WEIGHTS) * size for _ in range(STEPS)]
    lines = [f"# Made by tools/golden/optimizers.py with torch {torch.__version__}; f32 bits in hex.",
             f'start = "{bits(start)}"', "grads = ["]
    lines += [f'  "{bits(g)}",' for g in grads] + ["]"]
    for name, options, cls, extra, clip, falls in CASES:
        rates, after = run(options, cls, extra, clip, falls, start, grads)
        assert all(torch.isfinite(a).all() for a in after), name
        lines += ["", "[[case]]", f'name = "{name}"', f"optimizer = {table(options)}"]
        lines += [f"clip = {clip}"] if clip is not None else []
        lines += [f'rates = "{bits(torch.tensor(rates))}"', "after = ["]
        lines += [f'  "{bits(a)}",' for a in after] + ["]"]
    (OUT / "optimizers.toml").write_text("\n".join(lines) + "\n")

    lines = [f"# Made by tools/golden/optimizers.py with torch {torch.__version__}: factors at clock 0, 1, 2, ..."]
    for name, options, make in SCHEDULES:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = make(optimizer)
        factors = []
        for _ in range(STEPS + 1):
            factors.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        assert all(math.isfinite(f) for f in factors), name
        lines += ["", "[[case]]", f'name = "{name}"', f"schedule = {table(options)}"]
        lines += ["factors = [" + ", ".join(repr(float(f)) for f in factors) + "]"]
    (OUT / "schedules.toml").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

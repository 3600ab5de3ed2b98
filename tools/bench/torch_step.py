"""One training step (forward, loss, backward) of the models of `paraft bench gpu`, in PyTorch.

    cat torch_models.py torch_step.py | python - MODEL BATCH PRECISION STEPS eager|compile

prints the seconds of each of STEPS steps as a JSON list. As in Paraft's steps the batch comes from pinned memory and the loss is read;
there is no optimizer, which is the servers' work.
"""


def main():
    name, batch, precision, steps, how = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    if name == "transformer":
        model, time_steps, vocab = Transformer(1024, 50257, 12, 12, 768), 1024, 50257
        x = torch.randint(vocab, (batch, time_steps)).pin_memory()
        y = torch.randint(vocab, (batch * time_steps,)).pin_memory()
    else:
        model = mlp(784, 4096, 4096, 10) if name == "mlp" else convnet()
        x, y = torch.rand(batch, 784).pin_memory(), torch.randint(10, (batch,)).pin_memory()
    model = model.cuda()
    run = torch.compile(model) if how == "compile" else model
    half = {"bf16": torch.bfloat16, "f16": torch.float16}.get(precision)

    def step():
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=half, enabled=half is not None):
            loss = F.cross_entropy(run(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
        loss.backward()
        torch.cuda.synchronize()
        return loss.item()

    for _ in range(10):
        step()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()

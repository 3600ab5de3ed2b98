"""What is asserted of a vLLM server that `paraft feed` keeps at a job's newest version: feed.py FOLDER.

A Llama of two layers is trained under Hugging Face's names. The server's oracle is another one, which starts from the version's folder,
and transformers.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import paraft
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SCRATCH = Path(sys.argv[1])
BASE = SCRATCH / "base"
BEGAN = time.monotonic()
STEPS = 12
PROMPTS = ["ab", "Paraft", "to be or"]
#: Of an empty text: vLLM's packed weights on the CPU are counted as such.
NOTHING = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def say(text):
    print(f"{time.monotonic() - BEGAN:4.0f} s  {text}", flush=True)


def make_base():
    letters = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(BASE)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(letters), max_position_embeddings=128, bos_token_id=0, eos_token_id=1, **sizes)).save_pretrained(BASE)


def train(name):
    """A worker."""
    import paraft.numpy

    run = paraft.init(name=name)
    if name == "other":
        trainer = paraft.numpy.prepare(run, {"w": torch.zeros(4).numpy()}, optimizer={"kind": "sgd", "lr": 0.1})
        trainer.step({"w": torch.ones(4).numpy()})
    else:
        model = LlamaForCausalLM.from_pretrained(BASE)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for step in range(STEPS):
            ids = torch.randint(0, 258, (4, 16), generator=torch.Generator().manual_seed(step % 3))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.5)
    run.finish()


def worker(fleet, name):
    place = {"PARAFT_SERVERS": ",".join(fleet.servers), "PARAFT_RANK": "0", "PARAFT_WORKERS": "1", "PARAFT_LOCAL_RANK": "0"}
    return subprocess.Popen([sys.executable, __file__, str(SCRATCH), name], env={**os.environ, **place}, stdout=(SCRATCH / f"{name}.log").open("w"), stderr=subprocess.STDOUT)


class Server:
    def __init__(self, folder, name, *options):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", SCRATCH / f"{name}.log"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "llama"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", "4"]
        env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        self.process = subprocess.Popen([*command, *options], env=env, stdout=self.log.open("w"), stderr=subprocess.STDOUT, start_new_session=True)

    def __enter__(self):
        while True:
            assert self.process.poll() is None, self.log.read_text()[-5000:]
            with contextlib.suppress(OSError):
                self.call("GET", "/health")
                return self
            time.sleep(0.5)

    def __exit__(self, *_):
        os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait()

    def call(self, method, path, body=None):
        """Status and JSON."""
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as e:
            return e.code, json.loads(e.read())

    def answers(self):
        """Greedy tokens and their logprobs."""
        found = []
        for prompt in PROMPTS:
            order = {"model": "llama", "prompt": prompt, "max_tokens": 16, "temperature": 0, "logprobs": 0, "ignore_eos": True, "return_token_ids": True}
            status, body = self.call("POST", "/v1/completions", order)
            assert status == 200, body
            choice = body["choices"][0]
            found.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
        return found

    def sums(self):
        return {k: v for k, v in self.call("POST", "/weight_checker", {"action": "checksum"})[1]["checksums"].items() if v != NOTHING}

    def state(self):
        return self.call("GET", "/weight_info")[1]["weight_version"], self.call("GET", "/is_paused")[1]["is_paused"]


def by_transformers(folder):
    tokenizer, model, found = PreTrainedTokenizerFast.from_pretrained(folder), LlamaForCausalLM.from_pretrained(folder).eval(), []
    for prompt in PROMPTS:
        ids, chosen = tokenizer(prompt, return_tensors="pt").input_ids, []
        with torch.no_grad():
            for _ in range(16):
                logprobs = model(input_ids=ids).logits[0, -1].float().log_softmax(-1)
                chosen.append((int(logprobs.argmax()), float(logprobs.max())))
                ids = torch.cat([ids, logprobs.argmax().view(1, 1)], 1)
        found.append(([t for t, _ in chosen], [p for _, p in chosen]))
    return found


def same(found, expected):
    """The same tokens; logprobs within what the order of float32 sums makes."""
    assert [t for t, _ in found] == [t for t, _ in expected], (found, expected)
    far = max(abs(a - b) for (_, one), (_, other) in zip(found, expected) for a, b in zip(one, other))
    assert far < 1e-4, far
    return far


def feed(fleet, server, job, *options):
    command = [os.environ["PARAFT_PROGRAM"], "feed", "vllm", server.url, "--job", job, "--fleet", ",".join(fleet.servers), "--json"]
    return subprocess.Popen([*command, "--to", str(SCRATCH / "versions"), "--dtype", "f32", "--timeout", "600", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(feeding):
    out, said = feeding.communicate()
    return feeding.returncode, [json.loads(line) for line in out.splitlines()], said


def main():
    make_base()
    with paraft.local(1) as fleet, paraft.local(1) as small, Server(BASE, "vllm", "--weight-transfer-config", '{"backend": "paraft"}') as server:
        before, sums = server.answers(), server.sums()
        say(f"a server of vLLM has started; {len(sums)} checksums are of something")
        init = {"init_info": {"job": "llama", "dtype": "f32"}}
        for path, body in (("/pause?mode=wait", None), ("/init_weight_transfer_engine", init), ("/start_weight_update", None)):
            assert server.call("POST", path, body)[0] == 200, path
        say("it is paused amid an update, as by a feed that was killed")
        feeding, training = feed(fleet, server, "llama", "--base", str(BASE), "--every", "4"), worker(fleet, "llama")
        code, lines, said = ended(feeding)
        assert (code, training.wait()) == (0, 0), (lines, said, (SCRATCH / "llama.log").read_text()[-3000:])
        versions = [line["version"] for line in lines]
        assert versions[-1] == STEPS and len(versions) > 2 and all(line["ok"] for line in lines), (lines, said)
        assert server.state() == (str(STEPS), False), server.state()
        say(f"it has had versions {versions}; paused {[round(line['paused_seconds'], 3) for line in lines]} s; it serves the last, not paused")
        folder, after = lines[-1]["folder"], server.answers()
        assert [t for t, _ in after] != [t for t, _ in before], "training changes what it says"
        far = same(after, by_transformers(folder))
        say(f"it says what transformers says with {Path(folder).name}: the same tokens, logprobs within {far:.1e}")
        with Server(folder, "fresh") as fresh:
            trained = server.sums()
            assert fresh.answers() == after and fresh.sums() == trained != sums
        say("and, to the bit, what a server says that was started from that folder")

        assert worker(small, "other").wait() == 0, (SCRATCH / "other.log").read_text()[-3000:]
        code, lines, said = ended(feed(small, server, "other"))
        assert code == 69 and all(line["engines"][0]["state"] == "half_loaded" for line in lines), (code, lines, said)
        assert "tensors differ from the weights with which vLLM started" in said, said
        assert server.state() == (str(STEPS), True) and server.sums() == trained, "no weight was changed"
        say(f"versions of another model are refused: {lines[-1]['engines'][0]['why'][:240]}")
        code, lines, said = ended(feed(fleet, server, "llama", "--base", str(BASE)))
        assert code == 0 and lines[-1]["ok"], (lines, said)
        assert server.state() == (str(STEPS), False) and server.answers() == after
        say("the next version of its own job resumes it, and it says what it said before")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        train(sys.argv[2])
    else:
        main()

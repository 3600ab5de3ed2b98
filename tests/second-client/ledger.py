"""A second client of Paraft, and a ledger that it keeps.

Written from docs/protocol.md and the .proto files alone: stock gRPC, none of our crates. What it is for: to show that the
page is enough to write a client from, and that such a client loses nothing and doubles nothing while leaders are killed.

The ledger: the model is a vector of zeros, the optimizer SGD at rate 1. Push number `entry` of worker w on a bucket is 1 at one
place of its own and 0 elsewhere, so each place ends as minus the number of times that its push was applied. 0 of one that was
acknowledged is a lost push, -2 a doubled one.

    client.py          the protocol, for one worker
    ledger.py          this file: what is pushed, and what the final weights say

Prints JSON, one object a line: {"event": "training", "acknowledged": N} twice a second, then the verdict. Ends with 0 where nothing
is lost or doubled, 1 where something is, 2 where it could not go on.
"""

import argparse
import asyncio
import json
import sys
import threading
import time

import client

BREAKS = ["resend-as-new-step", "count-unsent-as-acknowledged"]


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--servers", required=True, help="addresses, comma-separated; one is enough")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--steps", type=int, default=400, help="of each worker, at most")
    p.add_argument("--buckets", type=int, default=6)
    p.add_argument("--mode", default="asp", help="bsp, ssp:S, asp")
    p.add_argument("--durability", default="quorum-memory", help="quorum-memory, quorum-disk")
    p.add_argument("--grace-ms", type=int, default=10_000)
    p.add_argument("--ahead", type=int, default=4, help="steps without an ack, 1 to 5")
    p.add_argument("--pause-ms", type=float, default=5, help="between two steps")
    p.add_argument("--until-eof", action="store_true", help="finish early, when standard input ends")
    p.add_argument("--timeout", type=float, default=60, help="seconds without a leader before it gives up")
    p.add_argument("--break", dest="broken", choices=BREAKS, help="a mistake on purpose: the verdict must be bad")
    return p.parse_args()


def job_text(a, bucket_len):
    scale = 'scale = "linear"\n' if a.mode == "bsp" else ""
    return f"""name = "second-client"
fingerprint = "a vector of zeros"
workers = {a.workers}
mode = "{a.mode}"
params_len = {bucket_len * a.buckets}
buffers_len = 0
bucket_len = {bucket_len}
grace_ms = {a.grace_ms}
durability = "{a.durability}"

[optimizer]
kind = "sgd"
lr = 1.0

[schedule]
{scale}
[clip]
"""


class Ledger:
    """Who has pushed what, and which of it was acknowledged."""

    def __init__(self, a):
        self.a = a
        self.bucket_len = a.workers * a.steps
        self.acknowledged = set()  # (worker, entry, bucket)
        self.made = set()
        self.stale_reads = 0

    def place(self, worker, entry):
        return worker * self.a.steps + entry

    def gradient(self, worker, entry):
        values = [0.0] * self.bucket_len
        if entry is not None:
            values[self.place(worker, entry)] = 1.0
        return values

    def read_own(self, worker, weights, pushed):
        """What a pull brought must hold every push of the worker before it, exactly once."""
        for bucket, entries in pushed.items():
            for entry in entries:
                if round(-weights[bucket][self.place(worker, entry)]) != 1:
                    self.stale_reads += 1

    def verdict(self, weights):
        lost = doubled = unknown_applied = 0
        wrong = []
        for bucket in range(self.a.buckets):
            for worker in range(self.a.workers):
                for entry in range(self.a.steps):
                    key = (worker, entry, bucket)
                    value = -weights[bucket][self.place(worker, entry)]
                    times = round(value)
                    if abs(value - times) > 1e-3:
                        wrong.append(f"{key} reads {value}")
                    most = 1 if key in self.made else 0
                    if key in self.acknowledged:
                        lost += times < 1
                    elif key in self.made:
                        unknown_applied += times > 0
                    doubled += times > most
                    if times > most or (key in self.acknowledged and times < 1):
                        wrong.append(f"worker {worker}, entry {entry}, bucket {bucket}: {times} times")
        return {
            "pushes": len(self.made),
            "acknowledged": len(self.acknowledged),
            "unknown": len(self.made - self.acknowledged),
            "unknown_applied": unknown_applied,
            "lost": lost,
            "doubled": doubled,
            "stale_reads": self.stale_reads,
            "wrong": wrong[:10],
        }


async def page(a, ledger, worker, rank, stop):
    """Everything that one worker does. Gives the final weights."""
    acked = lambda entry, bucket: ledger.acknowledged.add((rank, entry, bucket))
    entry, step = 0, await worker.begin(acked)
    in_session = {b: [] for b in range(a.buckets)}
    while entry < a.steps and not stop.is_set():
        try:
            await worker.room(a.ahead)
            step += 1
            unsent = a.broken == "count-unsent-as-acknowledged" and (rank, entry) == (0, 3)
            for bucket in reversed(range(a.buckets)):
                ledger.made.add((rank, entry, bucket))
                worker.push(bucket, step, ledger.gradient(rank, None if unsent else entry), entry)
                in_session[bucket].append(entry)
            if a.broken == "resend-as-new-step" and (rank, entry) == (0, 3):
                step += 1
                for bucket in reversed(range(a.buckets)):
                    worker.push(bucket, step, ledger.gradient(rank, entry), entry)
            if entry % 4 == 3:
                await worker.pull(step)
                if a.broken is None:
                    ledger.read_own(rank, worker.weights, {b: e[-8:] for b, e in in_session.items()})
            await asyncio.sleep(a.pause_ms / 1000)
            entry += 1
        except client.SessionLost:
            # What was not acknowledged may be in or not: its entries are not used again.
            step = await worker.begin(acked)
            in_session = {b: [] for b in range(a.buckets)}
            entry += 1
    while True:
        try:
            await worker.room(1)
            worker.finish()
            return await worker.pull(step, final=True)
        except client.SessionLost:
            step = await worker.begin(acked)


async def run(a):
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    if a.until_eof:
        threading.Thread(
            target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(stop.set)), daemon=True
        ).start()
    ledger = Ledger(a)
    began = time.monotonic()
    fleet = client.Fleet(a.servers.split(","), a.timeout)
    shards = await fleet.shards()
    job = job_text(a, ledger.bucket_len)
    layout = client.Layout(ledger.bucket_len * a.buckets, 0, ledger.bucket_len, shards)
    lease = max(a.grace_ms / 1000, 1.0)
    workers = [client.Worker(fleet, layout, rank, job, lease) for rank in range(a.workers)]

    async def tell():
        while True:
            print(json.dumps({"event": "training", "acknowledged": len(ledger.acknowledged)}), flush=True)
            await asyncio.sleep(0.5)

    telling = asyncio.create_task(tell())
    pages = [asyncio.create_task(page(a, ledger, w, rank, stop)) for rank, w in enumerate(workers)]
    try:
        finals = await asyncio.gather(*pages)
    finally:
        for task in [telling, *pages]:
            task.cancel()
        for w in workers:
            await w.close()
        await fleet.close()
    verdict = ledger.verdict(finals[0])
    verdict |= {
        "event": "verdict",
        "same_for_all": all(f == finals[0] for f in finals),
        "breaks": sum(w.breaks for w in workers),
        "redirects": sum(w.redirects for w in workers),
        "rejoins": sum(w.rejoins for w in workers),
        "resent": sum(w.resent for w in workers),
        "seconds": round(time.monotonic() - began, 2),
    }
    print(json.dumps(verdict), flush=True)
    good = verdict["lost"] == verdict["doubled"] == verdict["stale_reads"] == 0
    return 0 if good and not verdict["wrong"] and verdict["same_for_all"] and verdict["acknowledged"] else 1


def main():
    try:
        sys.exit(asyncio.run(run(arguments())))
    except client.Failed as e:
        print(json.dumps({"event": "failed", "why": str(e)}), flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main()

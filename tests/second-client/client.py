"""One worker of Paraft, by docs/protocol.md: sessions with the leaders of all shards, over stock gRPC.

    Fleet    addresses and connections
    Layout   which shard has which bucket, and how long it is
    Link     the session with one shard: finds its leader, keeps what is not acknowledged, sends it again after a break
    Worker   the links of one rank: begin, push, pull, finish

Everything runs on one asyncio loop; what keeps it busy for two seconds loses the connections (the server's pings go unanswered).
"""

import asyncio
import importlib
import random
import struct
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path

import grpc
import grpc_tools.protoc

PROTOCOL = 7
MOST_AHEAD = 5  # steps of a bucket without an ack


def generate():
    """The messages and services of the .proto files, compiled into a folder of this process's own."""
    protos = Path(__file__).resolve().parents[2] / "proto" / "proto"
    out = tempfile.TemporaryDirectory(prefix="paraft-second-client-")
    names = ["shard.proto", "control.proto"]
    arguments = ["protoc", f"-I{protos}", f"--python_out={out.name}", f"--grpc_python_out={out.name}"]
    if grpc_tools.protoc.main(arguments + names) != 0:
        raise SystemExit("the .proto files do not compile")
    sys.path.insert(0, out.name)
    modules = ["shard_pb2", "shard_pb2_grpc", "control_pb2", "control_pb2_grpc"]
    return out, [importlib.import_module(m) for m in modules]


GENERATED, (pb, pb_grpc, control, control_grpc) = generate()


class Failed(Exception):
    """It cannot go on."""


class SessionLost(Exception):
    """The worker was taken out of the job; it may begin again."""


class Layout:
    """Trained values and statistics are cut into buckets by themselves; bucket b is on shard b mod shards."""

    def __init__(self, params_len, buffers_len, bucket_len, shards):
        self.lengths = []
        for part in (params_len, buffers_len):
            while part > 0:
                self.lengths.append(min(bucket_len, part))
                part -= bucket_len
        self.by_shard = {}
        for bucket in range(len(self.lengths)):
            self.by_shard.setdefault(bucket % shards, []).append(bucket)
        self.shards = shards

    def shard_of(self, bucket):
        return bucket % self.shards


class Fleet:
    def __init__(self, addresses, timeout):
        self.addresses = list(addresses)
        self.timeout = timeout
        self.channels = {}

    def channel(self, address):
        if address not in self.channels:
            self.channels[address] = grpc.aio.insecure_channel(
                address,
                options=[
                    ("grpc.keepalive_time_ms", 1000),
                    ("grpc.keepalive_timeout_ms", 2000),
                    ("grpc.keepalive_permit_without_calls", 1),
                    ("grpc.http2.max_pings_without_data", 0),
                    # A server that comes back is found at once.
                    ("grpc.initial_reconnect_backoff_ms", 50),
                    ("grpc.min_reconnect_backoff_ms", 50),
                    ("grpc.max_reconnect_backoff_ms", 200),
                ],
            )
        return self.channels[address]

    async def shards(self):
        """How many there are, once the fleet is founded."""
        for attempt in range(int(self.timeout * 10)):
            address = self.addresses[attempt % len(self.addresses)]
            try:
                stub = control_grpc.ControlStub(self.channel(address))
                hello = await stub.Hello(control.HelloRequest(), timeout=2)
                if hello.fleet != 0 and hello.shape.shards > 0:
                    return hello.shape.shards
            except grpc.RpcError:
                pass
            await asyncio.sleep(0.1)
        raise Failed(f"no server of {self.addresses} belongs to a fleet")

    async def close(self):
        for channel in self.channels.values():
            await channel.close()


class Link:
    def __init__(self, worker, shard):
        self.worker, self.shard = worker, shard
        self.session = self.founding = self.term = self.seq = 0
        self.unacked = OrderedDict()  # seq: (message, note)
        self.pulling = None  # the pull that is not answered in full
        self.advance = None
        self.finished = False
        self.out = None  # of the stream that is open
        self.task = asyncio.create_task(self.run())

    # ---- what the worker says ----

    def send(self, **kind):
        if self.out is not None:
            self.out.put_nowait(pb.ToShard(**kind))

    def push(self, bucket, step, version, payload, note):
        self.seq += 1
        message = pb.Push(seq=self.seq, step=step, bucket=bucket, version=version, payload=payload, samples=1)
        self.unacked[self.seq] = (message, note)
        self.send(push=message)

    def pull(self, done, final):
        self.pulling = pb.Pull(done=done, final=final)
        self.send(pull=self.pulling)

    def advance_to(self, step):
        self.advance = pb.Advance(step=step)
        self.send(advance=self.advance)

    def finish(self):
        self.finished = True
        self.send(finish=pb.Finish())

    def oldest(self):
        return min((m.step for m, _ in self.unacked.values()), default=None)

    # ---- the stream ----

    async def run(self):
        try:
            await self.work()
        except Failed as e:
            self.worker.fail(e)
        except asyncio.CancelledError:
            raise
        except Exception as e:  # a mistake of ours: the worker must not wait for ever
            self.worker.fail(Failed(f"shard {self.shard}: {e!r}"))

    async def work(self):
        fleet = self.worker.fleet
        at, since, tries, causes = self.shard % len(fleet.addresses), None, 0, {}
        asked = set()  # who names a leader may not have noticed: nobody is asked twice before everybody was asked
        loop = asyncio.get_running_loop()
        while True:
            address = fleet.addresses[at]
            opened, go, cause = await self.stream(address)
            if go == "end":
                return
            causes[address] = cause
            if opened:
                since, tries = None, 0
                asked.clear()
                self.worker.breaks += 1
            since = since or loop.time()
            if loop.time() - since > fleet.timeout:
                raise Failed(f"shard {self.shard}: no leader within {fleet.timeout} s: {causes}")
            if go != "same":
                if go != "next" and go not in fleet.addresses:
                    fleet.addresses.append(go)
                asked.add(address)
                if asked.issuperset(fleet.addresses):
                    asked = {address}
                fresh = [a for a in fleet.addresses[at + 1 :] + fleet.addresses[:at] if a not in asked]
                if go in fresh:
                    self.worker.redirects += 1
                    at = fleet.addresses.index(go)
                elif fresh:
                    at = fleet.addresses.index(fresh[0])
            tries += 1
            await asyncio.sleep(min(0.1, 0.01 * 2 ** min(tries, 4)) * random.uniform(0.5, 1.0))

    async def stream(self, address):
        """One stream, to its end: whether it was open, where to go then ("same", "next", "end" or an address), and why."""
        out = asyncio.Queue()

        async def messages():
            while (m := await out.get()) is not None:
                yield m

        call = pb_grpc.ShardsStub(self.worker.fleet.channel(address)).Exchange(messages())
        open_ = pb.Open(
            protocol=PROTOCOL,
            shard=self.shard,
            worker=self.worker.rank,
            session=self.session,
            job=self.worker.job,
            founding=self.founding,
        )
        out.put_nowait(pb.ToShard(open=open_))
        opened, beating = False, None
        try:
            await asyncio.wait_for(call.initial_metadata(), 2)
            async for message in call:
                kind = message.WhichOneof("kind")
                if kind == "opened":
                    if message.opened.term < self.term:
                        return opened, "next", "it leads an earlier term than another server"
                    opened = True
                    self.opened(message.opened, out)
                    beating = asyncio.create_task(self.beat())
                elif kind == "refused":
                    go = self.refused(message.refused)
                    return opened, go, message.refused.message
                else:
                    self.message(kind, getattr(message, kind))
            return opened, "next", "the server closed the stream"
        except (grpc.RpcError, asyncio.TimeoutError) as e:
            return opened, "next", getattr(e, "details", lambda: "no answer within 2 s")()
        finally:
            self.out = None
            out.put_nowait(None)
            if beating:
                beating.cancel()
            call.cancel()

    async def beat(self):
        while True:
            await asyncio.sleep(self.worker.lease / 8)
            self.send(beat=pb.Heartbeat())

    def opened(self, o, out):
        first = self.session == 0
        self.session, self.founding, self.term = o.session, o.founding, o.term
        self.out = out
        if not o.initialised:
            for bucket in self.worker.layout.by_shard[self.shard]:
                zeros = bytes(4 * self.worker.layout.lengths[bucket])
                self.send(init=pb.Init(bucket=bucket, payload=zeros))
        for message, _ in self.unacked.values():
            self.worker.resent += 1
            self.send(push=message)
        if self.pulling:
            self.send(pull=self.pulling)
        if self.advance:
            self.send(advance=self.advance)
        if self.finished:
            self.send(finish=pb.Finish())
        if first:
            self.worker.opened(self.shard, o.clock)

    def message(self, kind, m):
        if kind == "ack":
            message, note = self.unacked.pop(m.seq, (None, None))
            if message is not None and not m.dropped:
                self.worker.acked(note, message.bucket)
        elif kind == "weights":
            if self.pulling and m.done == self.pulling.done:
                self.worker.take(m)
                if m.last:
                    self.pulling = None
                    self.worker.answered(self.shard)
        # The others are of jobs that evaluate, clip by norm or have chunks.

    def refused(self, r):
        """Where to go: by the advice, and by the kind where that is not enough."""
        if r.seq > 0 and r.advice != pb.ADVICE_RETRY:
            raise Failed(f"shard {self.shard}: push {r.seq} was refused: {r.message}")
        if r.advice == pb.ADVICE_REDIRECT:
            return r.leader or "next"
        if r.advice == pb.ADVICE_RETRY:
            return "same"
        if r.advice == pb.ADVICE_STOP:
            self.worker.lose_session()
            return "end"
        if r.kind == pb.REFUSAL_KIND_RANK_TAKEN:
            return "same"  # a process that has just died, until the timeout is over
        raise Failed(f"shard {self.shard}: {r.message}")


class Worker:
    """One rank. After SessionLost everything but begin() is in vain."""

    def __init__(self, fleet, layout, rank, job, lease):
        self.fleet, self.layout, self.rank, self.job, self.lease = fleet, layout, rank, job, lease
        self.links = {}
        self.weights = [[0.0] * n for n in layout.lengths]
        self.versions = [0] * len(layout.lengths)
        self.breaks = self.redirects = self.rejoins = self.resent = 0
        self.changed = asyncio.Event()
        self.failure = None
        self.acked = lambda note, bucket: None

    async def begin(self, acked):
        """New sessions on every shard; gives the step to go on from, with its weights pulled."""
        self.acked = acked_and_wake = lambda note, bucket: (acked(note, bucket), self.changed.set())
        while True:
            self.rejoins += bool(self.links)
            await self.close()
            self.failure, self.clocks = None, {}
            self.links = {shard: Link(self, shard) for shard in self.layout.by_shard}
            try:
                await self.wait(lambda: len(self.clocks) == len(self.links))
                start = max(self.clocks.values())
                for shard, clock in self.clocks.items():
                    if clock < start:
                        self.links[shard].advance_to(start)
                await self.pull(start)
                return start
            except SessionLost:
                self.acked = acked_and_wake

    def push(self, bucket, step, values, note):
        payload = struct.pack(f"<{len(values)}f", *values)
        self.links[self.layout.shard_of(bucket)].push(bucket, step, self.versions[bucket], payload, note)
        self.last_step = step

    async def room(self, ahead):
        """Waits until the next step may be pushed with at most so many steps without an ack."""
        ahead = min(ahead, MOST_AHEAD)

        def has_room():
            oldest = [o for link in self.links.values() if (o := link.oldest()) is not None]
            return not oldest or self.last_step + 1 - min(oldest) < ahead

        await self.wait(has_room)

    async def pull(self, done, final=False):
        self.waiting = set(self.links)
        for link in self.links.values():
            link.pull(done, final)
        await self.wait(lambda: not self.waiting)
        return [list(w) for w in self.weights]

    def finish(self):
        for link in self.links.values():
            link.finish()

    async def wait(self, over):
        while not self.failure and not over():
            self.changed.clear()
            await self.changed.wait()
        if self.failure:
            raise self.failure

    async def close(self):
        tasks = [link.task for link in self.links.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- from the links ----

    def opened(self, shard, clock):
        self.clocks[shard] = clock
        self.changed.set()

    def take(self, weights):
        n = self.layout.lengths[weights.bucket]
        if not weights.not_modified:
            self.weights[weights.bucket] = list(struct.unpack(f"<{n}f", weights.payload))
            self.versions[weights.bucket] = weights.version

    def answered(self, shard):
        self.waiting.discard(shard)
        self.changed.set()

    def lose_session(self):
        self.failure = self.failure or SessionLost()
        self.changed.set()

    def fail(self, failure):
        self.failure = failure
        self.changed.set()

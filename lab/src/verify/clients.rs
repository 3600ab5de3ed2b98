//! Clients in this process that push the entries of a ledger and record every acknowledgement.

use paraft_client::{Acked, ClientError};
use paraft_common::{ServerId, ShardId, Step};
use paraft_proof::{At, Fate, Ledger};
use parking_lot::Mutex;
use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        mpsc::Receiver,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// What a client has read at the end: the weights and, worker 0, the rows.
type Read = (Vec<f32>, Vec<f32>);

/// The clients and their observations.
pub struct Clients {
    ledger: Ledger,
    seen: Arc<Observations>,
    workers: Vec<JoinHandle<Result<Read, ClientError>>>,
}

struct Observations {
    stop: AtomicBool,
    /// The last round that clients may start, so the ledger has room until the last fault.
    allowed: AtomicU64,
    /// Rounds that each worker has started.
    begun: Vec<AtomicU64>,
    /// Indexed by worker, then by round and bucket.
    acked: Vec<Vec<AtomicBool>>,
    acks: AtomicU64,
    /// Shards with a killed leader, until a later leader has acknowledged a push of each worker.
    outages: Mutex<Vec<Outage>>,
    gaps: Mutex<Vec<Duration>>,
    /// Pulls without the worker's own push, as text.
    unseen: Mutex<Vec<String>>,
    /// The first client that gave up, with its error.
    failed: Mutex<Option<(u32, ClientError)>>,
}

struct Outage {
    shard: ShardId,
    victim: ServerId,
    since: Instant,
    waiting: BTreeSet<u32>,
}

/// The result of the clients.
pub struct Outcome {
    /// The final weights, from a fresh pull of each worker.
    pub weights: Vec<Vec<f32>>,
    /// The rows of the ledger's table.
    pub rows: Vec<f32>,
    /// Seconds from a leader's death to the next acknowledgement of another one; for each of its shards
    /// and each client.
    pub gaps: Vec<f64>,
    /// Pulls without the worker's own push.
    pub unseen: Vec<String>,
    seen: Arc<Observations>,
    buckets: usize,
}

impl Clients {
    /// Makes all clients join and push: each starts a round every `pace`, if the previous one is done.
    pub fn start(ledger: &Ledger, at: &At, pace: Duration) -> Self {
        let entries = ledger.steps as usize * ledger.pushes();
        let seen = Arc::new(Observations {
            stop: AtomicBool::new(false),
            allowed: AtomicU64::new(0),
            begun: (0..ledger.workers).map(|_| AtomicU64::new(0)).collect(),
            acked: (0..ledger.workers)
                .map(|_| (0..entries).map(|_| AtomicBool::new(false)).collect())
                .collect(),
            acks: AtomicU64::new(0),
            outages: Mutex::default(),
            gaps: Mutex::default(),
            unseen: Mutex::default(),
            failed: Mutex::default(),
        });
        let start = |worker| {
            let (ledger, at, seen) = (*ledger, at.clone(), seen.clone());
            thread::spawn(move || {
                let done = work(&ledger, &at, worker, pace, &seen);
                if let Err(e) = &done {
                    seen.failed.lock().get_or_insert_with(|| (worker, e.clone()));
                }
                done
            })
        };
        Self { ledger: *ledger, seen: seen.clone(), workers: (0..ledger.workers).map(start).collect() }
    }

    /// Pushes acknowledged so far.
    pub fn acknowledged(&self) -> u64 {
        self.seen.acks.load(Relaxed)
    }

    /// The first client that has given up, with its error.
    pub fn failed(&self) -> Option<(u32, ClientError)> {
        self.seen.failed.lock().clone()
    }

    /// Allows rounds up to this share of the ledger, 0 to 1.
    pub fn allow(&self, share: f64) {
        let rounds = (self.ledger.steps as f64 * share.clamp(0.0, 1.0)) as u64;
        self.seen.allowed.store(rounds, Relaxed);
    }

    /// Starts a gap for these shards, whose leader is about to die. It ends for each client at an
    /// acknowledgement on a stream opened later.
    pub fn leader_dies(&self, victim: ServerId, shards: &[ShardId]) {
        let since = Instant::now();
        let waiting: BTreeSet<u32> = (0..self.ledger.workers).collect();
        let outage = |shard: &ShardId| Outage { shard: *shard, victim, since, waiting: waiting.clone() };
        let new = shards.iter().map(outage);
        self.seen.outages.lock().extend(new);
    }

    /// Returns right after a client has started a round, or soon. A kill then hits a push in flight,
    /// while between two rounds it would hit none.
    pub fn next_round(&self) {
        const ROUND_TIMEOUT: Duration = Duration::from_millis(200);
        let sum = || self.seen.begun.iter().map(|b| b.load(Relaxed)).sum::<u64>();
        let (before, since) = (sum(), Instant::now());
        while sum() == before && since.elapsed() < ROUND_TIMEOUT {
            thread::sleep(Duration::from_micros(100));
        }
    }

    /// Whether every client has had an acknowledgement after every death so far.
    pub fn served(&self) -> bool {
        self.seen.outages.lock().is_empty()
    }

    /// Ends the clients: no further round starts, and each pulls the final weights.
    pub fn finish(self) -> Result<Outcome, ClientError> {
        self.seen.stop.store(true, Relaxed);
        let (mut weights, mut rows) = (Vec::new(), Vec::new());
        for w in self.workers {
            let done = w.join().unwrap_or_else(|_| Err(ClientError::Options("a client panicked".into())));
            let (own, all) = done?;
            weights.push(own);
            rows = if all.is_empty() { rows } else { all };
        }
        let gaps = self.seen.gaps.lock().iter().map(Duration::as_secs_f64).collect();
        let unseen = std::mem::take(&mut *self.seen.unseen.lock());
        let (seen, buckets) = (self.seen, self.ledger.pushes());
        Ok(Outcome { weights, rows, gaps, unseen, seen, buckets })
    }
}

impl Outcome {
    /// The last round that a worker began.
    pub fn begun(&self, worker: u32) -> u64 {
        self.seen.begun[worker as usize].load(Relaxed)
    }

    /// The fate of a push: its worker, its round (from 1) and its bucket.
    pub fn fate(&self, worker: u32, round: u64, bucket: usize) -> Fate {
        let entry = (round - 1) as usize * self.buckets + bucket;
        if self.seen.acked[worker as usize][entry].load(Relaxed) {
            Fate::Acknowledged
        } else if round <= self.seen.begun[worker as usize].load(Relaxed) {
            Fate::Unknown
        } else {
            Fate::Unmade
        }
    }
}

fn work(
    ledger: &Ledger,
    at: &At,
    worker: u32,
    pace: Duration,
    seen: &Arc<Observations>,
) -> Result<Read, ClientError> {
    let mut page = ledger.join(at, worker)?;
    let acks = page.client.acks();
    let listener = {
        let (seen, ledger, shards) = (seen.clone(), *ledger, at.shards);
        thread::spawn(move || listen(&seen, &ledger, shards, worker, &acks))
    };
    page.begin()?;
    let mut gradient = vec![0.0; ledger.len()];
    let mut next = Instant::now();
    for round in 1..=ledger.steps {
        while !seen.stop.load(Relaxed) && (Instant::now() < next || round > seen.allowed.load(Relaxed)) {
            thread::sleep(Duration::from_millis(1));
        }
        if seen.stop.load(Relaxed) {
            break;
        }
        next = (next + pace).max(Instant::now());
        ledger.write(worker, Step(round), &mut gradient);
        seen.begun[worker as usize].store(round, Relaxed);
        page.push_gradient(&gradient);
        let pulled = page.pull()?;
        // Pushes of an ended session may be lost, and so may those that a leader alone had
        // acknowledged.
        let reads_own = !pulled.rejoined && !ledger.durability.is_leader();
        if let Some(bucket) = ledger.missing(worker, Step(round), &page.weights).filter(|_| reads_own) {
            let what =
                format!("worker {worker}, round {round}, bucket {bucket}: pulled without its own push");
            seen.unseen.lock().push(what);
        }
    }
    let read = page.finish_with_rows()?;
    let _ = listener.join(); // the client and its channel are gone
    Ok(read)
}

/// Records acknowledgements until the client is gone.
fn listen(seen: &Observations, ledger: &Ledger, shards: u32, worker: u32, acks: &Receiver<Acked>) {
    let buckets_of =
        |shard: ShardId| (shard.0 as usize..ledger.pushes()).step_by(shards as usize).count() as u64;
    for ack in acks {
        // A client pushes all buckets of a shard in each round, so the number of its pushes gives the
        // round. Its steps do not, after the loss of a session.
        let round = (ack.seq - 1) / buckets_of(ack.shard).max(1);
        let entry = round as usize * ledger.pushes() + ack.bucket.0 as usize;
        if let Some(acked) = seen.acked[worker as usize].get(entry) {
            acked.store(true, Relaxed);
            seen.acks.fetch_add(1, Relaxed);
        }
        let mut outages = seen.outages.lock();
        for o in outages.iter_mut().filter(|o| o.shard == ack.shard) {
            let later = ack.opened > o.since;
            // Another leader's acknowledgement on an older stream: the victim had handed the shard over
            // before it died, so this client has no gap. An acknowledgement of the victim itself was in
            // flight at its death, and does not count.
            let counts = later || ack.leader != o.victim;
            if counts && o.waiting.remove(&worker) && later {
                seen.gaps.lock().push(ack.at.saturating_duration_since(o.since));
            }
        }
        outages.retain(|o| !o.waiting.is_empty());
    }
}

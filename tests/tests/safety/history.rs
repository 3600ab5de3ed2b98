//! What real workers saw of a real shard while its leader died, checked by stateright against a sequential
//! model. Is there an order of all pushes and reads, each between its call and its answer, that one copy of
//! the shard could have produced?

use anyhow::{Result, ensure};
use paraft_common::Mode;
use paraft_proto::{Open, PROTOCOL, Pull, from_shard, to_shard};
use paraft_tests::{
    fleet::{At, Fleet, FleetOptions},
    ledger::Ledger,
    stream::Stream,
    wait::DEADLINE,
};
use stateright::semantics::{ConsistencyTester, LinearizabilityTester, SequentialSpec};
use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

/// A shard with one bucket: the applied pushes, whose number is the version.
#[derive(Clone, Debug, Default)]
struct Model {
    applied: BTreeSet<usize>,
}

#[derive(Clone, Debug, PartialEq)]
enum Op {
    /// The push with the 1 at this index.
    Push(usize),
    Read,
}

#[derive(Clone, Debug, PartialEq)]
enum Ret {
    /// Acknowledged; with the version that contains it, or a later one if it was sent again.
    Pushed(u64),
    /// The indices that are not 0, and the version.
    Weights(BTreeSet<usize>, u64),
}

impl Model {
    fn version(&self) -> u64 {
        self.applied.len() as u64
    }
}

impl SequentialSpec for Model {
    type Op = Op;
    type Ret = Ret;

    fn invoke(&mut self, op: &Op) -> Ret {
        match op {
            Op::Push(place) => {
                self.applied.insert(*place);
                Ret::Pushed(self.version())
            }
            Op::Read => Ret::Weights(self.applied.clone(), self.version()),
        }
    }

    fn is_valid_step(&mut self, op: &Op, ret: &Ret) -> bool {
        match (op, ret) {
            (Op::Push(place), Ret::Pushed(version)) => {
                self.applied.insert(*place) && *version >= self.version()
            }
            (Op::Read, Ret::Weights(applied, version)) => {
                *applied == self.applied && *version == self.version()
            }
            _ => false,
        }
    }
}

type History = LinearizabilityTester<u32, Model>;

fn new_history() -> History {
    LinearizabilityTester::new(Model::default())
}

/// A scripted worker: one push or read at a time, which it repeats in the same session until it is answered.
struct Worker {
    id: u32,
    at: At,
    ledger: Ledger,
    history: Arc<Mutex<History>>,
    stream: Option<Stream>,
    session: u64,
    founding: u64,
    next: usize,
    done: u64,
}

impl Worker {
    /// A stream with an open session, at the current leader.
    fn stream(&mut self) -> Result<&mut Stream> {
        let began = Instant::now();
        while self.stream.is_none() {
            ensure!(began.elapsed() < DEADLINE, "worker {} finds no leader", self.id);
            self.next = (self.next + 1) % self.at.addresses.len();
            if let Ok(stream) = self.open(self.next) {
                self.stream = stream;
            }
            if self.stream.is_none() {
                thread::sleep(Duration::from_millis(10));
            }
        }
        Ok(self.stream.as_mut().unwrap_or_else(|| unreachable!("the loop ended")))
    }

    fn open(&mut self, server: usize) -> Result<Option<Stream>> {
        let mut stream = Stream::connect(&self.at.addresses[server])?;
        let job = self.ledger.job().to_toml()?;
        let (session, founding) = (self.session, self.founding);
        let open = Open { protocol: PROTOCOL, shard: 0, worker: self.id, session, job, founding };
        stream.send(to_shard::Kind::Open(open));
        let Some(from_shard::Kind::Opened(o)) = stream.receive()? else { return Ok(None) };
        assert!(self.session == 0 || self.session == o.session, "it lost its session, and was never away");
        (self.session, self.founding) = (o.session, o.founding);
        if !o.initialised {
            let payload = vec![0; self.ledger.len() * 4].into();
            stream.send(to_shard::Kind::Init(paraft_proto::Init {
                bucket: 0,
                payload,
                ..Default::default()
            }));
        }
        Ok(Some(stream))
    }

    /// Repeats the message until `answer` accepts a reply.
    fn ask<T>(&mut self, kind: to_shard::Kind, answer: impl Fn(&from_shard::Kind) -> Option<T>) -> Result<T> {
        loop {
            let stream = self.stream()?;
            stream.send(kind.clone());
            // Anything else answers an earlier try, or ends this stream.
            while let Ok(Some(message)) = stream.receive() {
                if let Some(found) = answer(&message) {
                    return Ok(found);
                }
                if matches!(message, from_shard::Kind::Refused(_)) {
                    break;
                }
            }
            self.stream = None;
        }
    }

    fn invoke(&self, op: Op) {
        let mut history = self.history.lock().expect("no worker panics with it");
        history.on_invoke(self.id, op).expect("one at a time");
    }

    fn returns(&self, ret: Ret) {
        let mut history = self.history.lock().expect("no worker panics with it");
        history.on_return(self.id, ret).expect("it was invoked");
    }

    fn push(&mut self) -> Result<()> {
        let step = self.done + 1;
        let place = self.ledger.place(self.id, paraft_common::Step(step));
        let mut payload = vec![0u8; self.ledger.len() * 4];
        payload[place * 4..place * 4 + 4].copy_from_slice(&1f32.to_le_bytes());
        let payload = payload.into();
        let push = paraft_proto::Push {
            seq: step,
            step,
            bucket: 0,
            version: 0,
            sum_of_squares: 1.0,
            payload,
            samples: 1,
            ..Default::default()
        };
        self.invoke(Op::Push(place));
        let version = self.ask(to_shard::Kind::Push(push), |m| match m {
            from_shard::Kind::Ack(a) if a.seq == step => Some(a.version),
            _ => None,
        })?;
        self.returns(Ret::Pushed(version));
        self.done = step;
        Ok(())
    }

    fn read(&mut self) -> Result<()> {
        self.invoke(Op::Read);
        let pull = Pull { done: self.done, ..Pull::default() };
        let (applied, version) = self.ask(to_shard::Kind::Pull(pull), |m| match m {
            from_shard::Kind::Weights(w) => {
                let value = |b: &[u8; 4]| f32::from_le_bytes(*b);
                let values = w.payload.as_chunks::<4>().0.iter().map(value);
                let applied: BTreeSet<usize> =
                    values.enumerate().filter(|(_, v)| *v != 0.0).map(|(i, _)| i).collect();
                Some((applied, w.version))
            }
            _ => None,
        })?;
        self.returns(Ret::Weights(applied, version));
        Ok(())
    }
}

/// The history of three workers; the shard's leader dies whenever the job reaches one of `kills` pushes.
fn history(kills: &[u64], steps: u64) -> Result<History> {
    const WORKERS: u32 = 3;
    let mut fleet = Fleet::start(FleetOptions::replicated(1))?;
    let ledger = Ledger { bucket_len: 1 << 10, grace_ms: 60_000, ..Ledger::new(Mode::Asp, WORKERS, steps) };
    let history = Arc::new(Mutex::new(new_history()));
    let pushed = Arc::new(AtomicU64::new(0));
    let workers: Vec<_> = (0..WORKERS)
        .map(|id| {
            let (at, history, pushed) = (fleet.at.clone(), history.clone(), pushed.clone());
            let next = id as usize;
            let mut worker =
                Worker { id, at, ledger, history, stream: None, session: 0, founding: 0, next, done: 0 };
            thread::spawn(move || -> Result<()> {
                worker.read()?;
                while worker.done < steps {
                    worker.push()?;
                    pushed.fetch_add(1, SeqCst);
                    worker.read()?;
                }
                Ok(())
            })
        })
        .collect();
    for at in kills {
        paraft_tests::wait::until("the job to get going", || pushed.load(SeqCst), |p| p >= at);
        let (leader, _) = fleet.leader(paraft_common::ShardId(0));
        fleet.kill(leader);
        fleet.restart_server(leader)?;
        fleet.whole()?;
    }
    for w in workers {
        w.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??;
    }
    fleet.replicas_agree()?;
    let history = history.lock().expect("the workers are done").clone();
    Ok(history)
}

#[test]
fn history_under_leader_deaths_is_linearizable() -> Result<()> {
    let history = history(&[12, 60], 40)?;
    assert!(history.is_consistent(), "no order explains it: {history:#?}");
    Ok(())
}

/// Checks the checker.
#[test]
fn histories_that_no_single_copy_could_have_shown_are_refused() {
    let play = |events: &[(u32, Result<Op, Ret>)]| {
        let mut h = new_history();
        for (worker, event) in events {
            match event.clone() {
                Ok(op) => h.on_invoke(*worker, op).expect("well formed"),
                Err(ret) => h.on_return(*worker, ret).expect("well formed"),
            };
        }
        h.is_consistent()
    };
    let weights = |places: &[usize]| Ret::Weights(places.iter().copied().collect(), places.len() as u64);
    let (push, read) = (|p| Ok(Op::Push(p)), || Ok(Op::Read));
    let pushed = |v| Err(Ret::Pushed(v));
    let saw = |places: &[usize]| Err(weights(places));
    // Legal: a read during a push may show it or not; an unanswered push may be applied.
    assert!(play(&[(0, push(1)), (1, read()), (1, saw(&[])), (0, pushed(1)), (1, read()), (1, saw(&[1]))]));
    assert!(play(&[(0, push(1)), (1, read()), (1, saw(&[1])), (0, pushed(1))]));
    assert!(play(&[(0, push(1)), (1, read()), (1, saw(&[1]))]), "no answer came, and it is in");
    // Lost after its acknowledgement.
    assert!(!play(&[(0, push(1)), (0, pushed(1)), (1, read()), (1, saw(&[]))]));
    // Seen, and then gone.
    assert!(!play(&[(0, push(1)), (1, read()), (1, saw(&[1])), (1, read()), (1, saw(&[]))]));
    // Applied twice: the version is one too high.
    let twice = Err(Ret::Weights(BTreeSet::from([1]), 2));
    assert!(!play(&[(0, push(1)), (0, pushed(1)), (0, read()), (0, twice)]));
    // Two readers that disagree about the order of two pushes.
    assert!(!play(&[
        (0, push(1)),
        (1, push(2)),
        (2, read()),
        (2, saw(&[1])),
        (3, read()),
        (3, saw(&[2])),
        (0, pushed(1)),
        (1, pushed(2)),
    ]));
    // No worker pushed it.
    assert!(!play(&[(0, read()), (0, saw(&[7]))]));
}

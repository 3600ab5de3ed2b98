//! Servers join and leave while workers push.

use anyhow::{Context, Result, ensure};
use paraft_common::{Mode, ShardId, Step};
use paraft_tests::{
    fleet::{At, Fleet, FleetOptions},
    ledger::{Ledger, Page},
    wait,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
        mpsc::{Receiver, channel},
    },
    thread,
};

/// Two workers that push until the test stops them.
struct Load {
    ledger: Ledger,
    stop: Arc<AtomicBool>,
    steps: Arc<AtomicU64>,
    ended: Receiver<Result<(u64, Vec<f32>)>>,
}

impl Load {
    fn start(at: &At) -> Self {
        let ledger = Ledger { bucket_len: 1 << 10, ..Ledger::new(Mode::Asp, 2, 30_000) };
        let (stop, steps) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (tell, ended) = channel();
        for w in 0..2 {
            let (at, stop, steps, tell) = (at.clone(), stop.clone(), steps.clone(), tell.clone());
            let work = move || -> Result<(u64, Vec<f32>)> {
                let mut page: Page = ledger.join(&at, w)?;
                page.begin()?;
                while !stop.load(SeqCst) && page.done.0 < ledger.steps {
                    page.step()?;
                    steps.fetch_add(1, SeqCst);
                }
                let (done, rejoins) = (page.done.0, page.client.counters().rejoins);
                ensure!(rejoins == 0, "worker {w} lost its session");
                Ok((u64::from(w) << 32 | done, page.finish()?))
            };
            thread::spawn(move || tell.send(work()));
        }
        Self { ledger, stop, steps, ended }
    }

    /// Waits for this many more steps.
    fn goes_on(&self, more: u64) {
        let upto = self.steps.load(SeqCst) + more;
        wait::until("the workers to go on", || self.steps.load(SeqCst), |s| *s >= upto);
    }

    /// Ends the job: every push must be applied once, and nothing else.
    fn ends(self, fleet: &Fleet) -> Result<()> {
        self.stop.store(true, SeqCst);
        let mut done = [0; 2];
        let mut weights = Vec::new();
        for _ in 0..2 {
            let (who, last) =
                self.ended.recv_timeout(wait::DEADLINE).context("a worker waits for ever")??;
            done[(who >> 32) as usize] = who as u32 as u64;
            weights.push(last);
        }
        ensure!(weights[0] == weights[1], "two workers end with different weights");
        for w in 0..2u32 {
            for step in 1..=self.ledger.steps {
                let expected = if step <= done[w as usize] { -1.0 } else { 0.0 };
                let found = weights[0][self.ledger.place(w, Step(step))];
                ensure!(found == expected, "worker {w}, step {step} of {}: {found}", done[w as usize]);
            }
        }
        fleet.replicas_agree()?;
        for shard in (0..fleet.at.shards).map(ShardId) {
            ensure!(fleet.leader(shard).1.workers_lost == 0, "{shard} took a worker out");
        }
        Ok(())
    }
}

fn replicas_on(fleet: &Fleet, server: u32) -> usize {
    fleet.status(server, false).map_or(usize::MAX, |s| s.shards.len())
}

#[test]
fn server_joining_under_load_takes_its_share_of_replicas() -> Result<()> {
    let mut fleet = Fleet::start(FleetOptions::replicated(3))?;
    let load = Load::start(&fleet.at);
    load.goes_on(20);
    let new = fleet.join_server()?;
    // Nine replicas on four servers: two each, and three on one.
    wait::until("its share", || replicas_on(&fleet, new), |n| *n == 2);
    let d = fleet.whole()?;
    for s in &d.shards {
        ensure!(s.voters.len() == 3 && s.learners.is_empty(), "{s:?}");
    }
    load.goes_on(20);
    // Its replicas are as good as the others': each shard keeps a majority that may include one of them.
    let (leader, _) = fleet.leader(ShardId(0));
    fleet.kill(leader);
    load.goes_on(20);
    load.ends(&fleet)
}

/// The server that leads a shard is drained and stopped while workers push.
#[test]
fn leaders_server_drained_under_load_loses_no_push() -> Result<()> {
    let mut fleet = Fleet::start(FleetOptions { servers: 4, ..FleetOptions::replicated(3) })?;
    let load = Load::start(&fleet.at);
    load.goes_on(20);
    let (leader, _) = fleet.leader(ShardId(0));
    fleet.drain(leader, false)?;
    wait::until("it to be empty", || replicas_on(&fleet, leader), |n| *n == 0);
    let d = fleet.whole()?;
    for s in &d.shards {
        ensure!(s.voters.len() == 3 && !s.voters.contains(&u64::from(leader)), "{s:?}");
    }
    load.goes_on(20);
    fleet.kill(leader);
    load.goes_on(20);
    load.ends(&fleet)
}

#[test]
fn a_drain_that_is_taken_back_leaves_the_server_in_use() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::replicated(3))?;
    let load = Load::start(&fleet.at);
    load.goes_on(20);
    // Three servers for three replicas: it can transfer its leadership, but not its replicas.
    fleet.drain(0, false)?;
    let leads = || {
        let shards = fleet.status(0, false).map(|s| s.shards).unwrap_or_default();
        shards.iter().filter(|s| s.role == "leader").count()
    };
    wait::until("its leadership to be elsewhere", leads, |n| *n == 0);
    fleet.drain(0, true)?;
    wait::until("it to lead again", leads, |n| *n == 1);
    ensure!(replicas_on(&fleet, 0) == 3, "it kept its replicas");
    load.ends(&fleet)
}

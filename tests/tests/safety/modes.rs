//! Who waits for whom.

use anyhow::Result;
use paraft_common::{Mode, Step};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    ledger::Ledger,
    wait,
};
use std::{
    collections::BTreeSet,
    sync::mpsc::{Receiver, Sender, channel},
    thread,
};

/// Tells which worker was let go, and after which step.
type Log = (u32, Step);

/// Plays a script ("worker w does its next step") and notes who is let go by each line.
fn play(mode: Mode, script: &[u32]) -> Result<Vec<BTreeSet<Log>>> {
    let fleet = Fleet::start(FleetOptions::default())?;
    let ledger = Ledger::new(mode, 3, 64);
    let (told, gone): (Sender<Log>, Receiver<Log>) = channel();
    thread::scope(|s| {
        let mut actors = Vec::new();
        for w in 0..ledger.workers {
            let (go, orders) = channel::<()>();
            let (told, fleet) = (told.clone(), &fleet);
            actors.push((go, s.spawn({
                let servers = fleet.addresses.clone();
                let (shards, replicas) = (fleet.shards, fleet.replicas);
                move || -> Result<()> {
                    let mut page = ledger.join_at(servers, shards, replicas, w)?;
                    page.begin()?;
                    let _ = told.send((w, Step(0)));
                    for () in orders {
                        let pulled = page.step()?;
                        anyhow::ensure!(mode.may_proceed(pulled.slowest, pulled.done), "{pulled:?}");
                        let _ = told.send((w, pulled.done));
                    }
                    Ok(())
                }
            })));
        }
        for _ in 0..ledger.workers {
            gone.recv_timeout(wait::DEADLINE)?; // everyone has started
        }
        let mut free: BTreeSet<u32> = (0..ledger.workers).collect();
        let mut lines = Vec::new();
        for &w in script {
            // A script may name a worker that is still held: it does nothing then, in every mode alike.
            let mut let_go = BTreeSet::new();
            if free.remove(&w) {
                let before = fleet.shard().pulls_waited;
                let _ = actors[w as usize].0.send(());
                // The line is over when the worker was let go or is known to be held.
                wait::until(
                    "the worker to be let go or held",
                    || {
                        let_go.extend(gone.try_iter());
                        (let_go.iter().any(|(x, _)| *x == w), fleet.shard().pulls_waited > before)
                    },
                    |(gone, held)| *gone || *held,
                );
                if let_go.iter().any(|(x, _)| *x == w) {
                    // Its step may have let others go too: the same apply answers them, so they are on their way.
                    let active = 3 - free.len() - let_go.len();
                    let _ = active;
                }
                free.extend(let_go.iter().map(|(x, _)| *x));
            }
            lines.push(let_go);
        }
        drop(actors.iter_mut().map(|(go, _)| std::mem::replace(go, channel().0)).collect::<Vec<_>>());
        Ok(lines)
    })
}

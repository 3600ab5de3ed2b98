//! Certificates change under load. Alone in its process, which shows one certificate at a time.

use anyhow::{Result, ensure};
use paraft_client::ClientError;
use paraft_common::Mode;
use paraft_tests::{
    closed::closed,
    fleet::{Fleet, FleetOptions},
    ledger::Ledger,
    wait,
};
use std::time::Duration;

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Certificates end, are renewed, and so is the authority, while workers push and servers die: every acknowledged push is in once.
#[test]
fn certificates_change_while_pushes_go_on_and_none_is_lost() -> Result<()> {
    let closed = closed();
    let mut fleet = Fleet::start(FleetOptions { closed: true, ..FleetOptions::replicated(2) })?;
    let steps = 400;
    let ledger = Ledger { grace_ms: 30_000, ..Ledger::new(Mode::Asp, 2, steps) };
    let at = fleet.at.clone();
    let workers: Vec<_> = (0..2)
        .map(|page| {
            let at = at.clone();
            std::thread::spawn(move || -> Result<Vec<f32>, ClientError> {
                let mut page = ledger.join(&at, page)?;
                page.begin()?;
                for _ in 0..steps {
                    page.step()?;
                    std::thread::sleep(Duration::from_millis(10));
                }
                page.finish()
            })
        })
        .collect();
    let pushes = |fleet: &Fleet| -> u64 {
        let all = (0..3).filter_map(|id| fleet.status(id, false).ok()).flat_map(|s| s.shards);
        all.map(|s| s.pushes).max().unwrap_or(0)
    };
    let goes_on = |fleet: &Fleet, what: &str| {
        let before = pushes(fleet);
        wait::until(what, || pushes(fleet), |now| *now > before + 20);
    };
    goes_on(&fleet, "pushes");
    // The servers' certificate ends soon, and is renewed before.
    closed.issue("peer", &["peer"], Duration::from_secs(3))?;
    goes_on(&fleet, "pushes under a certificate that ends");
    closed.issue("peer", &["peer"], DAY)?;
    fleet.kill(1);
    goes_on(&fleet, "pushes without a server");
    fleet.restart_server(1)?;
    fleet.whole()?;
    // The clients' own, of this process, has ended: connections are closed, and made anew with the next.
    closed.shows(&["peer", "admin"], Duration::from_secs(2))?.set();
    fleet.kill(2);
    fleet.restart_server(2)?;
    std::thread::sleep(Duration::from_secs(3));
    closed.shows(&["peer", "admin"], DAY)?.set();
    goes_on(&fleet, "pushes with another certificate");
    for worker in workers {
        let weights = worker.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??;
        let wrong: Vec<_> = weights.iter().enumerate().filter(|(_, w)| **w != -1.0).collect();
        ensure!(wrong.is_empty(), "not applied once: {wrong:?}");
    }
    fleet.replicas_agree()?;
    Ok(())
}

//! Crowds of strangers cost no worker its connection, and no server its memory.

use anyhow::{Context, Result};
use paraft_common::{Mode, ShardId, Step};
use paraft_proto::{Connections, limits, services, shards_client::ShardsClient};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    ledger::Ledger,
    raw::{Call, FloodResult},
    wait,
};
use std::net::TcpStream;

fn connections(fleet: &Fleet, server: u32) -> Result<Connections> {
    fleet.status(server, false)?.connections.context("a server says how many there are")
}

#[test]
fn two_thousand_silent_connections_are_closed_in_training() -> Result<()> {
    const CROWD: usize = 2000;
    // Both ends are in this process.
    let limit = paraft_host::raise_descriptor_limit();
    anyhow::ensure!(limit > 3 * CROWD as u64, "this test needs a higher limit of descriptors than {limit}");
    let fleet = Fleet::start(FleetOptions::replicated(1))?;
    let ledger = Ledger { bucket_len: 4, ..Ledger::new(Mode::Bsp, 1, 400) };
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    let (leader, _) = fleet.leader(ShardId(0));
    let crowd: Vec<_> = (0..CROWD)
        .map(|_| TcpStream::connect(&fleet.at.addresses[leader as usize]))
        .collect::<std::io::Result<_>>()?;
    let mut steps = 0;
    let taken = |c: &Result<Connections>| {
        c.as_ref().is_ok_and(|c| c.unknown as usize + c.silent as usize + c.shed as usize >= CROWD)
    };
    wait::until("the crowd to be taken in", || connections(&fleet, leader), taken)?;
    let gone = |c: &Result<Connections>| c.as_ref().is_ok_and(|c| c.unknown == 0 && c.silent > 0);
    let train = || {
        if steps < 300 {
            page.step()?;
            steps += 1;
        }
        connections(&fleet, leader)
    };
    let seen = wait::until("the crowd to be closed", train, gone)?;
    assert!(steps > 0);
    assert_eq!(seen.silent as usize, CROWD, "each because it was silent: {seen:?}");
    assert!(seen.workers == 1 && seen.servers >= 2, "{seen:?}");
    drop(crowd);
    assert_eq!(page.run()?, vec![-1.0; ledger.len()]);
    Ok(())
}

#[test]
fn streams_beyond_connection_bound_are_refused() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::default())?;
    let ledger = Ledger { bucket_len: 4, ..Ledger::new(Mode::Asp, 1, 40) };
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    let seen = Call::flood(&fleet.at.addresses[0], services::EXCHANGE, 50_000)?;
    let FloodResult { taken, refused, closed } = seen;
    assert!((1..=limits::MAX_STREAMS).contains(&taken), "{seen:?}");
    assert!(refused > 0 || closed, "{seen:?}");
    page.step()?;
    assert_eq!(page.run()?, vec![-1.0; ledger.len()]);
    Ok(())
}

#[test]
fn server_counts_connections_by_rank_and_free_places() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::replicated(1))?;
    let ledger = Ledger { bucket_len: 4, ..Ledger::new(Mode::Bsp, 1, 8) };
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    let (leader, _) = fleet.leader(ShardId(0));
    let ranked = |c: &Result<Connections>| {
        c.as_ref().is_ok_and(|c| c.workers == 1 && c.readers >= 1 && c.servers >= 2 && c.shed == 0)
    };
    wait::until("each to have its rank", || connections(&fleet, leader), ranked)?;
    let status = fleet.status(leader, false)?;
    assert!(status.descriptors > 10 && status.descriptors < status.descriptors_limit, "{status:?}");
    assert!(status.queued_bytes <= status.queued_bytes_limit && status.queued_bytes_limit > 0, "{status:?}");
    page.run()?;
    Ok(())
}

/// Many clients ask for digests at once: each gets one, and the same one of the same state.
#[test]
fn crowd_asking_for_digests_is_answered_during_training() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::replicated(1))?;
    let ledger = Ledger { bucket_len: 1 << 16, ..Ledger::new(Mode::Bsp, 1, 1 << 20) };
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    let before = fleet.replicas_agree()?;
    let (leader, _) = fleet.leader(ShardId(0));
    let address = fleet.at.addresses[leader as usize].clone();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let answers =
        runtime.block_on(async {
            let channel =
                tonic::transport::Endpoint::from_shared(format!("http://{address}"))?.connect().await?;
            let ask = || {
                let mut client = ShardsClient::new(channel.clone());
                async move {
                    client.status(paraft_proto::StatusRequest { digest: true, ..Default::default() }).await
                }
            };
            anyhow::Ok(futures::future::try_join_all((0..3000).map(|_| ask())).await?)
        })?;
    let of = |r: &tonic::Response<paraft_proto::StatusReply>| r.get_ref().shards.first().map(|s| s.digest);
    assert!(answers.iter().all(|a| of(a) == before.get(&0).copied()), "nothing has changed the state");
    page.step()?;
    assert_eq!(ledger.missing(0, Step(1), &page.finish()?), None, "training continues");
    Ok(())
}

//! The status of a simulated fleet during the run, in the messages of real servers, for the live page.
//!
//! Observers live in real time, so simulated time is slowed down. Observation changes nothing: it reads
//! the leaders' counters and draws no random number.
//!
//! Not modelled: replicas share one state, so no follower lags; there is no control group; servers have
//! no processes with memory.

use crate::{clock::nanos, servers::Host, world::World};
use paraft_common::placement;
use paraft_proto::{DescribeReply, FleetShape, JobInfo, ServerInfo, ShardInfo, ShardStatus, StatusReply};
use paraft_server::rpc::status::of_state;
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

/// The poll interval in real time.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Simulated time advances in steps of this length.
const STRIDE: Duration = Duration::from_millis(10);

/// A snapshot of the fleet.
#[derive(Clone, Debug)]
pub struct FleetSnapshot {
    /// Simulated time since the start.
    pub at: Duration,
    /// The reply of a control group's leader.
    pub fleet: DescribeReply,
    /// The status of each running server by address, with the shards that it leads.
    pub servers: BTreeMap<String, StatusReply>,
}

/// The observer.
pub type Watcher = Box<dyn FnMut(FleetSnapshot) + Send>;

/// Limits simulated time to real time, and passes snapshots to the observer.
pub(crate) async fn slowed(world: Arc<World>, watcher: Arc<Mutex<Watcher>>) {
    let mut looked: Option<Instant> = None;
    loop {
        let began = Instant::now();
        if looked.is_none_or(|at| at.elapsed() >= POLL_INTERVAL) {
            looked = Some(began);
            (watcher.lock())(said(&world, false));
        }
        world.clock.sleep(nanos(STRIDE.as_secs_f64())).await;
        // The whole fleet runs on this thread, so it pauses.
        std::thread::sleep(STRIDE.saturating_sub(began.elapsed()));
    }
}

fn address(server: usize) -> String {
    format!("s{server}")
}

/// The current snapshot.
pub(crate) fn said(world: &World, over: bool) -> FleetSnapshot {
    let servers = &world.servers;
    let up = servers.up.lock().clone();
    let mut infos: Vec<ServerInfo> = (up.iter().enumerate())
        .map(|(id, up)| ServerInfo {
            server: id as u64,
            address: address(id),
            state: if *up { "up" } else { "silent" }.into(),
            ..ServerInfo::default()
        })
        .collect();
    let mut replies: BTreeMap<String, StatusReply> = (up.iter().enumerate())
        .filter(|(_, up)| **up)
        .map(|(id, _)| {
            (address(id), StatusReply { server: id as u64, address: address(id), ..StatusReply::default() })
        })
        .collect();
    let (mut shards, mut bytes, mut started) = (Vec::new(), 0, false);
    for host in servers.hosts.values() {
        let lead = host.lead.lock().as_ref().map(|l| (l.server, l.term));
        let holders = placement::replicas_of(host.id, up.len() as u32, servers.replicas);
        let voters: Vec<u64> = holders.iter().map(|s| s.0).collect();
        let silent: Vec<u64> = voters.iter().copied().filter(|s| !up[*s as usize]).collect();
        let status = status(host, lead);
        for s in &voters {
            let info = &mut infos[*s as usize];
            (info.holds, info.bytes) = (info.holds + 1, info.bytes + status.state_bytes);
        }
        bytes += status.state_bytes * voters.len() as u64;
        shards.push(ShardInfo {
            shard: host.id.0,
            state: if 2 * silent.len() >= voters.len() && !silent.is_empty() {
                "no-majority"
            } else {
                "serving"
            }
            .into(),
            voters,
            leader: lead.map(|(server, _)| server as u64),
            silent,
            ..ShardInfo::default()
        });
        started |= status.started;
        if let Some((server, _)) = lead {
            infos[server].leads += 1;
            replies.entry(address(server)).and_modify(|r| r.shards.push(status));
        }
    }
    let job = JobInfo {
        founding: 1,
        name: world.file.name.clone(),
        mode: world.file.train.mode.to_string(),
        workers: world.workers,
        durability: world.job.durability.to_string(),
        state: if over {
            "finished"
        } else if started {
            "running"
        } else {
            "waiting"
        }
        .into(),
        shape: Some(FleetShape {
            shards: world.shards,
            replicas: servers.replicas,
            durability: world.job.durability.to_string(),
        }),
        bytes,
        ..JobInfo::default()
    };
    let fleet =
        DescribeReply { fleet: 1, servers: infos, shards, jobs: vec![job], ..DescribeReply::default() };
    FleetSnapshot { at: Duration::from_nanos(world.clock.now()), fleet, servers: replies }
}

/// The counters of a shard's leader.
fn status(host: &Host, lead: Option<(usize, u64)>) -> ShardStatus {
    host.state.view(|conf, m| ShardStatus {
        role: "leader".into(),
        term: lead.map_or(0, |(_, term)| term),
        leader: lead.map(|(server, _)| server as u64),
        ..of_state(host.id, conf, m, &host.counters)
    })
}

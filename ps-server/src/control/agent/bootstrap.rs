//! How a server gets its fleet: it founds one with the others of its list, or finds an existing one.

use super::Agent;
use crate::{
    control::state::{Command, Shape},
    raft::ReplicaId,
};
use paraft_common::ServerId;
use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

/// Servers that found a fleet without all listed ones wait this long for the others.
const FOUND_TIMEOUT: Duration = Duration::from_secs(2);

impl Agent {
    /// Returns when this server belongs to a fleet; fails with the differences if that was founded with other
    /// settings.
    pub(super) async fn form(self: &Arc<Self>) -> Result<(), String> {
        let began = Instant::now();
        let Some(ours) = self.options.shape else { return Ok(()) }; // it has been in a fleet
        while self.fleet() == 0 {
            // Another server has founded it meanwhile: the leader of the control group does so if the founder
            // has died.
            if let (fleet @ 1.., fleets) = self.agreed.read(|s| (s.fleet, s.shape)) {
                return self.belong(fleet, fleets);
            }
            let mut fresh = BTreeMap::from([(self.group().me(), self.options.address.clone())]);
            for (id, address) in (0u64..).zip(&self.options.servers) {
                if ServerId(id) == self.options.server || *address == self.options.address {
                    continue;
                }
                match self.calls.hello(address).await {
                    Ok(hello) if hello.fleet != 0 => {
                        self.heard(address, &hello);
                        tracing::info!(peer = %address, "joining its fleet");
                        return self.belong(hello.fleet, hello.shape);
                    }
                    Ok(hello) => {
                        if hello.shape != Some(ours) {
                            if !self.complained.swap(true, Relaxed) {
                                let theirs = hello.shape.map(|s| s.to_string()).unwrap_or_default();
                                tracing::error!(peer = %address, theirs, %ours,
                                    "it was started with other settings; start all servers with the same");
                            }
                            continue;
                        }
                        self.heard(address, &hello);
                        fresh.insert(hello.node, address.clone());
                    }
                    Err(e) => tracing::debug!(peer = %address, error = %e, "no answer yet"),
                }
            }
            self.ask_servers();
            let all = fresh.len() == self.options.servers.len();
            let enough = fresh.len() * 2 > self.options.servers.len() && began.elapsed() > FOUND_TIMEOUT;
            let first = self.options.servers.first() == Some(&self.options.address);
            if first && (all || enough) {
                if let Err(e) = self.found(&fresh, ours).await {
                    tracing::info!(error = %e, "the fleet is not founded yet; trying again");
                } else {
                    return Ok(());
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// The first server of the list founds the fleet with those that answer; the others are admitted later.
    async fn found(&self, members: &BTreeMap<ReplicaId, String>, shape: Shape) -> Result<(), String> {
        self.group().found(members).await?;
        let mut leadership = self.group().leadership();
        let led = leadership.wait_for(|l| l.leader.is_some());
        let _ = tokio::time::timeout(Duration::from_secs(5), led).await;
        let fleet = rand::random_range(1..u64::MAX);
        let servers = members.iter().map(|(n, a)| (n.server(), a.clone())).collect();
        let command = Command::Found { fleet, shape, servers };
        // If the leadership moved at once, the leader's own loop founds the fleet (see `lead`).
        if self.propose(command).await.is_ok() {
            tracing::info!(servers = members.len(), %shape, "the fleet is founded");
        }
        Ok(())
    }

    /// This server belongs to the fleet from now on, unless it was started with other settings: a founding
    /// fixes them for good.
    pub(super) fn belong(&self, fleet: u64, fleets: Option<Shape>) -> Result<(), String> {
        if let (Some(own), Some(fleets)) = (self.options.shape, fleets) {
            own.must_be(fleets)?;
        }
        let new = self.fleet.swap(fleet, Relaxed) != fleet;
        if new {
            self.replicas.peers().belong(fleet);
            self.remembered.store(false, Relaxed);
        }
        if self.remembered.load(Relaxed) {
            return Ok(());
        }
        // If the disk fails, it is tried again with the next report.
        match (self.remember)(fleet) {
            Ok(()) => self.remembered.store(true, Relaxed),
            Err(e) if new => tracing::error!(error = %e, "this server's identity cannot be written yet"),
            Err(e) => tracing::debug!(error = %e, "this server's identity still cannot be written"),
        }
        Ok(())
    }
}

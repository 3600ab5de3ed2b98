//! This server's replica of the control group. Its vote or its snapshot may fail while the shards' replicas
//! work, and the reverse: so it is stopped and started again by itself, from the same folder and under the
//! same name.

use super::state::Agreed;
use crate::{
    raft::{FolderError, GroupOptions, Peers, Role},
    replicated::{Group, Hosted},
};
use parking_lot::{Mutex, RwLock};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::watch;

/// The replica, and how to start it again.
pub struct ControlReplica {
    options: GroupOptions,
    agreed: Arc<Agreed>,
    peers: Arc<Peers>,
    current: RwLock<Group>,
    /// Why it does not run at present, and since when.
    waits: Mutex<Option<(String, Instant)>>,
    /// Counts starts; `None`: the server ends.
    starts: watch::Sender<Option<u64>>,
}

/// The pause before it is started again, doubled with each try...
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// ...up to this.
const LAST_PAUSE: Duration = Duration::from_secs(2);

impl ControlReplica {
    /// Starts it. A failure is an error: the caller, which starts the server, tries again.
    pub async fn start(
        options: GroupOptions,
        agreed: Arc<Agreed>,
        peers: Arc<Peers>,
    ) -> Result<Self, FolderError> {
        let group = Group::start(options.clone(), Arc::new(Hosted(agreed.clone())), peers.clone()).await?;
        Ok(Self {
            options,
            agreed,
            peers,
            current: RwLock::new(group),
            waits: Mutex::default(),
            starts: watch::channel(Some(0)).0,
        })
    }

    /// The replica as it runs, or ran last.
    pub fn get(&self) -> Group {
        self.current.read().clone()
    }

    /// Why it does not run at present, and since when; `None` while it runs.
    pub fn stopped(&self) -> Option<(String, Instant)> {
        self.waits.lock().clone()
    }

    /// Changes with every start; `None` when the server ends.
    pub fn starts(&self) -> watch::Receiver<Option<u64>> {
        self.starts.subscribe()
    }

    /// Restarts it when it stops, until [`Self::shutdown`].
    pub async fn supervise(self: Arc<Self>) {
        let mut ended = self.starts();
        let mut pause = FIRST_PAUSE;
        loop {
            let group = self.get();
            if self.stopped().is_none() {
                let mut leadership = group.leadership();
                tokio::select! {
                    // A server that ends has stopped it itself.
                    biased;
                    () = async { drop(ended.wait_for(Option::is_none).await) } => return,
                    () = async { drop(leadership.wait_for(|l| l.role == Role::Stopped).await) } => {}
                }
                if ended.borrow().is_none() {
                    return;
                }
                let why = group.trouble().unwrap_or_default();
                tracing::error!(why, "the control group's replica has stopped; it is started again");
                *self.waits.lock() = Some((why, Instant::now()));
                group.shutdown().await;
                pause = FIRST_PAUSE;
            }
            tokio::time::sleep(pause).await;
            if ended.borrow().is_none() {
                return;
            }
            self.agreed.learn_again();
            match Group::start(
                self.options.clone(),
                Arc::new(Hosted(self.agreed.clone())),
                self.peers.clone(),
            )
            .await
            {
                Ok(group) => {
                    tracing::info!("the control group's replica runs again");
                    *self.current.write() = group;
                    *self.waits.lock() = None;
                    self.starts.send_modify(|n| *n = n.map(|n| n + 1));
                }
                Err(e) => {
                    let since = self.stopped().map_or_else(Instant::now, |(_, since)| since);
                    *self.waits.lock() = Some((e.to_string(), since));
                    pause = (pause * 2).min(LAST_PAUSE);
                }
            }
        }
    }

    /// Stops it for good.
    pub async fn shutdown(&self) {
        self.starts.send_replace(None);
        self.get().shutdown().await;
    }
}

#[cfg(test)]
#[path = "replica_tests.rs"]
mod tests;

//! A port of a process that is no server of the fleet: connections once their other end is known.

use crate::{Access, Wire, role::Need};
use std::time::Duration;
use tokio::{net::TcpListener, sync::mpsc};

/// Connections whose handshake is under way, at most; more wait to be accepted.
const BEGUN: usize = 16;
/// Within this time it must be over.
const PATIENCE: Duration = Duration::from_secs(5);

/// Those of a listener at whose other end somebody is who may do that with this job. They end with what takes them.
pub fn wires(listener: TcpListener, need: Need, job: String) -> mpsc::Receiver<Wire> {
    let (tx, rx) = mpsc::channel(BEGUN);
    tokio::spawn(async move {
        while let Ok(room) = tx.clone().reserve_owned().await {
            let Ok((socket, from)) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            let job = job.clone();
            tokio::spawn(async move {
                let access = Access::ours();
                match tokio::time::timeout(PATIENCE, access.accept(socket, true)).await {
                    Ok(Ok((wire, rights))) if rights.are_enough_for(need, Some(&job)) => {
                        drop(room.send(wire))
                    }
                    Ok(Ok((_, rights))) => tracing::warn!(%from, %rights, %need, "refused"),
                    Ok(Err(failed)) => tracing::warn!(%from, "refused: {}", failed.why),
                    Err(_) => {}
                }
            });
        }
    });
    rx
}

//! A port of a process that is not a server of the fleet: its connections, once their peers are identified.

use crate::{Access, Wire, role::Need};
use std::time::Duration;
use tokio::{net::TcpListener, sync::mpsc};

/// Maximum number of connections with a handshake in progress; more wait to be accepted.
const MAX_HANDSHAKES: usize = 16;
/// Timeout of a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// The connections of a listener whose peers have this right for this job. They end when the receiver is
/// dropped.
pub fn wires(listener: TcpListener, need: Need, job: String) -> mpsc::Receiver<Wire> {
    let (tx, rx) = mpsc::channel(MAX_HANDSHAKES);
    tokio::spawn(async move {
        while let Ok(room) = tx.clone().reserve_owned().await {
            let Ok((socket, from)) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            let job = job.clone();
            tokio::spawn(async move {
                let access = Access::ours();
                match tokio::time::timeout(HANDSHAKE_TIMEOUT, access.accept(socket, true)).await {
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

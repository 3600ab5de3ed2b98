//! A relay's listener: that of a server, with one service.

use super::{ServerError, close_stalled, expire, limited};
use crate::{
    connections::{self, Connections},
    rpc::{
        relay::{Origin, RelayService},
        rights::RightsLayer,
    },
};
use paraft_proto::shards_server::ShardsServer;
use paraft_tls::Access;
use std::sync::Arc;
use tokio::{net::TcpListener, sync::watch};

/// Serves versions on `listener`, until `shutdown` resolves.
///
/// # Errors
/// The listener fails.
pub async fn relay(
    origin: Arc<impl Origin>,
    listener: TcpListener,
    access: Access,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ServerError> {
    let address = listener.local_addr().map_err(|e| ServerError::Io("no address".into(), e))?.to_string();
    let room = || connections::room(paraft_host::descriptor_limit(), 0, 0);
    let connections = Connections::new(room, access.clone());
    let (stop, stopped) = watch::channel(());
    tokio::spawn(expire(connections.clone(), access, stopped.clone()));
    tokio::spawn(close_stalled(connections.clone(), stopped));
    // A lane is for training.
    let (incoming, readers) = connections::incoming(listener, connections, drop);
    let service = RelayService::new(address, origin);
    let router = || limited().layer(RightsLayer(None)).add_service(ShardsServer::new(service.clone()));
    let for_readers = tokio::spawn(router().serve_with_incoming(readers));
    tokio::select! {
        served = router().serve_with_incoming(incoming) => served?,
        () = shutdown => {}
    }
    for_readers.abort();
    drop(stop);
    Ok(())
}

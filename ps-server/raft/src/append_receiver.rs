//! A leader's stream of appends on the follower: every request is forwarded at once, and the answers return in
//! order.

use super::{
    group::Group,
    types::Types,
    wire::{self, WireError},
};
use bytes::Bytes;
use futures::{Stream, StreamExt, future::ready, stream};
use openraft::{
    async_runtime::WatchReceiver,
    raft::{AppendEntriesRequest, AppendEntriesResponse},
};
use paraft_proto::{PeerRequest, WithBulk};
use parking_lot::Mutex;
use std::{collections::VecDeque, sync::Arc};

/// State shared by the two ends of a stream.
#[derive(Default)]
struct Shared {
    /// For each unanswered request: whether it wakes this replica after its answer.
    wakes: VecDeque<bool>,
    /// Why no more requests are accepted.
    refused: Option<WireError>,
}

impl Group {
    /// A leader's request, and whether it wakes this replica. A heartbeat of the leader under which it sleeps does
    /// not.
    pub(super) fn append_of(
        &self,
        request: WithBulk<PeerRequest>,
    ) -> Result<(AppendEntriesRequest<Types>, bool), WireError> {
        let own = self.raft.server_metrics().borrow_watched().vote;
        let mut rpc: AppendEntriesRequest<Types> = wire::decode(&request.message.header)?;
        self.bounded(&rpc.vote)?;
        wire::attach(&mut rpc, request.bulk)?;
        let wakes = !rpc.entries.is_empty() || rpc.vote != own;
        Ok((rpc, wakes))
    }

    /// Answers a stream of appends. The first invalid request ends it, after the answers to the earlier ones.
    pub fn answer_appends<S>(
        &self,
        requests: S,
    ) -> impl Stream<Item = Result<Bytes, WireError>> + Send + use<S>
    where
        S: Stream<Item = Result<WithBulk<PeerRequest>, WireError>> + Send + 'static,
    {
        let shared = Arc::new(Mutex::new(Shared::default()));
        let (this, taken, given) = (self.clone(), shared.clone(), shared.clone());
        let requests = requests.map(move |request| this.append_of(request?));
        let requests = requests.scan((), move |(), request| {
            let mut shared = taken.lock();
            ready(match request {
                Ok((rpc, wakes)) => {
                    shared.wakes.push_back(wakes);
                    Some(rpc)
                }
                Err(e) => {
                    shared.refused = Some(e);
                    None
                }
            })
        });
        let this = self.clone();
        let answers = self.raft.stream_append(requests).boxed().map(move |answer| {
            let answer = AppendEntriesResponse::<Types>::from(answer.map_err(WireError::new)?);
            if given.lock().wakes.pop_front() == Some(true) && this.is_asleep() {
                this.wake();
            }
            wire::encode(&answer)
        });
        let refused = stream::once(async move { shared.lock().refused.take() });
        answers.chain(refused.filter_map(|e| ready(e.map(Err))))
    }
}

//! A leader's stream of appends on the follower: every request is forwarded at once, and the answers return in
//! order.

use super::{
    group::Group,
    types::{Types, Vote},
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
use std::{collections::VecDeque, sync::Arc, time::Instant};

/// What is kept of a leader's request until its answer.
pub(super) struct Arrival {
    at: Instant,
    vote: Vote,
    /// It wakes this replica after its answer. A last heartbeat of a leader that falls asleep too does not.
    pub wakes: bool,
}

/// State shared by the two ends of a stream.
#[derive(Default)]
struct Shared {
    unanswered: VecDeque<Arrival>,
    /// Why no more requests are accepted.
    refused: Option<WireError>,
}

impl Group {
    /// A leader's request.
    pub(super) fn append_of(
        &self,
        request: WithBulk<PeerRequest>,
    ) -> Result<(AppendEntriesRequest<Types>, Arrival), WireError> {
        let at = Instant::now();
        let own = self.raft.server_metrics().borrow_watched().vote;
        let mut rpc: AppendEntriesRequest<Types> = wire::decode(&request.message.header)?;
        self.bounded(&rpc.vote)?;
        wire::attach(&mut rpc, request.bulk)?;
        let vote = rpc.vote;
        let wakes = !rpc.entries.is_empty() || vote != own || self.sleeps_alone();
        Ok((rpc, Arrival { at, vote, wakes }))
    }

    /// A leader's request is answered. Only one that is refused for its vote says nothing about the leader.
    pub(super) fn appended(&self, request: &Arrival, answer: &AppendEntriesResponse<Types>) {
        if !matches!(answer, AppendEntriesResponse::HigherVote(_)) {
            self.ticks.heard(request.at, &request.vote);
        }
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
                Ok((rpc, arrival)) => {
                    shared.unanswered.push_back(arrival);
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
            let arrival = given.lock().unanswered.pop_front();
            if let Some(arrival) = arrival {
                this.appended(&arrival, &answer);
                if arrival.wakes && this.is_asleep() {
                    this.wake();
                }
            }
            wire::encode(&answer)
        });
        let refused = stream::once(async move { shared.lock().refused.take() });
        answers.chain(refused.filter_map(|e| ready(e.map(Err))))
    }
}

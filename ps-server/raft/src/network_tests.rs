//! A snapshot over a link that breaks and flips bytes.

use super::*;
use crate::{
    Group, GroupOptions, Replicated,
    testing::{Parts, group, write},
    types::{Committed, SnapshotMeta},
    wire::SnapshotPiece,
};
use paraft_changes::ReplicaId;
use paraft_common::ServerId;
use paraft_proto::{
    PeerReply, limits,
    services::{Handler, Route},
};
use tonic::{Status, body::Body};

/// Faults of a piece before it gets through.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// The connection breaks, this many times.
    Broken(u32),
    /// A byte is flipped.
    Flipped,
}

/// A follower behind a faulty link.
#[derive(Clone)]
struct Line {
    follower: Group,
    faults: Arc<Mutex<HashMap<u64, Fault>>>,
    /// Pieces that were sent, and whether they arrived.
    tried: Arc<Mutex<Vec<(u64, bool)>>>,
}

impl Handler for Line {
    const NAME: &'static str = "paraft.v1.Peers";

    async fn handle(self, request: http::Request<Body>) -> http::Response<Body> {
        let request = services::only(request, limits::MAX_MESSAGE_BYTES).await.expect("a call");
        self.call(request).await.map_or_else(services::refuse, services::one)
    }
}

impl Line {
    async fn call(&self, mut request: WithBulk<PeerRequest>) -> Result<PeerReply, Status> {
        let (_, piece): (Vote, SnapshotPiece) = wire::decode(&request.message.header).expect("a piece");
        let fault = self.faults.lock().remove(&piece.index);
        match fault {
            Some(Fault::Broken(times)) => {
                if times > 1 {
                    self.faults.lock().insert(piece.index, Fault::Broken(times - 1));
                }
                self.tried.lock().push((piece.index, false));
                return Err(Status::unavailable("the connection broke"));
            }
            Some(Fault::Flipped) => {
                let mut bytes = request.bulk[0].to_bytes().to_vec();
                let middle = bytes.len() / 2;
                bytes[middle] ^= 1;
                request.bulk[0] = bytes.into();
            }
            None => {}
        }
        let answer = self.follower.answer(request).await;
        self.tried.lock().push((piece.index, answer.is_ok()));
        let header = answer.map_err(|e| Status::invalid_argument(e.to_string()))?;
        Ok(PeerReply { header, ..PeerReply::default() })
    }
}

/// Eight different parts.
fn state() -> Parts {
    let state = Parts::default();
    for part in 0..8u32 {
        let bytes = (part as f32 + 0.5).to_le_bytes().repeat(8);
        state.apply(&write(part, bytes)).expect("written");
    }
    state
}

struct Transfer {
    line: Line,
    follower: Arc<Parts>,
    leader: Parts,
    connection: Connection,
}

impl Transfer {
    async fn new(faults: &[(u64, Fault)]) -> Self {
        let (follower, leader) = (Arc::new(Parts::default()), state());
        let [me, to] = [0, 1].map(|s| ReplicaId::new_incarnation(ServerId(s)));
        let options = GroupOptions {
            group: group(),
            me: to,
            folder: None,
            election: Duration::from_secs(10),
            check_every: None,
        };
        let started = Group::start(options, follower.clone(), Arc::default()).await.expect("it starts");
        let faults = Arc::new(Mutex::new(faults.iter().copied().collect()));
        let line = Line { follower: started, faults, tried: Arc::default() };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let service = Route(line.clone());
        let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
        tokio::spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming));
        let connection = Connection {
            peers: Arc::default(),
            group: group().number,
            me,
            target: to.0,
            address,
            addresses: Addresses::default(),
            voter_logs: VoterLogs::default(),
            bulk: true,
            silent: false,
        };
        Self { line, follower, leader, connection }
    }

    async fn send(&self) -> Result<Vote, CallError> {
        let last_log_id = Some(openraft::LogId::new(Committed::new(3), 40));
        let meta = SnapshotMeta { last_log_id, ..SnapshotMeta::default() };
        let snapshot = Snapshot { meta, snapshot: self.leader.image() };
        let vote = Vote::new_committed(3, self.connection.me.0);
        self.connection.send_snapshot(vote, snapshot, Duration::from_secs(5)).await
    }

    fn tried(&self) -> Vec<(u64, bool)> {
        std::mem::take(&mut *self.line.tried.lock())
    }

    fn arrived(&self) -> bool {
        self.follower.image() == self.leader.image()
    }
}

fn through(pieces: std::ops::RangeInclusive<u64>) -> Vec<(u64, bool)> {
    pieces.map(|i| (i, true)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_goes_on_at_the_piece_that_broke() {
    let t = Transfer::new(&[(3, Fault::Broken(2))]).await;
    t.send().await.expect("three tries are enough");
    let broke = vec![(3, false), (3, false)];
    assert_eq!(t.tried(), [through(0..=2), broke, through(3..=8)].concat());
    assert!(t.arrived());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshot_piece_with_flipped_byte_is_resent() {
    for piece in [0, 5, 8] {
        let t = Transfer::new(&[(piece, Fault::Flipped)]).await;
        t.send().await.expect("the second try is right");
        let before = if piece == 0 { Vec::new() } else { through(0..=piece - 1) };
        assert_eq!(t.tried(), [before, vec![(piece, false)], through(piece..=8)].concat());
        assert!(t.arrived(), "what was damaged was not installed");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abandoned_transfer_resumes_where_it_stopped() {
    let t = Transfer::new(&[(6, Fault::Broken(5))]).await;
    t.send().await.expect_err("five tries, and no more");
    assert!(!t.arrived() && t.follower.writes() == 0, "half a snapshot is none");
    t.tried();
    t.send().await.expect("the line works again");
    // The header identifies the snapshot; the follower answers what it has of it.
    assert_eq!(t.tried(), [through(0..=0), through(6..=8)].concat());
    assert!(t.arrived());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_snapshot_begins_anew() {
    let t = Transfer::new(&[(6, Fault::Broken(5))]).await;
    t.send().await.expect_err("given up");
    t.tried();
    t.leader.apply(&write(0, vec![1; 32])).expect("written");
    t.send().await.expect("sent");
    assert_eq!(t.tried(), through(0..=8), "no piece of the one is taken for the other's");
    assert!(t.arrived());
}

//! A leader and a follower. The link between them can delay answers and break, with or without lanes.

use super::*;
use crate::{
    Group, GroupOptions, Peers, ReplicaId, Replicated,
    testing::{Parts, group as name, write},
    wire::WireError,
};
use futures::future::ready;
use paraft_common::ServerId;
use paraft_lanes::{Pool, Purpose, Receiver, send, shared::over_tcp};
use paraft_proto::{
    Incoming, PeerReply, bulk, limits,
    services::{self, Handler, Route},
};
use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
};
use tokio::{
    io::AsyncReadExt,
    net::{TcpListener, TcpStream},
    sync::{mpsc, watch},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, body::Body};

/// The link's behaviour for appends to the follower.
#[derive(Default)]
struct Line {
    /// Requests that have arrived.
    came: watch::Sender<usize>,
    /// Answers wait until this many requests have arrived.
    until: AtomicUsize,
    /// Maximum of requests in flight in one stream.
    most: AtomicUsize,
    /// Each stream breaks after this many answers; 0: never.
    breaks_after: AtomicUsize,
    streams: AtomicUsize,
    /// Requested lanes; without `lanes` the connection is closed instead.
    asked: AtomicUsize,
    lanes: bool,
}

#[derive(Clone)]
struct Host {
    group: Group,
    line: Arc<Line>,
}

impl Handler for Host {
    const NAME: &'static str = "paraft.v1.Peers";

    async fn handle(self, request: http::Request<Body>) -> http::Response<Body> {
        if request.uri().path() == services::APPEND {
            let requests = Incoming::<PeerRequest>::new(request.into_body(), 4 * limits::MAX_MESSAGE_BYTES);
            return bulk::respond(Box::pin(self.appends(requests)));
        }
        let request = services::only(request, 4 * limits::MAX_MESSAGE_BYTES).await.expect("a call");
        match self.group.answer(request).await {
            Ok(header) => services::one(PeerReply { header, ..PeerReply::default() }),
            Err(e) => services::refuse(Status::invalid_argument(e.to_string())),
        }
    }
}

/// A server's port: a request for a lane gets one, or is closed; everything else is HTTP/2.
async fn listen(host: Host) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let (http, connections) = mpsc::channel::<std::io::Result<TcpStream>>(16);
    let router = tonic::transport::Server::builder()
        .initial_stream_window_size(limits::STREAM_WINDOW_BYTES)
        .initial_connection_window_size(limits::CONNECTION_WINDOW_BYTES)
        .max_frame_size(limits::FRAME_BYTES)
        .add_service(Route(host.clone()));
    tokio::spawn(router.serve_with_incoming(ReceiverStream::new(connections)));
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let mut first = [0; 24];
            while socket.peek(&mut first).await.is_ok_and(|n| (1..24).contains(&n)) {
                tokio::task::yield_now().await;
            }
            match Purpose::of(&first) {
                None => drop(http.send(Ok(socket)).await),
                Some(_) => {
                    host.line.asked.fetch_add(1, SeqCst);
                    if host.line.lanes {
                        tokio::spawn(host.clone().lane(socket));
                    }
                }
            }
        }
    });
    address
}

impl Host {
    async fn lane(self, mut socket: TcpStream) {
        let mut first = [0; 24];
        socket.read_exact(&mut first).await.expect("peeked at");
        let (read, mut write) = over_tcp(paraft_tls::Wire::Plain(socket));
        paraft_lanes::answer(&mut write, Purpose::Append).await.expect("answered");
        let limit = 4 * limits::MAX_MESSAGE_BYTES;
        let requests = Receiver::<PeerRequest>::new(read, limit, Pool::new(1 << 20));
        let requests = requests.map(|r| r.map_err(|e| Status::unavailable(e.to_string())));
        let answers = self.appends(Incoming::of(requests)).boxed();
        // A broken stream ends without an error.
        let answers = answers.scan((), |(), answer| ready(answer.ok()));
        let _ = send(write, None, answers).await;
    }

    fn appends(
        self,
        requests: Incoming<PeerRequest>,
    ) -> impl Stream<Item = Result<WithBulk<PeerReply>, Status>> + Send {
        self.line.streams.fetch_add(1, SeqCst);
        let (line, comes) = (self.line.clone(), self.line.clone());
        let answered = Arc::new(AtomicUsize::new(0));
        let (answers, mut requested) = (answered.clone(), 0);
        let requests = requests.map(move |request| {
            comes.came.send_modify(|n| *n += 1);
            requested += 1;
            comes.most.fetch_max(requested - answered.load(SeqCst), SeqCst);
            request.map_err(WireError::new)
        });
        let mut given = 0;
        self.group.answer_appends(requests).then(move |answer| {
            let (line, answers) = (line.clone(), answers.clone());
            given += 1;
            let breaks = line.breaks_after.load(SeqCst);
            async move {
                let until = line.until.load(SeqCst);
                line.came.subscribe().wait_for(|n| *n >= until).await.expect("the line stays");
                answers.fetch_add(1, SeqCst);
                if breaks > 0 && given > breaks {
                    return Err(Status::unavailable("the connection broke"));
                }
                let header = answer.map_err(|e| Status::invalid_argument(e.to_string()))?;
                Ok(PeerReply { header, ..PeerReply::default() }.into())
            }
        })
    }
}

struct Pair {
    leader: Group,
    states: [Arc<Parts>; 2],
    line: Arc<Line>,
}

impl Pair {
    async fn new(lanes: bool) -> Self {
        let line = Arc::new(Line { lanes, ..Line::default() });
        let (mut groups, mut members) = (Vec::new(), BTreeMap::new());
        let states = [Arc::new(Parts::default()), Arc::new(Parts::default())];
        for (server, state) in (0..).zip(&states) {
            let me = ReplicaId::new_incarnation(ServerId(server));
            let election = Duration::from_secs(10);
            let options = GroupOptions { group: name(), me, folder: None, election, check_every: None };
            let peers = Arc::new(Peers::new(paraft_tls::Access::Insecure));
            let group = Group::start(options, state.clone(), peers).await.expect("it starts");
            members.insert(me, listen(Host { group: group.clone(), line: line.clone() }).await);
            groups.push(group);
        }
        let leader = groups.swap_remove(0);
        leader.found(&members).await.expect("it is new");
        leader.leadership().wait_for(|l| l.leads).await.expect("it leads");
        leader.barrier().await.expect("the follower says so");
        let pair = Self { leader, states, line };
        assert_eq!(pair.line.asked.load(SeqCst), 0, "a stream without bulk needs no connection of its own");
        pair.write(1).await;
        pair
    }

    /// Sends bulk first, so that the stream uses the right transport.
    async fn warm(lanes: bool) -> Self {
        let pair = Self::new(lanes).await;
        while pair.line.asked.load(SeqCst) == 0 {
            pair.write(2).await;
            pair.is_level().await;
        }
        pair
    }

    /// Writes this many parts of 1 MiB at once, and waits for all.
    async fn write(&self, parts: u32) {
        let mut outcomes = Vec::new();
        for part in 0..parts {
            let change = write(part, vec![part as u8; 1 << 20]);
            outcomes.push(self.leader.propose(change).await.expect("it leads"));
        }
        for outcome in outcomes {
            outcome.await.expect("a majority has it");
        }
    }

    /// Waits until the follower has applied the same.
    async fn is_level(&self) {
        let [leader, follower] = &self.states;
        let began = Instant::now();
        while follower.writes() < leader.writes() {
            assert!(began.elapsed() < Duration::from_secs(60), "{} writes", follower.writes());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let bytes = |state: &Parts| {
            let image = state.image();
            let parts: Vec<_> = image.parts.iter().map(|p| p.read().to_bytes()).collect();
            (image.head, parts)
        };
        assert!(bytes(leader) == bytes(follower), "the same writes in the same order");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_appends_are_under_way_and_never_more_than_the_bound() {
    for lanes in [true, false] {
        let pair = Pair::warm(lanes).await;
        // Answers wait until this many requests have arrived, so one-by-one appends would hang.
        pair.line.until.store(*pair.line.came.borrow() + MAX_MESSAGES / 2, SeqCst);
        tokio::time::timeout(Duration::from_secs(60), pair.write(48))
            .await
            .expect("they travel side by side");
        pair.is_level().await;
        let most = pair.line.most.load(SeqCst);
        assert!((MAX_MESSAGES / 2..=MAX_MESSAGES).contains(&most), "{most} were under way");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_under_way_when_the_stream_broke_is_sent_again() {
    for lanes in [true, false] {
        let pair = Pair::warm(lanes).await;
        let so_far = || (pair.line.streams.load(SeqCst), pair.line.asked.load(SeqCst));
        let before = so_far();
        assert!(before.1 > 0, "a lane is tried first");
        pair.line.breaks_after.store(3, SeqCst);
        tokio::time::timeout(Duration::from_secs(60), pair.write(24)).await.expect("they come through");
        pair.line.breaks_after.store(0, SeqCst);
        pair.is_level().await;
        let (streams, asked) = (so_far().0 - before.0, so_far().1 - before.1);
        assert!(streams > 2, "it broke several times");
        match lanes {
            // A stream that asks for the end of the follower's log has no bulk.
            true => assert!(asked >= streams / 3, "{asked} lanes for {streams} streams"),
            false => assert_eq!(asked, 0, "who speaks no lanes is not asked each time"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_follower_lacks_is_sent_from_where_its_log_ends() {
    let pair = Pair::new(true).await;
    // An answer without a request, or a refusal, ends a stream and its requests.
    let requests = futures::stream::pending::<AppendEntriesRequest<Types>>();
    let (mut outgoing, answered) = pipeline(requests, PeerRequest::default());
    assert!(answered.answer(AppendEntriesResponse::Success).is_none(), "nothing was asked");
    assert!(answered.is_complete());
    let next = tokio::spawn(async move { outgoing.next().await.is_none() });
    tokio::task::yield_now().await;
    drop(answered);
    assert!(next.await.expect("it ends"), "the requests end with their answers");
    pair.write(2).await;
    pair.is_level().await;
}

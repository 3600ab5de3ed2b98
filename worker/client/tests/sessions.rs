//! The client against a scripted server: lost sessions and streams.

use futures::StreamExt;
use paraft_client::{Client, ClientOptions, Transport};
use paraft_common::{BucketId, Mode, Step, WorkerId, config::ServerJob};
use paraft_proto::{
    Ack, Advice, FromShard, Incoming, Opened, Refused, Reported, ToShard, Weights, WithBulk, bulk,
    from_shard, limits,
    services::{self, Handler, Route},
    to_shard::Kind,
};
use paraft_tls::Access;
use std::{
    sync::{Arc, Mutex, OnceLock, mpsc},
    thread,
    time::{Duration, Instant},
};
use tokio::sync::mpsc::UnboundedSender;
use tokio_stream::wrappers::{TcpListenerStream, UnboundedReceiverStream};
use tonic::{Status, body::Body};

const DEADLINE: Duration = Duration::from_secs(30);

/// A stream's reaction to a message: its answers, and whether it then ends. The first argument is the stream's
/// number, from 1.
type Script = dyn Fn(u32, Kind) -> (Vec<from_shard::Kind>, bool) + Send + Sync;

#[derive(Clone)]
struct Server {
    script: Arc<Script>,
    streams: Arc<Mutex<u32>>,
}

impl Handler for Server {
    const NAME: &'static str = "paraft.v1.Shards";

    async fn handle(self, request: http::Request<Body>) -> http::Response<Body> {
        if ![services::EXCHANGE, services::READ].contains(&request.uri().path()) {
            return services::refuse(Status::unimplemented("not in this test"));
        }
        let mut inbound = Incoming::<ToShard>::new(request.into_body(), limits::MAX_MESSAGE_BYTES);
        let number = {
            let mut streams = self.streams.lock().expect("no test panics here");
            *streams += 1;
            *streams
        };
        let (out, rx): (UnboundedSender<_>, _) = tokio::sync::mpsc::unbounded_channel();
        let script = self.script.clone();
        tokio::spawn(async move {
            while let Ok(Some(m)) = inbound.message().await {
                let mut kind = m.message.kind.expect("clients send no empty messages");
                if let (Kind::Push(p), [payload]) = (&mut kind, &m.bulk[..]) {
                    p.payload = payload.to_bytes();
                }
                if matches!(kind, Kind::Heartbeat(_)) {
                    continue; // heartbeats may arrive at any time
                }
                let (answers, end) = script(number, kind);
                for kind in answers {
                    let _ = out.send(Ok(FromShard { kind: Some(kind) }));
                }
                if end {
                    return;
                }
            }
        });
        bulk::respond(
            UnboundedReceiverStream::new(rx).map(|m: Result<FromShard, Status>| m.map(WithBulk::from)),
        )
    }
}

/// Serves the script on a thread until the process ends; returns the address.
fn serve(script: Arc<Script>) -> String {
    let (tell, address) = mpsc::channel();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let _ = tell.send(listener.local_addr().expect("an address").to_string());
            let service = Route(Server { script, streams: Arc::default() });
            let incoming = TcpListenerStream::new(listener);
            let _ =
                tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming).await;
        });
    });
    address.recv_timeout(DEADLINE).expect("the server starts")
}

fn options(address: String) -> ClientOptions {
    Access::Insecure.set();
    ClientOptions {
        servers: vec![address],
        shards: 1,
        replicas: 1,
        worker: WorkerId(0),
        job: ServerJob::new("script", Mode::Asp, 1, 1),
        device: String::new(),
        transport: Transport::Tcp,
        timeout: Duration::from_secs(10),
        handover: paraft_client::HANDOVER,
        stages: None,
    }
}

/// Runs `f` on a thread, so a client that waits forever fails the test instead of blocking it.
fn within_the_deadline<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    let (tell, done) = mpsc::channel();
    thread::spawn(move || tell.send(f()));
    done.recv_timeout(DEADLINE).expect("the client waits for ever")
}

fn opened(session: u64, clock: u64) -> from_shard::Kind {
    from_shard::Kind::Opened(Opened { session, clock, initialised: true, ..Opened::default() })
}

fn weights(done: u64, value: f32) -> from_shard::Kind {
    let payload = value.to_le_bytes().to_vec().into();
    from_shard::Kind::Weights(Weights { payload, last: true, done, slowest: done, ..Weights::default() })
}

fn reported(epoch: u64) -> from_shard::Kind {
    from_shard::Kind::Reported(Reported { epoch, count: 1, ..Reported::default() })
}

fn over() -> from_shard::Kind {
    let advice = Advice::Stop as i32;
    from_shard::Kind::Refused(Refused { advice, message: "taken out".into(), ..Refused::default() })
}

/// Polls for evaluations until `enough`, as a training loop does after every step.
fn evaluations(client: &mut Client, enough: impl Fn(&[u64]) -> bool) -> Vec<u64> {
    let began = Instant::now();
    let mut epochs = Vec::new();
    while !enough(&epochs) {
        assert!(began.elapsed() < DEADLINE, "evaluations so far: {epochs:?}");
        epochs.extend(client.evaluations().iter().map(|r| r.epoch));
        thread::sleep(Duration::from_millis(5));
    }
    epochs
}

#[test]
fn session_lost_between_pulls_is_noticed_by_next_pull() {
    let script = |stream: u32, kind: Kind| match (stream, kind) {
        (1, Kind::Open(_)) => (vec![opened(1, 0)], false),
        (1, Kind::Pull(p)) => (vec![weights(p.done, 1.0), reported(7), over()], true),
        (2, Kind::Open(o)) => {
            assert_eq!(o.session, 0, "a lost session is not asked for again");
            (vec![opened(2, 5)], false)
        }
        (2, Kind::Pull(p)) => (vec![weights(p.done, 2.0)], false),
        other => panic!("{other:?}"),
    };
    let address = serve(Arc::new(script));
    let (pulled, value, rejoins) = within_the_deadline(move || {
        let (mut client, start) = Client::join(options(address), &[0.0]).expect("joins");
        let mut w = [0.0];
        client.pull(start, &mut w).expect("pulls");
        // The loss arrives right after the evaluation. Taking the evaluation must not drop the loss.
        evaluations(&mut client, |epochs| epochs == [7]);
        for _ in 0..20 {
            client.evaluations();
            thread::sleep(Duration::from_millis(5));
        }
        let pulled = client.pull(Step(1), &mut w).expect("rejoins");
        (pulled, w[0], client.counters().rejoins)
    });
    assert_eq!((pulled.done, value, rejoins), (Step(5), 2.0, 1));
}

/// A server that leads, with weights of 3.
fn leading() -> String {
    serve(Arc::new(|_, kind| match kind {
        Kind::Open(_) => (vec![opened(1, 0)], false),
        Kind::Pull(p) => (vec![weights(p.done, 3.0)], false),
        other => panic!("{other:?}"),
    }))
}

/// The answer of a server that names another as leader.
fn names(leader: String) -> from_shard::Kind {
    let (advice, message) = (Advice::Redirect as i32, format!("{leader} leads"));
    from_shard::Kind::Refused(Refused { advice, message, leader, ..Refused::default() })
}

fn finds_the_leader(servers: Vec<String>) {
    let value = within_the_deadline(move || {
        let options = ClientOptions { servers, ..options(String::new()) };
        let (mut client, start) = Client::join(options, &[0.0]).expect("joins");
        let mut w = [0.0];
        client.pull(start, &mut w).expect("pulls");
        w[0]
    });
    assert_eq!(value, 3.0);
}

/// Two servers that left the shard long ago name each other; no server names the leader.
#[test]
fn servers_naming_each_other_do_not_hide_the_leader() {
    for first in 0..3 {
        let others: [Arc<OnceLock<String>>; 2] = Default::default();
        let astray = |of: &Arc<OnceLock<String>>| {
            let of = of.clone();
            serve(Arc::new(move |_, _| (vec![names(of.get().cloned().unwrap_or_default())], true)))
        };
        let [a, b] = [astray(&others[0]), astray(&others[1])];
        others[0].set(b.clone()).expect("set once");
        others[1].set(a.clone()).expect("set once");
        let leader = leading();
        let mut servers = vec![a, b, leader];
        servers.rotate_left(first);
        finds_the_leader(servers);
    }
}

/// One server names a leader that has died; the third server leads. The link reaches it from any start.
#[test]
fn stale_leader_name_does_not_hide_the_new_leader() {
    for first in 0..3 {
        let unused = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let gone = unused.local_addr().expect("an address").to_string();
        drop(unused);
        let named = gone.clone();
        let behind = serve(Arc::new(move |_, _| (vec![names(named.clone())], true)));
        let leader = leading();
        let mut servers = vec![leader, gone, behind];
        servers.rotate_left(first);
        finds_the_leader(servers);
    }
}

#[test]
fn share_is_resent_until_evaluation_completes_and_counts_once() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = seen.clone();
    let script = move |stream: u32, kind: Kind| match (stream, kind) {
        (_, Kind::Open(_)) => (vec![opened(1, 0)], false),
        (_, Kind::Report(r)) => {
            log.lock().expect("no panic").push((stream, r.epoch));
            match (stream, r.epoch) {
                (1, 1) => (vec![reported(1)], false),
                (1, _) => (Vec::new(), true), // the leader dies before it answers
                (_, epoch) => (vec![reported(1), reported(epoch), reported(epoch)], false),
            }
        }
        other => panic!("{other:?}"),
    };
    let address = serve(Arc::new(script));
    let epochs = within_the_deadline(move || {
        let (mut client, _) = Client::join(options(address), &[0.0]).expect("joins");
        client.report(1, 0.5, 1, 1);
        let mut all = evaluations(&mut client, |epochs| epochs == [1]);
        client.report(2, 0.5, 1, 1);
        all.extend(evaluations(&mut client, |epochs| epochs.contains(&2)));
        all
    });
    assert_eq!(epochs, [1, 2]);
    assert_eq!(*seen.lock().expect("no panic"), [(1, 1), (1, 2), (2, 2)]);
}

#[test]
fn only_unacknowledged_pushes_are_resent_unchanged() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = seen.clone();
    let script = move |stream: u32, kind: Kind| match (stream, kind) {
        (1, Kind::Open(_)) => (vec![opened(9, 0)], false),
        (_, Kind::Open(o)) => {
            assert_eq!(o.session, 9, "the session is taken up again");
            (vec![opened(9, 0)], false)
        }
        (_, Kind::Push(p)) => {
            log.lock().expect("no panic").push((stream, p.seq, p.step, p.payload.to_vec()));
            let ack = from_shard::Kind::Ack(Ack { seq: p.seq, version: p.step, dropped: false });
            match (stream, p.step) {
                (1, 2) => (Vec::new(), true), // the server takes it, and its answer is lost
                _ => (vec![ack], false),
            }
        }
        (_, Kind::Pull(p)) => (vec![weights(p.done, 0.0)], false),
        other => panic!("{other:?}"),
    };
    let address = serve(Arc::new(script));
    within_the_deadline(move || {
        let (mut client, _) = Client::join(options(address), &[0.0]).expect("joins");
        let mut w = [0.0];
        for step in (1..=3).map(Step) {
            client.push(BucketId(0), step, &[step.0 as f32]);
            client.pull(step, &mut w).expect("pulls");
        }
    });
    let entry = |stream: u32, n: u64| (stream, n, n, (n as f32).to_le_bytes().to_vec());
    assert_eq!(*seen.lock().expect("no panic"), [entry(1, 1), entry(1, 2), entry(2, 2), entry(2, 3)]);
}

/// Each push carries one of four values. The worker keeps the others until its session ends.
#[test]
fn residual_goes_with_later_push_of_session_not_of_next() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = seen.clone();
    let script = move |stream: u32, kind: Kind| match (stream, kind) {
        (1 | 2, Kind::Open(_)) => (vec![opened(9, 0)], false),
        (_, Kind::Open(o)) => {
            assert_eq!(o.session, 0, "a lost session is not asked for again");
            (vec![opened(10, 5)], false)
        }
        (_, Kind::Push(p)) => {
            let words: Vec<[u8; 4]> = p.payload.as_chunks::<4>().0.to_vec();
            let push = (u32::from_le_bytes(words[0]), f32::from_le_bytes(words[1]));
            log.lock().expect("no panic").push((stream, p.step, push));
            let ack = from_shard::Kind::Ack(Ack { seq: p.seq, version: p.step, dropped: false });
            if stream == 1 { (Vec::new(), true) } else { (vec![ack], false) }
        }
        (2, Kind::Pull(p)) if p.done == 2 => (vec![over()], true),
        (_, Kind::Pull(p)) => {
            let payload = vec![0; 16].into();
            let all = Weights { payload, last: true, done: p.done, slowest: p.done, ..Weights::default() };
            (vec![from_shard::Kind::Weights(all)], false)
        }
        other => panic!("{other:?}"),
    };
    let address = serve(Arc::new(script));
    within_the_deadline(move || {
        let job = ServerJob::new("script", Mode::Asp, 4, 4);
        let job = ServerJob { encoding: "top-k:0.25".parse().expect("an encoding"), ..job };
        let options = ClientOptions { job, ..options(address) };
        let (mut client, _) = Client::join(options, &[0.0; 4]).expect("joins");
        let mut w = [0.0; 4];
        client.push(BucketId(0), Step(1), &[4.0, 3.0, 2.0, 1.0]);
        client.pull(Step(1), &mut w).expect("pulls");
        client.push(BucketId(0), Step(2), &[0.0; 4]);
        let pulled = client.pull(Step(2), &mut w).expect("rejoins");
        assert!(pulled.rejoined);
        client.push(BucketId(0), Step(6), &[0.0, 0.0, 0.0, 0.5]);
        client.pull(Step(6), &mut w).expect("pulls");
        assert_eq!(client.counters().bytes_pushed, 3 * 8);
    });
    let expected = [(1, 1, (0, 4.0)), (2, 1, (0, 4.0)), (2, 2, (1, 3.0)), (3, 6, (3, 0.5))];
    assert_eq!(*seen.lock().expect("no panic"), expected);
}

/// The old leader would refuse what this worker has done under its successor.
#[test]
fn a_leader_of_an_earlier_term_than_the_last_is_passed_by() {
    let in_term =
        |term| from_shard::Kind::Opened(Opened { session: 1, term, initialised: true, ..Opened::default() });
    let script = move |stream: u32, kind: Kind| match (stream, kind) {
        (1, Kind::Open(_)) => (vec![in_term(5)], false),
        (1, Kind::Pull(_)) => (Vec::new(), true),
        (2, Kind::Open(_)) => (vec![in_term(4)], false),
        (2, Kind::Pull(p)) => (vec![weights(p.done, 4.0)], false), // what a worker that trusts it would get
        (3, Kind::Open(_)) => (vec![in_term(5)], false),
        (3, Kind::Pull(p)) => (vec![weights(p.done, 3.0)], false),
        other => panic!("{other:?}"),
    };
    let address = serve(Arc::new(script));
    let value = within_the_deadline(move || {
        let (mut client, start) = Client::join(options(address), &[0.0]).expect("joins");
        let mut w = [0.0];
        client.pull(start, &mut w).expect("pulls");
        w[0]
    });
    assert_eq!(value, 3.0);
}

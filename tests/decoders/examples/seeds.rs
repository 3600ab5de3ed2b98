//! Writes the seeds of `fuzz/corpus/`: inputs that are whole, one for each kind that a target knows. Inputs that a fuzzer found
//! are named `found-...` and stay as they are.
//!
//! ```sh
//! cargo run -p paraft-decoders --example seeds
//! ```

use flate2::{Compression, write::GzEncoder};
use paraft_common::{
    BucketId, Durability, Encoding, JobId, JobShard, Mode, Payload, Seq, ServerId, SessionId, ShardId, Step,
    Version, WorkerId,
    checkpoint::KnownCheckpoint,
    config::ServerJob,
    encoding::{Encoder, Stretch},
};
use paraft_data::metrics::{ClassMetrics, NumberMetrics};
use paraft_decoders::{
    files,
    input::Seed,
    log_files::{item, mark, segment},
    wire,
};
use paraft_proto::{self as proto, checkpoint_part, from_shard, to_shard};
use paraft_record::{Eval, Event, Leave, Run, Server, Shard as ShardLine, Train, Worker};
use paraft_server::{
    control::{
        Agreed, Command as Control, Difference, Identity, JobFacts, JobState, Order, Place, Shape, Submission,
    },
    header,
    raft::{ReplicaId, Replicated, fuzzing},
    replicated::Change,
    shard::{
        Command, Contribution, InitPart, Proposal, Shard,
        begin::JOB_FORM,
        command::EvalSums,
        delta::{DeltaBucket, DeltaId, DeltaMember, DeltaRecord},
    },
};
use prost::Message;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write,
    path::Path,
};

fn write(target: &str, name: &str, bytes: &[u8]) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    fs::create_dir_all(&dir).expect("a folder");
    fs::write(dir.join(name), bytes).expect("a seed");
}

/// A file's name must not hold a colon everywhere.
fn named(encoding: Encoding) -> String {
    encoding.to_string().replace(':', "-")
}

fn main() {
    bulk();
    lane();
    push();
    control_wire();
    control_requests();
    encodings();
    peer();
    control_state();
    shard_state();
    replica();
    store();
    jobs();
    metrics();
    checkpoints();
    data();
}

fn framed(message: &impl Message) -> Vec<u8> {
    let body = message.encode_to_vec();
    [&[0], &(body.len() as u32).to_be_bytes()[..], &body].concat()
}

fn a_push(len: usize) -> proto::ToShard {
    let payload = vec![0x3f; len].into();
    let push =
        proto::Push { seq: 300, step: 1, bucket: 2, sum_of_squares: 0.5, payload, ..Default::default() };
    proto::ToShard { kind: Some(to_shard::Kind::Push(push)) }
}

fn an_init(len: usize, part: u32) -> proto::ToShard {
    let init = proto::Init {
        bucket: 0,
        payload: vec![0; len].into(),
        part,
        version: 3,
        clock: 1.5,
        ..Default::default()
    };
    proto::ToShard { kind: Some(to_shard::Kind::Init(init)) }
}

fn bulk() {
    let seed = |how: u8| Seed::default().byte(how).word(9000).word(20000).word(50000);
    let two = [framed(&a_push(40)), framed(&an_init(16, 1))].concat();
    write("bulk", "to-shard-stream", &seed(0).rest(&two).0);
    let weights = proto::Weights {
        bucket: 9,
        version: 5,
        payload: vec![1; 60].into(),
        finishers: vec![1, 300],
        ..proto::Weights::default()
    };
    let weights = proto::FromShard { kind: Some(from_shard::Kind::Weights(weights)) };
    write("bulk", "from-shard-stream", &seed(1).rest(&framed(&weights)).0);
    let piece = proto::Piece { bucket: 1, part: 0, payload: vec![2; 60].into(), version: 3, clock: 2.5 };
    let piece = proto::CheckpointPart { kind: Some(checkpoint_part::Kind::Piece(piece)) };
    let payloads = vec![vec![1; 20].into(), vec![].into(), vec![2; 10].into()];
    let call = proto::PeerRequest {
        group: 1,
        from: 2,
        to: 3,
        call: 1,
        header: vec![7; 30].into(),
        fleet: 9,
        payloads,
    };
    for (long, name) in [(0, "short"), (16, "long")] {
        let how = 8 | long;
        write("bulk", &format!("to-shard-{name}"), &seed(how).rest(&a_push(40).encode_to_vec()).0);
        write("bulk", &format!("from-shard-{name}"), &seed(how | 1).rest(&weights.encode_to_vec()).0);
        write("bulk", &format!("peer-request-{name}"), &seed(how | 2).rest(&call.encode_to_vec()).0);
        write("bulk", &format!("checkpoint-part-{name}"), &seed(how | 3).rest(&piece.encode_to_vec()).0);
    }
    let reply = proto::PeerReply { header: vec![1; 9].into(), ..Default::default() };
    write("bulk", "peer-reply", &seed(12).rest(&reply.encode_to_vec()).0);
}

fn lane() {
    use paraft_lanes::frame::Outbox;
    let frames = |messages: &[proto::ToShard]| {
        let mut out = Outbox::default();
        messages.iter().for_each(|m| out.put(&m.clone().into(), None));
        out.put_alive();
        out.pieces().iter().flatten().copied().collect::<Vec<u8>>()
    };
    let seed = |how: u8, most: u16| Seed::default().byte(how).word(most);
    write("lane", "to-shard", &seed(0, 100).rest(&frames(&[a_push(40), an_init(16, 1)])).0);
    write("lane", "to-shard-cut", &seed(0, 3).rest(&frames(&[a_push(400)])[..300]).0);
    let weights = proto::Weights { bucket: 9, payload: vec![1; 60].into(), ..proto::Weights::default() };
    let mut out = Outbox::default();
    let weights = proto::FromShard { kind: Some(from_shard::Kind::Weights(weights)) };
    out.put(&weights.into(), None);
    out.put_returned(&[4096, 0]);
    write(
        "lane",
        "from-shard",
        &seed(1, 7).rest(&out.pieces().iter().flatten().copied().collect::<Vec<u8>>()).0,
    );
}

fn push() {
    use to_shard::Kind;
    let seed = |which: u8| Seed::default().byte(which).word(9000).word(20000).word(50000);
    for (i, encoding) in (0u8..).zip(Encoding::ALL) {
        let push = a_push(encoding.encoded_len(2)).encode_to_vec();
        write("push", &format!("push-{}", named(encoding)), &seed(2 * i).rest(&push).0);
    }
    write("push", "init", &seed(0).rest(&an_init(16, 0).encode_to_vec()).0);
    write("push", "init-slot", &seed(1).rest(&an_init(16, 1).encode_to_vec()).0);
    let others = [
        (
            "pull",
            Kind::Pull(proto::Pull {
                done: 3,
                r#final: false,
                checkpoint: true,
                barrier: false,
                have: vec![1, 300],
                loss: Some(0.5),
                only: Vec::new(),
                rows: Vec::new(),
            }),
        ),
        ("norm", Kind::Norm(proto::Norm { step: 3, sum_of_squares: 0.5, bound: None })),
        ("report", Kind::Report(proto::Report { epoch: 1, loss_sum: 0.5, correct: 3, count: 4 })),
        ("take", Kind::Acquire(proto::Acquire { request: 1, epoch: 0, done: Some(3) })),
        ("resume", Kind::Resume(proto::Resume { level: true })),
        ("advance", Kind::Advance(proto::Advance { step: 12 })),
    ];
    for (name, kind) in others {
        write("push", name, &seed(1).rest(&proto::ToShard { kind: Some(kind) }.encode_to_vec()).0);
    }
}

fn control_wire() {
    let rule = proto::AutoRule { min_staleness: 0, max_staleness: 16 };
    let auto = proto::AutoReport {
        rule: Some(rule),
        number: 2,
        mode: "ssp:4".into(),
        loosest: "asp".into(),
        members: 2,
        lasted_us: 1_000_000,
        pulls: 64,
        waited_us: 200_000,
        delay_sum: 70,
        pushes: 64,
        loss_sum: 12.5,
        losses: 64,
        lead: 3,
        term: 5,
    };
    let job = proto::JobReport {
        name: "digits".into(),
        mode: "ssp:4".into(),
        workers: 2,
        durability: "quorum-disk".into(),
        shards: 3,
        finished: true,
        auto: Some(auto),
    };
    let replica = proto::ReplicaReport {
        shard: 1,
        node: 1 << 32 | 5,
        founded: true,
        leads: true,
        members: vec![proto::Replica {
            node: 1 << 32 | 5,
            address: "a:1".into(),
            voter: true,
            caught_up: true,
        }],
        digests: vec![proto::CheckDigest { index: 7, digest: 9 }],
        job: Some(job),
        ..proto::ReplicaReport::default()
    };
    let report = proto::ReportRequest {
        fleet: 9,
        server: 1,
        address: "a:1".into(),
        node: 1 << 32 | 6,
        replicas: vec![replica],
        reached: vec![0, 2],
        asides: vec![proto::AsideReport { shard: 1, name: "shard-1.aside-1".into(), ..Default::default() }],
        asides_known: true,
        ..proto::ReportRequest::default()
    };
    write("control_wire", "report", &Seed::default().byte(0).rest(&report.encode_to_vec()).0);
    let held =
        proto::CheckpointInfo { path: "/c/step-1".into(), step: 1, loss: Some(0.5), ..Default::default() };
    let note = proto::NoteCheckpointsRequest { job: 1, folder: "/c".into(), held: vec![held] };
    write("control_wire", "checkpoints", &Seed::default().byte(1).rest(&note.encode_to_vec()).0);
    use proto::directive::Kind;
    let kinds = [
        Kind::Host(proto::Host { founding: 1, shards: 2, durability: "leader".into() }),
        Kind::Remove(proto::Remove {}),
        Kind::Stop(proto::Stop {}),
        Kind::Found(proto::Found { founding: 1, members: Vec::new() }),
        Kind::Retire(proto::Retire { node: 1, index: 2 }),
        Kind::Voters(proto::Voters { nodes: vec![1, 2] }),
        Kind::Transfer(3),
        Kind::Switch(proto::AutoSwitch { number: 3, mode: "ssp:8".into(), loosest: "asp".into() }),
        Kind::Diverged(proto::Diverged { node: 1, index: 2, digest: 3, majority: 4 }),
    ];
    let directives =
        (0u32..).zip(kinds).map(|(shard, k)| proto::Directive { shard, kind: Some(k) }).collect();
    let reply = proto::ReportReply { accepted: true, directives, ..Default::default() };
    write("control_wire", "directives", &Seed::default().byte(2).rest(&reply.encode_to_vec()).0);
    let server =
        |server, state: &str| proto::ServerInfo { server, state: state.into(), ..Default::default() };
    let shard = proto::ShardInfo { voters: vec![0, 1, 2], silent: vec![2], ..Default::default() };
    let shape = proto::FleetShape { shards: 1, replicas: 3, durability: "leader".into() };
    let describe = proto::DescribeReply {
        fleet: 3,
        shape: Some(shape),
        servers: vec![server(0, "up"), server(1, "draining"), server(2, "silent")],
        shards: vec![shard],
        control_voters: vec![0, 1, 2],
        control_silent: vec![2],
        ..Default::default()
    };
    write("control_wire", "describe", &Seed::default().byte(3).rest(&describe.encode_to_vec()).0);
}

fn encodings() {
    for (i, encoding) in (0u8..).zip(Encoding::ALL) {
        let mut bytes = Vec::new();
        encoding.encode(&[1.0, -0.5, 3.0, 1e-20, 100.0], &mut bytes);
        let seed =
            |how, count| Seed::default().byte(how).word(count).word(30000).word(9000).word(20000).word(50000);
        write("encodings", &named(encoding), &seed(i, 5).rest(&bytes).0);
        write("encodings", &format!("{}-long", named(encoding)), &seed(i | 8, 3000).rest(&bytes).0);
    }
    // A matrix of 6 rows and 8 columns between values that are none.
    let stretches = vec![Stretch::Plain(2), Stretch::Matrix { rows: 6, columns: 8 }, Stretch::Plain(1)];
    let factors = (0u8..).zip(Encoding::ALL).find(|(_, e)| matches!(e, Encoding::PowerSgd(_)));
    let (i, encoding) = factors.expect("it is one of all");
    let mut bytes = Vec::new();
    Encoder::new(encoding, 51, stretches, 1).encode(Step(1), &[0.5; 51], &mut bytes);
    let seed = Seed::default().byte(i).word(51).word(30000).word(9000).word(20000).word(50000);
    write("encodings", "powersgd-factors", &seed.rest(&bytes).0);
    // Two pushes of five values in one log entry.
    let mut two = [6u32.to_le_bytes(), 6u32.to_le_bytes()].concat();
    for _ in 0..2 {
        two.extend(0.5f32.to_le_bytes());
        two.extend([0b10100, 0]);
    }
    let seed = Seed::default().byte(4).word(10).word(30000).word(9000).word(20000).word(50000);
    write("encodings", "two-pushes", &seed.rest(&two).0);
    write("encodings", "wrong-length", &Seed::default().byte(0).word(3).rest(&[0; 20]).0);
}

fn proposal(command: Command, payload: Vec<u8>) -> Proposal {
    Proposal { command, payload: payload.into() }
}

fn session() -> (WorkerId, SessionId) {
    (WorkerId(1), SessionId(1))
}

/// The life of a shard whose log has updates.
fn updates(leased: bool) -> Vec<Proposal> {
    let (worker, session) = session();
    let job = wire::small_job(Encoding::F32, leased).to_toml().expect("a job");
    let contributions =
        vec![Contribution { worker, session, seq: Seq(1), step: Step(1), pulled: Version(0), samples: 1 }];
    let update = Command::Update {
        bucket: BucketId(0),
        contributions,
        encoding: Encoding::F32,
        factor: 0.5,
        closes: false,
        rate: None,
    };
    let sums = EvalSums { loss_sum: 0.5, correct: 1, count: 2 };
    vec![
        proposal(Command::Admit { form: JOB_FORM, job }, Vec::new()),
        proposal(Command::Init { bucket: BucketId(0), part: InitPart::FRESH }, vec![0; 16]),
        proposal(Command::Join { worker, session }, Vec::new()),
        proposal(update, 1f32.to_le_bytes().repeat(4)),
        proposal(Command::Acquire { worker, session, request: 1, epoch: 0, done: None }, Vec::new()),
        proposal(Command::Report { worker, session, epoch: 1, sums }, Vec::new()),
        proposal(Command::Pause { worker, session }, Vec::new()),
        proposal(Command::Resume { worker, session, level: true }, Vec::new()),
        proposal(Command::Advance { worker, session, step: Step(4) }, Vec::new()),
        proposal(Command::Fence, Vec::new()),
        proposal(Command::Finish { worker, session }, Vec::new()),
        proposal(Command::Leave { worker, session }, Vec::new()),
    ]
}

/// And of one with state deltas; the last marker is left out.
fn cuts() -> Vec<Proposal> {
    let (worker, session) = session();
    let job = paraft_common::config::ServerJob {
        durability: Durability::Leader,
        ..wire::small_job(Encoding::F32, false)
    };
    let delta = DeltaId { term: 1, number: 1 };
    let member = DeltaMember { session, last_seq: Seq(1), steps: BTreeMap::from([(BucketId(0), Step(1))]) };
    let record =
        DeltaRecord { members: BTreeMap::from([(worker, member)]), pushes: 1, ..DeltaRecord::default() };
    let bucket = DeltaBucket { bucket: BucketId(0), base: Version(0), version: Version(1), clock: 1.0 };
    let next = DeltaId { term: 1, number: 2 };
    let part = |delta| Command::DeltaPart { delta, part: 0, vectors: vec![(BucketId(0), 0)] };
    vec![
        proposal(Command::Admit { form: JOB_FORM, job: job.to_toml().expect("a job") }, Vec::new()),
        proposal(Command::Join { worker, session }, Vec::new()),
        proposal(part(delta), vec![1; 16]),
        proposal(Command::Delta { delta, after: None, parts: 1, buckets: vec![bucket], record }, Vec::new()),
        proposal(part(next), vec![2; 16]),
    ]
}

fn peer() {
    let vote = header::encode(&(3u64, 1u64, true)).expect("numbers");
    write("peer", "numbers", &Seed::default().byte(0).rest(&vote).0);
    let entry = fuzzing::header_of(7, Change::Shard(updates(false).swap_remove(3)));
    write("peer", "entry", &Seed::default().byte(1).byte(16).rest(&entry).0);
    write("peer", "check", &Seed::default().byte(0).rest(&fuzzing::header_of(8, Change::Check)).0);
    write(
        "peer",
        "append",
        &Seed::default()
            .byte(2)
            .byte(16)
            .byte(3)
            .rest(&fuzzing::append([(); 2].map(|()| Change::Shard(Command::Fence.into()))))
            .0,
    );
    write("peer", "snapshot-head", &Seed::default().byte(0).rest(&fuzzing::snapshot_head(9, &[1, 2])).0);
    write("peer", "log-id", &Seed::default().byte(0).rest(&fuzzing::purge_tag(9)).0);
    let identity = Identity { server: ServerId(1), node: ReplicaId(1 << 32 | 5), fleet: 3 };
    write("peer", "identity", &Seed::default().byte(0).rest(&header::encode(&identity).expect("small")).0);
}

fn control_commands() -> Vec<Control> {
    let shape = Shape { shards: 2, replicas: 1, durability: Durability::QuorumDisk };
    let place = Place { founding: 7, voters: BTreeSet::from([ReplicaId(1)]), founded: true };
    let facts = JobFacts {
        name: "digits".into(),
        mode: Mode::Bsp.into(),
        workers: 2,
        durability: Durability::QuorumDisk,
    };
    let held = KnownCheckpoint {
        path: "/c/step-1".into(),
        step: 1,
        versions: (1, 2),
        bytes: 10,
        loss: Some(0.5),
        written_ms: 3,
        worker: Some(WorkerId(0)),
        best: true,
    };
    let difference = Difference { held: vec![held], gone: vec!["/c/step-0".into()] };
    vec![
        Control::Found { fleet: 9, shape, servers: BTreeMap::from([(ServerId(0), "a:1".into())]) },
        Control::Admit { server: ServerId(1), address: "b:1".into() },
        Control::Join { address: "c:1".into() },
        Control::Drain { server: ServerId(0), draining: true },
        Control::Place { shard: JobShard::default(), place },
        Control::Job {
            shards: BTreeMap::from([(JobShard::default(), 7)]),
            facts,
            state: JobState::Running,
            seen_ms: 5,
        },
        Control::Checkpoints { job: 7, difference },
        Control::Submit(Submission {
            name: "b".into(),
            token: 1,
            shape,
            keep_ms: Some(1),
            seen_ms: 6,
            run: "h:/r".into(),
        }),
        Control::Stop { job: JobId(1), now_ms: 7 },
        Control::Release { job: JobId(1) },
        Control::Delete { job: JobId(0) },
        Control::Order { token: 4, order: Order::Drain { server: ServerId(0), draining: false } },
    ]
}

fn control_requests() {
    let request = |seed: Seed, which: u8, message: &dyn Encoded| seed.byte(which).part(&message.bytes());
    let shape = proto::FleetShape { shards: 2, replicas: 3, durability: "quorum-disk".into() };
    let submit = |name: &str, token| proto::SubmitRequest {
        name: name.into(),
        token,
        shape: Some(shape.clone()),
        keep_ms: Some(1000),
        run: "host:/runs/t-1".into(),
    };
    let end = |job: &str, delete, token| proto::EndJobRequest { job: job.into(), delete, token };
    let mut jobs = Seed::default();
    for message in [submit("t", 1), submit("t", 1), submit("t", 2), submit("a b", 3), submit("..", 4)] {
        jobs = request(jobs, 9, &message);
    }
    for message in [end("t", false, 5), end("t", true, 6), end("t", true, 6), end("t", true, 7)] {
        jobs = request(jobs, 10, &message);
    }
    write("control_requests", "jobs", &jobs.0);
    let drain = |server, undo, token| proto::DrainRequest { server, undo, token };
    let forget = |server, token| proto::ForgetRequest { server, token };
    let abandon = proto::AbandonRequest { shard: 1, accept_loss: true, token: 13 };
    let mut servers = request(Seed::default(), 1, &proto::JoinRequest { address: "d:1".into() });
    for message in [drain(1, false, 8), drain(1, true, 9), drain(9, false, 10)] {
        servers = request(servers, 2, &message);
    }
    for message in [forget(2, 11), forget(2, 11), forget(2, 12)] {
        servers = request(servers, 3, &message);
    }
    servers = request(servers, 4, &abandon);
    servers = request(servers, 1, &proto::JoinRequest { address: "::1:7071".into() });
    write("control_requests", "servers", &servers.0);
    let rank = |rank, token| proto::GroupRank { rank, token, address: "a:1".into() };
    let group = proto::GroupAssignment { generation: 2, ranks: vec![rank(0, 5), rank(1, 6)] };
    let asks = |rank, token| proto::JoinGroupRequest {
        job: "t".into(),
        size: 2,
        rank,
        token,
        address: "a:1".into(),
        last: Some(group.clone()),
        timeout_ms: 1000,
        settings: "seed 1, model mlp".into(),
        ..proto::JoinGroupRequest::default()
    };
    let beat = proto::GroupHeartbeatRequest {
        job: "t".into(),
        assignment: Some(group.clone()),
        settings: "seed 1".into(),
        step: 9,
        ..proto::GroupHeartbeatRequest::default()
    };
    let mut ranks = Seed::default();
    for message in [asks(0, 5), asks(1, 6), asks(1, 7), asks(7, 8)] {
        ranks = request(ranks, 6, &message);
    }
    write("control_requests", "groups", &request(ranks, 7, &beat).0);
    let held =
        proto::CheckpointInfo { path: "/c/step-3".into(), step: 3, ..proto::CheckpointInfo::default() };
    let note = proto::NoteCheckpointsRequest { job: 5, folder: "/c".into(), held: vec![held] };
    let report = proto::ReportRequest { fleet: 1, server: 1, address: "b:1".into(), ..Default::default() };
    let job = ServerJob::new("t", Mode::Bsp, 10, 4).to_toml().expect("written");
    let mut others = request(Seed::default(), 0, &report);
    others = request(others, 5, &note);
    others = request(others, 8, &proto::RoomRequest { job });
    others = request(others, 11, &proto::HelloRequest {});
    write("control_requests", "others", &request(others, 12, &proto::DescribeRequest {}).0);
}

/// A message of any type.
trait Encoded {
    fn bytes(&self) -> Vec<u8>;
}

impl<M: Message> Encoded for M {
    fn bytes(&self) -> Vec<u8> {
        self.encode_to_vec()
    }
}

fn control_state() {
    let (agreed, mut log) = (Agreed::default(), Seed::default().part(&[]));
    for command in control_commands() {
        log = log.part(&header::encode(&command).expect("small"));
        agreed.apply(&command).expect("applied");
    }
    write("control_state", "commands", &log.0);
    let join = header::encode(&Control::Join { address: "d:1".into() }).expect("small");
    write("control_state", "snapshot", &Seed::default().part(&agreed.image().head).part(&join).0);
}

fn after(proposals: &[Proposal], shards: u32) -> Shard {
    let shard = Shard::new(ShardId(0), shards);
    proposals.iter().for_each(|p| _ = shard.apply(p));
    shard
}

fn shard_state() {
    for (name, life) in [("updates", updates(false)), ("leased", updates(true)), ("cuts", cuts())] {
        let mut seed = Seed::default().byte(1).part(&[]);
        for p in &life {
            seed = seed.part(&header::encode(p).expect("small")).part(&p.payload.to_bytes());
        }
        write("shard_state", name, &seed.0);
        // Before the worker has finished and left.
        let image = Replicated::image(&after(&life[..life.len().min(6)], 2));
        let mut seed = Seed::default().byte(1).part(&image.head).byte(image.parts.len() as u8);
        for part in &image.parts {
            seed = seed.part(&part.read().to_bytes());
        }
        let last = &life[life.len() - 1];
        seed = seed.part(&header::encode(last).expect("small")).part(&last.payload.to_bytes());
        write("shard_state", &format!("image-{name}"), &seed.0);
    }
}

fn replica() {
    let log = |mut seed: Seed, from: u64, life: &[Proposal]| {
        for (index, p) in (from..).zip(life) {
            seed =
                seed.part(&fuzzing::header_of(index, Change::Shard(p.clone()))).part(&p.payload.to_bytes());
        }
        let index = from + life.len() as u64;
        seed.part(&fuzzing::header_of(index, Change::Check)).part(&[])
    };
    write("replica", "log", &log(Seed::default().byte(0), 0, &updates(false)).0);
    let life = updates(true);
    let image = Replicated::image(&after(&life[..4], 1));
    let mut seed = Seed::default().byte(6).byte(image.parts.len() as u8);
    seed = seed.part(&fuzzing::snapshot_head(3, &image.head));
    for part in &image.parts {
        seed = seed.part(&part.read().to_bytes());
    }
    seed = seed.word(3).part(&fuzzing::purge_tag(3));
    write("replica", "snapshot-and-log", &log(seed, 4, &life[4..]).0);
    let metadata = header::encode(&(1u64 << 32, 5u64, 2u32)).expect("numbers");
    write("replica", "metadata", &log(Seed::default().byte(1).part(&metadata), 0, &cuts()).0);
}

fn store() {
    let records: [(&[u8], &[u8]); 3] = [(b"entry 0", &[1; 20]), (b"entry 1", &[]), (b"entry 2", &[3; 30])];
    let seed = |how| Seed::default().byte(how);
    let first = segment(0, 11, &records);
    let second = segment(3, 12, &records[..1]);
    let closed = [&second[..], &mark(4)].concat();
    write("log", "two-segments", &seed(1).word(0).part(&first).word(3).part(&closed).0);
    write("log", "not-mended", &seed(0).word(0).part(&first).word(3).part(&second).0);
    write("log", "torn", &seed(0).word(0).part(&first[..first.len() - 5]).0);
    let mut short = segment(0, 13, &records);
    short[12] = 1;
    write("log", "being-cut", &seed(5).word(0).word(0).part(&short).0);
    // Two groups: what one gives up, what is moved, and a group that goes.
    let of = |kind, number: u64, key, turn: u64, index: u64, body| {
        let mut item = item(kind, number, 0, key, body);
        item[40..48].copy_from_slice(&turn.to_le_bytes());
        item[48..56].copy_from_slice(&index.to_le_bytes());
        item
    };
    let none: (&[u8], &[u8]) = (&[], &[]);
    let items = [
        of(1, 0, 0, 0, 5, records[0]),
        of(1, 1, 1, 0, 0, records[1]),
        of(1, 2, 0, 1, 6, records[2]),
        of(3, 3, 1, 1, 0, records[1]),
        of(4, 4, 0, 2, 6, none),
        of(5, 5, 0, 3, 5, (b"tag", &[])),
        of(6, 6, 1, 2, 0, none),
    ];
    let mut shared = segment(0, 14, &[]);
    items.iter().for_each(|item| shared.extend(item));
    write("log", "two-groups", &seed(1).word(0).part(&shared).0);

    let disk = paraft_store::faulty::ForgetfulDisk::default();
    let path = Path::new("/f");
    let shared: std::sync::Arc<dyn paraft_store::Disk> = std::sync::Arc::new(disk.clone());
    let mut file = paraft_store::SnapshotWriter::create(shared, path).expect("in memory");
    for chunk in [vec![1; 40], Vec::new(), vec![2; 30]] {
        file.push(&Payload::from(chunk)).expect("in memory");
    }
    file.finish().expect("in memory");
    let bytes = disk.contents(path).expect("it is there");
    write("snapshot_file", "three-chunks", &seed(0).rest(&bytes).0);
    write("snapshot_file", "mended", &seed(1).rest(&bytes).0);
    write("snapshot_file", "cut-short", &seed(0).rest(&bytes[..60]).0);
    paraft_store::write_small(&disk, path, b"contents").expect("in memory");
    let bytes = disk.contents(path).expect("it is there");
    write("small_file", "whole", &seed(0).rest(&bytes).0);
    write("small_file", "mended", &seed(1).rest(&bytes).0);
}

fn jobs() {
    for leased in [false, true] {
        let job = wire::small_job(Encoding::Int8, leased).to_toml().expect("a job");
        write("server_job", if leased { "leased" } else { "plain" }, job.as_bytes());
    }
    let example = "name = \"digits\"\nseed = 3\n\n[model]\nkind = \"mlp\"\nhidden = [16]\n\n[data]\nkind = \"digits\"\n\n\
        [train]\nworkers = 2\nmode = \"ssp:4\"\nbatch = 8\n\n[optimizer]\nkind = \"adam\"\nlr = 0.01\n\n[schedule]\n\
        kind = \"cosine\"\nsteps = 100\nwarmup = 5\n\n[eval]\ntarget_accuracy = 0.9\n\n[checkpoint]\nevery_steps = 10\n\n\
        [cluster]\nservers = 3\nreplicas = 3\ndurability = \"quorum-memory\"\n";
    write("job_file", "example", example.as_bytes());
    let set = "[data]\nkind = \"csv\"\npath = \"a\"\n[model]\nkind = \"linear\"\n\0train.batch=3\0cluster.durability=leader";
    write("job_file", "set", set.as_bytes());
    write("job_file", "wrong-key", b"[cluster]\nserver = 3\n");
}

fn metrics() {
    let events = [
        Event::Run(Run { name: "r".into(), mode: "bsp".into(), workers: 2, ..Run::default() }),
        Event::Train(Train {
            wall: 2.0,
            seconds: 1.0,
            samples: 10,
            loss: 0.5,
            samples_per_s: 10.0,
            ..Train::default()
        }),
        Event::Eval(Eval {
            epoch: 1,
            samples: 10,
            loss: f64::NAN,
            accuracy: Some(0.5),
            count: 3,
            ..Eval::default()
        }),
        Event::Worker(Worker { samples: 20, seconds: 2.0, cpu_seconds: 1.0, ..Worker::default() }),
        Event::Shard(ShardLine { delay: vec![3, 0, 1], pushes: 4, ..ShardLine::default() }),
        Event::Leave(Leave { reason: "killed".into(), ..Leave::default() }),
        Event::Server(Server { cpu_seconds: 1.0, ..Server::default() }),
    ];
    let lines: Vec<String> = events.iter().map(|e| serde_json::to_string(e).expect("plain") + "\n").collect();
    write("metrics", "run", lines.concat().as_bytes());
    write("metrics", "train", [&lines[0][..], &lines[1], &lines[1], "\n", &lines[2]].concat().as_bytes());
    write("metrics", "cut-off", &lines[1].as_bytes()[..100]);
}

fn checkpoints() {
    let json = serde_json::json!({
        "format": 1, "paraft": "0.1.0", "written": 1.5, "name": "fuzz", "step": 7, "resume_step": 7, "mode": "bsp",
        "workers": 1, "batch": 4, "steps_per_epoch": 3, "shards": 1, "bucket_len": 4,
        "optimizer": { "kind": "momentum", "lr": 0.1, "momentum": 0.9 }, "slots": ["velocity"],
        "tensors": [
            { "name": "0.weight", "shape": [2, 3], "kind": "param" }, { "name": "0.bias", "shape": [2], "kind": "param" },
            { "name": "1.running_mean", "shape": [2], "kind": "buffer" },
        ],
        "buckets": [{ "version": 7, "clock": 7.0 }, { "version": 7, "clock": 7.0 }, { "version": 7, "clock": 7.0 }],
        "clocks": [{ "shard": 0, "worker": 0, "step": 7, "finished": false }],
        "early_stop": { "best_loss": 0.5, "bad": 1, "stop": false, "evaluated": null },
        "job": "", "files": {}, "seal": "00000000",
    });
    let text = json.to_string();
    write("manifest", "mended", &Seed::default().byte(1).rest(text.as_bytes()).0);
    let sealed = files::seal(text.as_bytes()).expect("an object");
    write("manifest", "whole", &Seed::default().byte(0).rest(&sealed).0);
    let cut = &sealed[..sealed.len() / 2];
    write("manifest", "cut-off", &Seed::default().byte(0).rest(cut).0);

    let all = files::tensors();
    let shapes: Vec<(&str, &[usize])> = all.iter().map(|t| (t.name.as_str(), t.shape.as_slice())).collect();
    write("weights", "f32", &files::model(&shapes, "F32", 4));
    write("weights", "bf16", &files::model(&shapes, "BF16", 2));
    write("weights", "f16", &files::model(&shapes, "F16", 2));
    write("weights", "i64", &files::model(&[("1.num_batches_tracked", &[])], "I64", 8));
}

fn gz(bytes: &[u8]) -> Vec<u8> {
    let mut out = GzEncoder::new(Vec::new(), Compression::best());
    out.write_all(bytes).expect("in memory");
    out.finish().expect("in memory")
}

fn data() {
    let numbers = |all: &[u32]| all.iter().flat_map(|n| n.to_be_bytes()).collect::<Vec<u8>>();
    let images = [numbers(&[2051, 3, 2, 2]), (0..12).collect()].concat();
    let labels = [numbers(&[2049, 3]), vec![0, 2, 1]].concat();
    write("idx", "plain", &Seed::default().part(&images).rest(&labels).0);
    write("idx", "gzip", &Seed::default().part(&gz(&images)).rest(&gz(&labels)).0);
    write("idx", "cut-off", &Seed::default().part(&images[..10]).rest(&labels).0);
    let table = b"a,b,label\n1,2.5,0\n-3,1e3,1\n0.5,7,2\n4,5,1\n8,9,0\n";
    let seed = |how| Seed::default().byte(how);
    write("csv", "last", &seed(1 | 8 | 32).part(table).0);
    write("csv", "first-no-header", &seed(4 | 16 | 32).part(b"1,0.5\n0,0.25\n1,3\n").0);
    write("csv", "test-file", &seed(1 | 8 | 32 | 64).part(table).rest(table).0);
    let names = b"\"id\",a,kind\r\n7, 2.5 ,\"pear, ripe\"\r\n8,1e3,fig\r\n9,7,fig\r\n";
    write("csv", "names", &seed(1 | 8 | 32).part(names).0);
    write("csv", "numbers", &seed(1 | 8 | 32 | 128).part(table).0);
    write("csv", "gzip", &seed(1 | 8 | 32).part(&gz(table)).0);
    let text = "Grüße, 世界! to be or not to be";
    write("text", "bytes", &seed(4).rest(text.as_bytes()).0);
    write("text", "gzip", &seed(4).rest(&gz(text.as_bytes())).0);
    let libsvm = b"+1 qid:3 1:0.5 18446744073709551615:-2e3 # 7:x\r\n\n-1:0.25\t9:1 2:1 0:0\n1\n";
    write("sparse", "libsvm", &seed(0).rest(libsvm).0);
    write("sparse", "libsvm-gzip", &seed(8).rest(&gz(libsvm)).0);
    let vowpal = "1 2 0 'tag|f:2 a:3 b:c :4|g 12 \u{fc}\n-1 |\n+1 | x |7 a:0\n";
    write("sparse", "vowpal", &seed(1).rest(vowpal.as_bytes()).0);
    write("sparse", "vowpal-all", &seed(1 | 8 | 16 | 32).rest(vowpal.as_bytes()).0);
    let row = |label: &str| {
        [label, "5", "", "-2"].join("\t") + &"\t7".repeat(10) + &"\t68fd1e64".repeat(25) + "\t\n"
    };
    write("sparse", "criteo", &seed(2).rest((row("0") + &row("1")).as_bytes()).0);
    write("sparse", "ratings", &seed(3).rest(b"userId,movieId,rating,timestamp\n1,31,2.5,12\n7,1,0,1\n").0);
    write("sparse", "ratings-texts", &seed(3 | 8).rest(b"A2\t0001\t5\nB.c\t1e5\t1\n").0);
    let (mut classes, mut numbers) = (ClassMetrics::default(), NumberMetrics::default());
    for (score, label) in [(-3.0, 0.0), (0.5, 1.0), (1e9, 0.0), (f32::NAN, 1.0)] {
        classes.add(score, label);
        numbers.add(score, label);
    }
    write("sparse", "classes", &seed(4).rest(&classes.to_bytes()).0);
    write("sparse", "numbers", &seed(4).rest(&numbers.to_bytes()).0);
}

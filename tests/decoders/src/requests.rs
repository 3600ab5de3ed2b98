//! Requests of the control service, as its leader takes them: what each comes to, by what is agreed on.

use crate::input::Input;
use paraft_common::{
    Durability, JobShard, ServerId,
    config::{ServerJob, check_name},
};
use paraft_proto::{
    self as proto, AbandonRequest, DrainRequest, EndJobRequest, ForgetRequest, GroupHeartbeatRequest,
    JoinGroupRequest, JoinRequest, NoteCheckpointsRequest, RefusalKind, Refused, ReportRequest, RoomRequest,
    SubmitRequest,
};
use paraft_server::{
    control::{Agreed, Command, Groups, MAX_ORDERS, Order, Outcome, Place, Refusal, Shape},
    raft::Replicated,
    rpc::{
        control::{
            from_report,
            jobs::{Ending, ending, submission},
            may_be_joined,
        },
        groups::{asks_of, holds_of},
        jobs::held_in,
    },
};
use prost::Message;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

/// A fleet of three that has a job of its own.
fn fleet() -> Agreed {
    let agreed = Agreed::default();
    let shape = Shape { shards: 2, replicas: 3, durability: Durability::QuorumMemory };
    let servers: BTreeMap<_, _> = (0..3).map(|s| (ServerId(s), format!("s{s}:1"))).collect();
    agree(&agreed, &Command::Found { fleet: 1, shape, servers });
    agreed
}

fn agree(agreed: &Agreed, command: &Command) -> Outcome {
    agreed.apply(command).expect("it needs no memory to speak of")
}

/// Gives an order twice, as who has not heard the first answer: both answers are one.
fn give(agreed: &Agreed, token: u64, order: Order) {
    let command = Command::Order { token, order };
    let first = agree(agreed, &command);
    match &first {
        Outcome::Refused(why) => shown(&why.to_string()),
        _ => {
            let done = agreed.get();
            assert_eq!(agree(agreed, &command), first);
            assert_eq!(agreed.get(), done, "it is done once");
        }
    }
    let unknown = matches!(first, Outcome::Refused(Refusal::NoJob(_)));
    assert!(!unknown, "what names a job was looked up a moment before");
}

/// A text for people is printed as it is.
fn shown(text: &str) {
    assert!(!text.contains(char::is_control), "{text:?}");
}

fn refused(kind: RefusalKind) {
    let refused = Refused::from(kind);
    shown(&refused.message);
    assert!(refused.is_final(), "what is wrong with a request stays wrong: {refused:?}");
}

/// Requests, each with a byte that says of which method it is.
pub fn control_requests(data: &[u8]) {
    let mut input = Input(data);
    let (agreed, mut groups) = (fleet(), Groups::default());
    let now = Instant::now();
    while !input.is_empty() {
        let which = input.byte();
        let bytes = input.part();
        match which % 13 {
            0 => _ = ReportRequest::decode(bytes).map(from_report),
            1 => {
                let Ok(JoinRequest { address }) = JoinRequest::decode(bytes) else { continue };
                match may_be_joined(&address) {
                    Ok(()) => _ = agree(&agreed, &Command::Join { address }),
                    Err(why) => shown(&why),
                }
            }
            2 => {
                let Ok(DrainRequest { server, undo, token }) = DrainRequest::decode(bytes) else { continue };
                give(&agreed, token, Order::Drain { server: ServerId(server), draining: !undo });
            }
            3 => {
                let Ok(ForgetRequest { server, token }) = ForgetRequest::decode(bytes) else { continue };
                give(&agreed, token, Order::Forget { server: ServerId(server) });
            }
            4 => {
                let Ok(AbandonRequest { shard, token, .. }) = AbandonRequest::decode(bytes) else { continue };
                let place = Place { founding: 9, voters: BTreeSet::new(), founded: false };
                give(&agreed, token, Order::Abandon { shard: JobShard::from_number(shard), place });
            }
            5 => {
                let Ok(request) = NoteCheckpointsRequest::decode(bytes) else { continue };
                let (job, folder) = (request.job, request.folder.clone());
                let Ok(held) = held_in(request) else { continue };
                if let Some(difference) = agreed.read(|s| s.jobs.difference(job, &folder, held)) {
                    agree(&agreed, &Command::Checkpoints { job, difference });
                }
            }
            6 => {
                let Ok(request) = JoinGroupRequest::decode(bytes) else { continue };
                let (key, asks) = asks_of(request);
                if let Err(no) = groups.join(&key, asks, now) {
                    shown(&no.why);
                }
            }
            7 => {
                let Ok(request) = GroupHeartbeatRequest::decode(bytes) else { continue };
                let (key, holds) = holds_of(request);
                if let Err(why) = groups.hold(&key, holds, now) {
                    shown(&why);
                }
            }
            8 => {
                let Ok(RoomRequest { job }) = RoomRequest::decode(bytes) else { continue };
                if let Ok(job) = ServerJob::decode(&job) {
                    let _ = job.validate();
                }
            }
            9 => {
                let Ok(request) = SubmitRequest::decode(bytes) else { continue };
                let token = request.token;
                match submission(&agreed.get(), request, 1) {
                    Ok(submission) => give(&agreed, token, Order::Submit(submission)),
                    Err(kind) => refused(kind),
                }
            }
            10 => {
                let Ok(request) = EndJobRequest::decode(bytes) else { continue };
                let token = request.token;
                match ending(&agreed.get(), request, 2) {
                    Ok(Ending::Order(order)) => give(&agreed, token, order),
                    Ok(Ending::Ended(_)) => {}
                    Err(kind) => refused(kind),
                }
            }
            11 => _ = proto::HelloRequest::decode(bytes),
            _ => _ = proto::DescribeRequest::decode(bytes),
        }
    }
    agreed.read(|s| {
        assert!(s.jobs.iter().all(|(_, j)| j.name.is_empty() || check_name(&j.name).is_ok()), "{:?}", s.jobs);
        assert!(s.orders.len() <= MAX_ORDERS);
    });
    groups.overview(now).iter().for_each(|g| shown(&g.key.job));
    let other = Agreed::default();
    other.install(&agreed.image()).expect("its own image");
    assert_eq!(other.get(), agreed.get());
}

//! The service that forms the fleet, and its wire types.

use super::{groups, jobs, memory};
use crate::{
    connections::{self, Rank},
    control::{
        Agent, AsideReport, Command, Directive, Do, Outcome, Refused, ReplicaReport, Report, Shape, Then,
    },
    raft::{Digest, Membership, ReplicaId, endpoint},
};
use paraft_common::{Durability, ServerId, ShardId, config::ServerJob};
use paraft_proto::{
    AbandonReply, AbandonRequest, DescribeReply, DescribeRequest, Diverged, DrainReply, DrainRequest,
    FleetShape, ForgetReply, ForgetRequest, Found, HelloReply, HelloRequest, HoldGroupReply,
    HoldGroupRequest, Host, JoinGroupReply, JoinGroupRequest, JoinReply, JoinRequest, NoteCheckpointsReply,
    NoteCheckpointsRequest, ParityDigest, Replica, ReportReply, ReportRequest, Retire, RoomReply,
    RoomRequest, ServerInfo, ShardInfo, Voters, control_client::ControlClient, control_server::Control,
    directive, limits::MAX_JOB_BYTES, no_leader,
};
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};
use tonic::{Request, Response, Status};

/// The service.
#[derive(Clone)]
pub struct ControlService {
    /// This server's part.
    pub agent: Arc<Agent>,
}

/// A shape from the wire; `None` where it is none.
pub fn shape_of(shape: Option<&FleetShape>) -> Option<Shape> {
    let s = shape?;
    let durability: Durability = s.durability.parse().ok()?;
    Some(Shape { shards: s.shards, replicas: s.replicas, durability })
}

fn shape_to(s: Shape) -> FleetShape {
    FleetShape { shards: s.shards, replicas: s.replicas, durability: s.durability.name().into() }
}

/// A report for the wire.
pub fn to_report(fleet: u64, server: ServerId, report: &Report) -> ReportRequest {
    let replicas = report.replicas.iter().map(|(shard, r)| paraft_proto::ReplicaReport {
        shard: shard.0,
        node: r.node.0,
        origin: r.origin,
        founded: r.founded,
        leads: r.leads,
        term: r.term,
        applied: r.applied,
        bytes: r.bytes,
        members: r
            .membership
            .members
            .iter()
            .map(|(n, a)| Replica {
                node: n.0,
                address: a.clone(),
                voter: r.membership.voters.contains(n),
                caught_up: r.caught_up.contains(n),
            })
            .collect(),
        changing: r.membership.changing,
        membership_index: r.membership.index,
        trouble: r.trouble.clone(),
        stopped_ms: r.stopped.map(|d| d.as_millis() as u64),
        no_room: r.no_room,
        digests: r.digests.iter().map(|d| ParityDigest { index: d.index, digest: d.digest }).collect(),
        job: r.job.as_ref().map(jobs::to_report),
    });
    ReportRequest {
        fleet,
        server: server.0,
        address: report.address.clone(),
        node: report.node.0,
        replicas: replicas.collect(),
        reached: report.reached.iter().map(|s| s.0).collect(),
        asides: report.asides.iter().flatten().map(aside).collect(),
        asides_known: report.asides.is_some(),
        control_trouble: report.control_trouble.clone(),
    }
}

fn aside(a: &AsideReport) -> paraft_proto::AsideReport {
    let AsideReport { shard, origin, name, readable } = a.clone();
    paraft_proto::AsideReport { shard: shard.0, origin, name, readable }
}

/// A report from the wire. A job that this version does not know is left out.
pub fn from_report(r: ReportRequest) -> Report {
    let aside = |a: paraft_proto::AsideReport| {
        let paraft_proto::AsideReport { shard, origin, name, readable } = a;
        AsideReport { shard: ShardId(shard), origin, name, readable }
    };
    let replica = |r: paraft_proto::ReplicaReport| {
        let voters = r.members.iter().filter(|m| m.voter).map(|m| ReplicaId(m.node)).collect();
        let caught_up = r.members.iter().filter(|m| m.caught_up).map(|m| ReplicaId(m.node)).collect();
        let members = r.members.into_iter().map(|m| (ReplicaId(m.node), m.address)).collect();
        let report = ReplicaReport {
            node: ReplicaId(r.node),
            origin: r.origin,
            founded: r.founded,
            leads: r.leads,
            term: r.term,
            applied: r.applied,
            bytes: r.bytes,
            membership: Membership { members, voters, changing: r.changing, index: r.membership_index },
            trouble: r.trouble,
            stopped: r.stopped_ms.map(Duration::from_millis),
            no_room: r.no_room,
            digests: r.digests.iter().map(|d| Digest { index: d.index, digest: d.digest }).collect(),
            caught_up,
            job: r.job.and_then(jobs::from_report),
        };
        (ShardId(r.shard), report)
    };
    Report {
        address: r.address,
        node: ReplicaId(r.node),
        replicas: r.replicas.into_iter().map(replica).collect(),
        reached: r.reached.into_iter().map(ServerId).collect(),
        asides: r.asides_known.then(|| r.asides.into_iter().map(aside).collect()),
        control_trouble: r.control_trouble,
    }
}

fn to_directive(d: Directive) -> paraft_proto::Directive {
    use directive::Kind;
    let replica =
        |(n, address): (ReplicaId, String), voter| Replica { node: n.0, address, voter, caught_up: false };
    let kind = match d.what {
        Do::Host { origin } => Kind::Host(Host { origin }),
        Do::Found { origin, members } => {
            Kind::Found(Found { origin, members: members.into_iter().map(|m| replica(m, true)).collect() })
        }
        Do::Retire { node, index } => Kind::Retire(Retire { node: node.0, index }),
        Do::Learner(node, address) => Kind::Learner(replica((node, address), false)),
        Do::Voters(nodes) => Kind::Voters(Voters { nodes: nodes.into_iter().map(|n| n.0).collect() }),
        Do::Transfer(to) => Kind::Transfer(to.0),
        Do::Diverged { node, at, majority } => {
            Kind::Diverged(Diverged { node: node.0, index: at.index, digest: at.digest, majority })
        }
    };
    paraft_proto::Directive { shard: d.shard.0, kind: Some(kind) }
}

/// A directive from the wire; `None`: of a kind that this version does not know.
pub fn from_directive(d: &paraft_proto::Directive) -> Option<Directive> {
    use directive::Kind;
    let what = match d.kind.as_ref()? {
        Kind::Host(h) => Do::Host { origin: h.origin },
        Kind::Found(f) => Do::Found {
            origin: f.origin,
            members: f.members.iter().map(|m| (ReplicaId(m.node), m.address.clone())).collect(),
        },
        Kind::Retire(r) => Do::Retire { node: ReplicaId(r.node), index: r.index },
        Kind::Learner(r) => Do::Learner(ReplicaId(r.node), r.address.clone()),
        Kind::Voters(v) => Do::Voters(v.nodes.iter().map(|n| ReplicaId(*n)).collect()),
        Kind::Transfer(to) => Do::Transfer(ReplicaId(*to)),
        Kind::Diverged(d) => Do::Diverged {
            node: ReplicaId(d.node),
            at: Digest { index: d.index, digest: d.digest },
            majority: d.majority,
        },
    };
    Some(Directive { shard: ShardId(d.shard), what })
}

impl ControlService {
    fn leader(&self) -> String {
        let leads = self.agent.group().leadership().borrow().leads;
        match leads {
            true => self.agent.address().to_string(),
            false => self.agent.group().leader_address().unwrap_or_default(),
        }
    }
}

const NO_LEADER: &str = "this server does not lead the control group";

#[tonic::async_trait]
impl Control for ControlService {
    async fn hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        connections::mark(request.extensions(), Rank::Reader);
        Ok(Response::new(HelloReply {
            server: self.agent.server().0,
            node: self.agent.group().me().0,
            fleet: self.agent.fleet(),
            leader: self.leader(),
            shape: self.agent.shape().map(shape_to),
            members: self.agent.group().membership().members.keys().map(|n| n.0).collect(),
        }))
    }

    async fn report(&self, request: Request<ReportRequest>) -> Result<Response<ReportReply>, Status> {
        let visitor = connections::of(request.extensions());
        let report = request.into_inner();
        let (own, leader) = (self.agent.agreed.read(|s| (s.fleet, s.generation)), self.leader());
        let refuse = |why: String| ReportReply { leader: leader.clone(), why, ..ReportReply::default() };
        if own.0 != 0 && report.fleet != own.0 {
            return Ok(Response::new(refuse(format!(
                "this server belongs to another fleet than {}: start it with a --data folder of its own to make it join",
                self.agent.address()
            ))));
        }
        let server = ServerId(report.server);
        if ReplicaId(report.node).server() != server {
            return Ok(Response::new(refuse(format!(
                "{} is no replica of {server}",
                ReplicaId(report.node)
            ))));
        }
        if self.agent.agreed.read(|s| s.forgotten.contains(&server)) {
            return Ok(Response::new(refuse(format!(
                "{server} was forgotten (`paraft forget`): it can join anew (--join), with another --data folder"
            ))));
        }
        let reply = match self.agent.take_report(server, from_report(report)) {
            Err(why) => refuse(why.unwrap_or_default()),
            Ok(directives) => {
                visitor.inspect(|v| v.is(Rank::Server));
                ReportReply {
                    accepted: true,
                    leader: leader.clone(),
                    why: self.agent.unreached(server).unwrap_or_default(),
                    generation: own.1,
                    directives: directives.into_iter().map(to_directive).collect(),
                }
            }
        };
        Ok(Response::new(reply))
    }

    async fn join(&self, request: Request<JoinRequest>) -> Result<Response<JoinReply>, Status> {
        let address = request.into_inner().address;
        let leader = self.leader();
        let refuse = |why: String| JoinReply { leader: leader.clone(), why, ..JoinReply::default() };
        if !self.agent.group().leadership().borrow().leads {
            return Ok(Response::new(JoinReply { not_leader: true, ..refuse(NO_LEADER.into()) }));
        }
        if address.len() > 256 || !address.contains(':') {
            return Ok(Response::new(refuse(format!("`{address}` is no address (write host:port)"))));
        }
        if let Err(why) = self.agent.may_join(&address).await {
            return Ok(Response::new(refuse(why)));
        }
        let reply = match self.agent.propose(Command::Join { address }).await {
            Ok(Outcome::Joined(server)) => JoinReply {
                accepted: true,
                server: server.0,
                fleet: self.agent.agreed.read(|s| s.fleet),
                shape: self.agent.shape().map(shape_to),
                ..refuse(String::new())
            },
            Ok(Outcome::Refused(why)) => refuse(why),
            // No refusal: it has lost its majority, and the next leader may take the server in.
            Err(why) => JoinReply { not_leader: true, ..refuse(why) },
            Ok(Outcome::Done) => refuse("an answer of another kind".into()),
        };
        Ok(Response::new(reply))
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        let request = request.into_inner();
        let leader = self.leader();
        let reply = |accepted, why: String| DrainReply { accepted, leader: leader.clone(), why };
        if !self.agent.group().leadership().borrow().leads {
            return Ok(Response::new(reply(false, NO_LEADER.into())));
        }
        let command = Command::Drain { server: ServerId(request.server), draining: !request.undo };
        Ok(Response::new(match self.agent.propose(command).await {
            Ok(Outcome::Refused(why)) | Err(why) => reply(false, why),
            Ok(_) => reply(true, String::new()),
        }))
    }

    async fn forget(&self, request: Request<ForgetRequest>) -> Result<Response<ForgetReply>, Status> {
        let server = ServerId(request.into_inner().server);
        let leader = self.leader();
        let reply = |accepted, why: String| ForgetReply { accepted, leader: leader.clone(), why };
        Ok(Response::new(match self.agent.forget(server).await {
            Ok(()) => reply(true, String::new()),
            Err(why) => reply(false, why.unwrap_or_else(|| NO_LEADER.into())),
        }))
    }

    async fn abandon(&self, request: Request<AbandonRequest>) -> Result<Response<AbandonReply>, Status> {
        let AbandonRequest { shard, accept_loss } = request.into_inner();
        let leader = self.leader();
        let reply = |accepted, why: String| AbandonReply { accepted, leader: leader.clone(), why };
        Ok(Response::new(match self.agent.abandon(ShardId(shard), accept_loss).await {
            Ok(given_up) => reply(true, given_up),
            Err(why) => reply(false, why.unwrap_or_else(|| NO_LEADER.into())),
        }))
    }

    async fn note_checkpoints(
        &self,
        request: Request<NoteCheckpointsRequest>,
    ) -> Result<Response<NoteCheckpointsReply>, Status> {
        let request = request.into_inner();
        let leader = self.leader();
        let reply = |accepted, why: String| NoteCheckpointsReply { accepted, leader: leader.clone(), why };
        if !self.agent.group().leadership().borrow().leads {
            return Ok(Response::new(reply(false, NO_LEADER.into())));
        }
        let (job, folder) = (request.job, request.folder.clone());
        let held = match jobs::held_in(request) {
            Ok(held) => held,
            Err(why) => return Ok(Response::new(reply(false, why))),
        };
        Ok(Response::new(match self.agent.note_checkpoints(job, &folder, held).await {
            Ok(()) => reply(true, String::new()),
            Err(why) => reply(false, why),
        }))
    }

    async fn join_group(
        &self,
        request: Request<JoinGroupRequest>,
    ) -> Result<Response<JoinGroupReply>, Status> {
        let refuse = |why: String| JoinGroupReply { leader: self.leader(), why, ..JoinGroupReply::default() };
        let leads = || self.agent.leads();
        Ok(Response::new(match leads() {
            false => refuse(NO_LEADER.into()),
            true => groups::join(&self.agent, request.into_inner(), leads).await.unwrap_or_else(
                |Refused { why, then }| JoinGroupReply {
                    give_up: then == Then::GiveUp,
                    fix: then == Then::Fix,
                    ..refuse(why)
                },
            ),
        }))
    }

    async fn hold_group(
        &self,
        request: Request<HoldGroupRequest>,
    ) -> Result<Response<HoldGroupReply>, Status> {
        connections::mark(request.extensions(), Rank::Worker);
        let refuse = |why: String| HoldGroupReply { leader: self.leader(), why, ..HoldGroupReply::default() };
        Ok(Response::new(match self.agent.leads() {
            false => refuse(NO_LEADER.into()),
            true => groups::hold(&self.agent, request.into_inner()).unwrap_or_else(refuse),
        }))
    }

    async fn room(&self, request: Request<RoomRequest>) -> Result<Response<RoomReply>, Status> {
        let RoomRequest { job } = request.into_inner();
        let server = self.agent.server().0;
        let refuse = |why: String| RoomReply { server, why, ..RoomReply::default() };
        if job.len() > MAX_JOB_BYTES {
            return Ok(Response::new(refuse(format!("a job of {} bytes is too long", job.len()))));
        }
        Ok(Response::new(match ServerJob::decode(&job) {
            Ok(job) => memory::to_reply(self.agent.room_for(&job)),
            Err(e) => refuse(e.to_string()),
        }))
    }

    async fn describe(&self, request: Request<DescribeRequest>) -> Result<Response<DescribeReply>, Status> {
        connections::mark(request.extensions(), Rank::Reader);
        let Some((state, control, heard, health)) = self.agent.overview() else {
            let jobs = self.agent.agreed.read(|s| jobs::to_info(&s.jobs));
            return Ok(Response::new(DescribeReply {
                leader: self.leader(),
                jobs,
                ..DescribeReply::default()
            }));
        };
        let servers = state.servers.iter().map(|(id, m)| {
            let report = heard.get(id);
            let replicas = || report.iter().flat_map(|(r, _)| r.replicas.values());
            let unreached = self.agent.unreached(*id);
            let trouble = match report {
                Some((r, false)) if !r.control_trouble.is_empty() => {
                    Some(format!("its replica of the control group has stopped: {}", r.control_trouble))
                }
                _ => unreached.clone(),
            };
            let asides = report.iter().flat_map(|(r, _)| r.asides.iter().flatten());
            let word = match report {
                Some((_, false)) if unreached.is_some() => "unreachable",
                Some((_, false)) if m.draining => "draining",
                Some((_, false)) => "up",
                _ => "silent",
            };
            ServerInfo {
                server: id.0,
                address: m.address.clone(),
                state: word.into(),
                bytes: replicas().map(|r| r.bytes).sum(),
                leads: replicas().filter(|r| r.leads).count() as u32,
                holds: replicas().count() as u32,
                asides: asides.map(|a| a.name.clone()).collect(),
                trouble: trouble.unwrap_or_default(),
            }
        });
        // A voter is a replica in one life: its server may be there without it.
        let answers = |n: &ReplicaId, holds: &dyn Fn(&Report) -> bool| {
            heard.get(&n.server()).is_some_and(|(r, silent)| !silent && holds(r))
        };
        let ids = |nodes: Vec<&ReplicaId>| nodes.into_iter().map(|n| n.server().0).collect::<Vec<_>>();
        let control_silent = control.voters.iter().filter(|n| !answers(n, &|r| r.node == **n));
        let shards = state.shards.keys().map(|shard| {
            let reports =
                || heard.values().filter(|(_, silent)| !silent).filter_map(|(r, _)| r.replicas.get(shard));
            let lead = reports().filter(|r| r.leads).max_by_key(|r| r.term);
            let (health, trouble) = health.get(shard).cloned().unwrap_or_default();
            let servers = |voting: bool| {
                let of = |m: &Membership| -> Vec<u64> {
                    let votes = |n: &&ReplicaId| m.voters.contains(n) == voting;
                    m.members.keys().filter(votes).map(|n| n.server().0).collect()
                };
                lead.map(|l| of(&l.membership)).unwrap_or_default()
            };
            let holds = |n: &ReplicaId, r: &Report| {
                r.replicas.get(shard).is_some_and(|p| p.node == *n && p.trouble.is_empty())
            };
            let silent = |l: &ReplicaReport| {
                ids(l.membership.voters.iter().filter(|n| !answers(n, &|r| holds(n, r))).collect())
            };
            ShardInfo {
                shard: shard.0,
                state: health.name().into(),
                voters: servers(true),
                learners: servers(false),
                leader: lead.map(|l| l.node.server().0),
                trouble,
                silent: lead.map(silent).unwrap_or_default(),
            }
        });
        Ok(Response::new(DescribeReply {
            fleet: state.fleet,
            generation: state.generation,
            leader: self.leader(),
            shape: state.shape.map(shape_to),
            servers: servers.collect(),
            shards: shards.collect(),
            jobs: jobs::to_info(&state.jobs),
            control_voters: ids(control.voters.iter().collect()),
            control_silent: ids(control_silent.collect()),
            groups: groups::to_info(&self.agent),
        }))
    }
}

/// A new server asks a fleet for its id: the first address that leads there, or knows who does. Says in the log, in the
/// meantime, what it waits for.
pub async fn ask_to_join(at: &[String], address: &str, within: Duration) -> Result<JoinReply, String> {
    let refused = Mutex::default();
    let tell = async {
        let mut pause = JOIN_QUIET;
        loop {
            tokio::time::sleep(pause).await;
            let why = why_nobody_leads(at, &refused).await;
            tracing::warn!("no fleet has taken this server in yet: {why}. It goes on asking");
            pause = JOIN_REPEAT;
        }
    };
    let outcome = tokio::select! {
        outcome = tokio::time::timeout(within, ask(at, address, &refused)) => outcome,
        never = tell => never,
    };
    match outcome {
        Ok(outcome) => outcome,
        Err(_) => Err(why_nobody_leads(at, &refused).await),
    }
}

/// A fleet that is well takes a new server in within this time; then it hears what is the matter, and again after each
/// of the other.
const JOIN_QUIET: Duration = Duration::from_secs(2);
const JOIN_REPEAT: Duration = Duration::from_secs(10);
const DESCRIBE: Duration = Duration::from_secs(1);
/// After a leader's refusal, and where it could not take the order.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Until a leader takes it in. Keeps what a leader refused with.
async fn ask(at: &[String], address: &str, refused: &Mutex<String>) -> Result<JoinReply, String> {
    let mut next: Vec<String> = Vec::new();
    loop {
        if next.is_empty() {
            next.extend(at.iter().cloned());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let Some(to) = next.pop() else { return Err("no address was given".into()) };
        let join = async {
            let mut client = ControlClient::new(endpoint(&to)?.connect_lazy());
            let reply = client.join(JoinRequest { address: address.into() }).await;
            reply.map(|r| r.into_inner()).map_err(|s| s.message().to_string())
        };
        match tokio::time::timeout(Duration::from_secs(6), join).await {
            Ok(Ok(reply)) if reply.accepted => return Ok(reply),
            Ok(Ok(reply)) => {
                if !reply.not_leader {
                    *refused.lock() = format!("{to}: {}", reply.why);
                }
                if !reply.not_leader || reply.leader == to {
                    tokio::time::sleep(ASK_AGAIN).await;
                }
                next.extend(Some(reply.leader).filter(|l| !l.is_empty() && *l != to));
            }
            Ok(Err(error)) => tracing::debug!(%to, error, "no answer to the request to join"),
            Err(_) => tracing::debug!(%to, "no answer to the request to join"),
        }
    }
}

/// What these servers say of the control group.
async fn why_nobody_leads(at: &[String], refused: &Mutex<String>) -> String {
    let describe = |to: String| async move {
        let ask = async {
            let mut client = ControlClient::new(endpoint(&to)?.connect_lazy());
            let reply = client.describe(DescribeRequest {}).await;
            reply.map(|r| r.into_inner()).map_err(|s| s.message().to_string())
        };
        let timed = tokio::time::timeout(DESCRIBE, ask).await;
        let reply = timed.unwrap_or_else(|_| Err(format!("no answer within {DESCRIBE:?}")));
        (to, reply)
    };
    let answers = futures::future::join_all(at.iter().cloned().map(describe)).await;
    let refused = refused.lock().clone();
    let led = answers.iter().any(|(_, a)| a.as_ref().is_ok_and(|d| !d.leader.is_empty()));
    match (refused.is_empty(), led) {
        (false, true) => refused,
        (false, false) => format!("{refused}; {}", no_leader(&answers)),
        (true, _) => no_leader(&answers),
    }
}

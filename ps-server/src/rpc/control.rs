//! The service that forms the fleet, and its wire types.
//!
//! - `convert`: reports and directives; `describe`: the fleet's state.
//! - `jobs`: submission and end of jobs.
//! - `calls`, `join`: the client's side, in a server.

mod calls;
mod convert;
mod describe;
pub mod jobs;
mod join;

use super::{audit::Audit, groups, jobs as checkpoints, memory, rights::visitor, shape::shape_to};
use crate::{
    connections::{self, Rank, Visitor},
    control::{Advice, Agent, Command, Order, Outcome, Refused, ReportRefusal},
    raft::ReplicaId,
};
pub use calls::GrpcCalls;
use convert::to_directive;
pub use convert::{from_directive, from_report, to_report};
pub use join::ask_to_join;
use paraft_common::{JobShard, ServerId, check_address, config::ServerJob};
use paraft_proto::{
    AbandonReply, AbandonRequest, DescribeReply, DescribeRequest, DrainReply, DrainRequest, EndJobReply,
    EndJobRequest, ForgetReply, ForgetRequest, GroupHeartbeatReply, GroupHeartbeatRequest, HelloReply,
    HelloRequest, JoinGroupReply, JoinGroupRequest, JoinReply, JoinRequest, NoteCheckpointsReply,
    NoteCheckpointsRequest, RefusalKind, ReportReply, ReportRequest, RoomReply, RoomRequest, SubmitReply,
    SubmitRequest, control_server::Control, limits::MAX_JOB_BYTES,
};
use paraft_tls::Need;
use std::sync::Arc;
use tonic::{Request, Response, Status};

/// The service.
#[derive(Clone)]
pub struct ControlService {
    /// This server's agent.
    pub agent: Arc<Agent>,
    /// Records the orders of people and the joins of servers.
    pub audit: Arc<Audit>,
}

impl ControlService {
    fn leader(&self) -> String {
        let leads = self.agent.group().leadership().borrow().leads;
        match leads {
            true => self.agent.address().to_string(),
            false => self.agent.group().leader_address().unwrap_or_default(),
        }
    }

    /// Executes an order, and records it. Only a server that certainly leads refuses it for good.
    async fn ordered<T>(
        &self,
        by: &Visitor,
        act: String,
        token: u64,
        carry_out: impl Future<Output = Result<T, RefusalKind>>,
    ) -> Result<T, RefusalKind> {
        if !self.agent.leads() {
            return Err(RefusalKind::NotControlLeader { leader: self.agent.group().leader_address() });
        }
        let outcome = match token {
            0 => Err(RefusalKind::BadOrder("an order has a token, drawn at random from 1".into())),
            _ => carry_out.await,
        };
        let outcome = match outcome {
            Err(why) if !why.is_for_now() => Err(self.surely(why).await),
            outcome => outcome,
        };
        let why_not = outcome.as_ref().err().map(RefusalKind::to_string);
        self.audit.note(by, act, why_not.as_deref());
        outcome
    }

    /// A deposed leader that does not know it yet would refuse by outdated state.
    async fn surely(&self, refusal: RefusalKind) -> RefusalKind {
        match self.agent.group().barrier().await {
            Ok(()) => refusal,
            Err(e) => RefusalKind::NotAgreed(e.to_string()),
        }
    }
}

/// Whether a server may be at this address.
///
/// # Errors
/// Why not, for people.
pub fn may_be_joined(address: &str) -> Result<(), String> {
    check_address(address)?;
    match address.len() > MAX_ADDRESS_BYTES || address.contains(|c: char| c.is_control() || c.is_whitespace())
    {
        true => {
            Err(format!("an address of {} bytes, or with blanks, is none: write host:port", address.len()))
        }
        false => Ok(()),
    }
}

/// A host name has at most 255 bytes.
const MAX_ADDRESS_BYTES: usize = 264;

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
                "{server} was forgotten (`paraft forget`): it can join again (--join), with another --data folder"
            ))));
        }
        let number = report.number;
        let reply = match self.agent.take_report(from_report(report)) {
            Err(ReportRefusal::Whole) => ReportReply { whole: true, ..refuse(String::new()) },
            Err(ReportRefusal::NotLeader) => refuse(String::new()),
            Err(ReportRefusal::Another(why)) => refuse(why),
            Ok(directives) => {
                visitor.inspect(|v| v.is(Rank::Server));
                ReportReply {
                    accepted: true,
                    whole: false,
                    number,
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
        let by = visitor(request.extensions())?;
        let address = request.into_inner().address;
        let leader = self.leader();
        let refuse = |why: String| JoinReply { leader: leader.clone(), why, ..JoinReply::default() };
        if !self.agent.group().leadership().borrow().leads {
            return Ok(Response::new(JoinReply { not_leader: true, ..refuse(NO_LEADER.into()) }));
        }
        if let Err(why) = may_be_joined(&address) {
            return Ok(Response::new(refuse(why)));
        }
        if let Err(why) = self.agent.may_join(&address).await {
            return Ok(Response::new(refuse(why)));
        }
        let act = format!("join of a server at {address}");
        let outcome = self.agent.propose(Command::Join { address }).await;
        let refused = match &outcome {
            Ok(Outcome::Refused(why)) => Some(why.to_string()),
            Err(why) => Some(why.clone()),
            Ok(_) => None,
        };
        self.audit.note(&by, act, refused.as_deref());
        let reply = match outcome {
            Ok(Outcome::Joined(server)) => JoinReply {
                accepted: true,
                server: server.0,
                fleet: self.agent.agreed.read(|s| s.fleet),
                shape: self.agent.shape().map(shape_to),
                ..refuse(String::new())
            },
            Ok(Outcome::Refused(why)) => refuse(why.to_string()),
            // Not a refusal: this server has lost its majority, and the next leader may admit the new one.
            Err(why) => JoinReply { not_leader: true, ..refuse(why) },
            Ok(Outcome::Done | Outcome::Submitted(_) | Outcome::Ended(_)) => {
                refuse("an answer of another kind".into())
            }
        };
        Ok(Response::new(reply))
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        let by = visitor(request.extensions())?;
        let DrainRequest { server, undo, token } = request.into_inner();
        let what = if undo { "drain taken back of" } else { "drain of" };
        let order = Order::Drain { server: ServerId(server), draining: !undo };
        let drained = self.agent.order(token, order);
        let outcome = self.ordered(&by, format!("{what} s{server}"), token, drained).await;
        Ok(Response::new(DrainReply { accepted: outcome.is_ok(), refused: outcome.err().map(Into::into) }))
    }

    async fn forget(&self, request: Request<ForgetRequest>) -> Result<Response<ForgetReply>, Status> {
        let by = visitor(request.extensions())?;
        let ForgetRequest { server, token } = request.into_inner();
        let server = ServerId(server);
        let forgotten = self.agent.forget(token, server);
        let outcome = self.ordered(&by, format!("forget {server}"), token, forgotten).await;
        Ok(Response::new(ForgetReply { accepted: outcome.is_ok(), refused: outcome.err().map(Into::into) }))
    }

    async fn abandon(&self, request: Request<AbandonRequest>) -> Result<Response<AbandonReply>, Status> {
        let by = visitor(request.extensions())?;
        let AbandonRequest { shard, accept_loss, token } = request.into_inner();
        let shard = JobShard::from_number(shard);
        let abandoned = self.agent.abandon(token, shard, accept_loss);
        let outcome = self.ordered(&by, format!("abandon {shard}"), token, abandoned).await;
        let (accepted, lost) = (outcome.is_ok(), outcome.as_ref().ok().cloned().unwrap_or_default());
        Ok(Response::new(AbandonReply { accepted, refused: outcome.err().map(Into::into), lost }))
    }

    async fn note_checkpoints(
        &self,
        request: Request<NoteCheckpointsRequest>,
    ) -> Result<Response<NoteCheckpointsReply>, Status> {
        let by = visitor(request.extensions())?;
        let request = request.into_inner();
        let leader = self.leader();
        let reply = |accepted, why: String| NoteCheckpointsReply { accepted, leader: leader.clone(), why };
        if !self.agent.group().leadership().borrow().leads {
            return Ok(Response::new(reply(false, NO_LEADER.into())));
        }
        let (job, folder) = (request.job, request.folder.clone());
        let named = self
            .agent
            .agreed
            .read(|s| s.jobs.iter().find(|(_, j)| j.founding() == job).map(|(_, j)| j.name.clone()));
        // An unknown job is refused below, for callers that may do this with any job.
        by.may(Need::Worker, &named.unwrap_or_default()).await?;
        let held = match checkpoints::held_in(request) {
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
        visitor(request.extensions())?.may(Need::Worker, &request.get_ref().job).await?;
        let refuse = |why: String| JoinGroupReply { leader: self.leader(), why, ..JoinGroupReply::default() };
        let leads = || self.agent.leads();
        Ok(Response::new(match leads() {
            false => refuse(NO_LEADER.into()),
            true => groups::join(&self.agent, request.into_inner(), leads).await.unwrap_or_else(
                |Refused { why, then }| JoinGroupReply {
                    give_up: then == Advice::GiveUp,
                    fix: then == Advice::Fix,
                    ..refuse(why)
                },
            ),
        }))
    }

    async fn group_heartbeat(
        &self,
        request: Request<GroupHeartbeatRequest>,
    ) -> Result<Response<GroupHeartbeatReply>, Status> {
        visitor(request.extensions())?.may(Need::Worker, &request.get_ref().job).await?;
        connections::mark(request.extensions(), Rank::Worker);
        let refuse = |why: String| GroupHeartbeatReply {
            leader: self.leader(),
            why,
            ..GroupHeartbeatReply::default()
        };
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

    async fn submit(&self, request: Request<SubmitRequest>) -> Result<Response<SubmitReply>, Status> {
        let by = visitor(request.extensions())?;
        let act = format!("submit of job `{}`", request.get_ref().name);
        by.may(Need::Submit, &request.get_ref().name)
            .await
            .inspect_err(|denied| self.audit.note(&by, &act, Some(denied.message())))?;
        let request = request.into_inner();
        let token = request.token;
        let outcome = self.ordered(&by, act, token, jobs::submit(&self.agent, request)).await;
        let (accepted, job) = (outcome.is_ok(), outcome.as_ref().copied().unwrap_or_default());
        Ok(Response::new(SubmitReply { accepted, job, refused: outcome.err().map(Into::into) }))
    }

    async fn end_job(&self, request: Request<EndJobRequest>) -> Result<Response<EndJobReply>, Status> {
        let by = visitor(request.extensions())?;
        let what = if request.get_ref().delete { "delete" } else { "stop" };
        let act = format!("{what} of job `{}`", request.get_ref().job);
        by.may(Need::Submit, &request.get_ref().job)
            .await
            .inspect_err(|denied| self.audit.note(&by, &act, Some(denied.message())))?;
        let request = request.into_inner();
        let token = request.token;
        let outcome = self.ordered(&by, act, token, jobs::end(&self.agent, request)).await;
        let (accepted, state) = (outcome.is_ok(), outcome.as_ref().map_or("", |state| state.name()).into());
        Ok(Response::new(EndJobReply { accepted, state, refused: outcome.err().map(Into::into) }))
    }

    async fn describe(&self, request: Request<DescribeRequest>) -> Result<Response<DescribeReply>, Status> {
        connections::mark(request.extensions(), Rank::Reader);
        let by = visitor(request.extensions())?;
        let mut all = describe::reply(&self.agent, self.leader());
        if !by.may_read_all() {
            all.keep_jobs(|name| by.sees(name));
        }
        Ok(Response::new(all))
    }
}

#[cfg(test)]
#[path = "control_tests.rs"]
mod tests;

//! The service that forms the fleet, and its wire types.
//!
//! - `convert`: reports, directives and settings; `describe`: the fleet as it is.
//! - `jobs`: those that come and go.
//! - `calls`, `join`: the other side, as a server asks it.

mod calls;
mod convert;
mod describe;
mod jobs;
mod join;

use super::{audit::Audit, groups, jobs as checkpoints, memory, rights::visitor};
use crate::{
    connections::{self, Rank},
    control::{Advice, Agent, Command, NotTaken, Outcome, Refused},
    raft::ReplicaId,
};
pub use calls::GrpcCalls;
pub(super) use convert::shape_to;
use convert::to_directive;
pub use convert::{from_directive, from_report, shape_of, to_report};
pub use join::ask_to_join;
use paraft_common::{JobShard, ServerId, config::ServerJob};
use paraft_proto::{
    AbandonReply, AbandonRequest, DescribeReply, DescribeRequest, DrainReply, DrainRequest, EndJobReply,
    EndJobRequest, ForgetReply, ForgetRequest, GroupHeartbeatReply, GroupHeartbeatRequest, HelloReply,
    HelloRequest, JoinGroupReply, JoinGroupRequest, JoinReply, JoinRequest, NoteCheckpointsReply,
    NoteCheckpointsRequest, ReportReply, ReportRequest, RoomReply, RoomRequest, SubmitReply, SubmitRequest,
    control_server::Control, limits::MAX_JOB_BYTES,
};
use paraft_tls::Need;
use std::sync::Arc;
use tonic::{Request, Response, Status};

/// The service.
#[derive(Clone)]
pub struct ControlService {
    /// This server's part.
    pub agent: Arc<Agent>,
    /// What is asked of the fleet by people, and of new servers.
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
        let number = report.number;
        let reply = match self.agent.take_report(from_report(report)) {
            Err(NotTaken::Whole) => ReportReply { whole: true, ..refuse(String::new()) },
            Err(NotTaken::NotLeader) => refuse(String::new()),
            Err(NotTaken::Another(why)) => refuse(why),
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
        if address.len() > 256 || !address.contains(':') {
            return Ok(Response::new(refuse(format!("`{address}` is no address (write host:port)"))));
        }
        if let Err(why) = self.agent.may_join(&address).await {
            return Ok(Response::new(refuse(why)));
        }
        let act = format!("join of a server at {address}");
        let outcome = self.agent.propose(Command::Join { address }).await;
        let refused = match &outcome {
            Ok(Outcome::Refused(why)) | Err(why) => Some(why.as_str()),
            Ok(_) => None,
        };
        self.audit.note(&by, act, refused);
        let reply = match outcome {
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
            Ok(Outcome::Done | Outcome::Submitted(_)) => refuse("an answer of another kind".into()),
        };
        Ok(Response::new(reply))
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        let by = visitor(request.extensions())?;
        let request = request.into_inner();
        let leader = self.leader();
        let reply = |accepted, why: String| DrainReply { accepted, leader: leader.clone(), why };
        if !self.agent.group().leadership().borrow().leads {
            return Ok(Response::new(reply(false, NO_LEADER.into())));
        }
        let command = Command::Drain { server: ServerId(request.server), draining: !request.undo };
        let what = if request.undo { "drain taken back of" } else { "drain of" };
        let refused = match self.agent.propose(command).await {
            Ok(Outcome::Refused(why)) | Err(why) => Some(why),
            Ok(_) => None,
        };
        self.audit.note(&by, format!("{what} s{}", request.server), refused.as_deref());
        Ok(Response::new(reply(refused.is_none(), refused.unwrap_or_default())))
    }

    async fn forget(&self, request: Request<ForgetRequest>) -> Result<Response<ForgetReply>, Status> {
        let by = visitor(request.extensions())?;
        let server = ServerId(request.into_inner().server);
        let leader = self.leader();
        let reply = |accepted, why: String| ForgetReply { accepted, leader: leader.clone(), why };
        let outcome = self.agent.forget(server).await;
        if let Ok(()) | Err(Some(_)) = &outcome {
            self.audit.note(
                &by,
                format!("forget {server}"),
                outcome.as_ref().err().and_then(Option::as_deref),
            );
        }
        Ok(Response::new(match outcome {
            Ok(()) => reply(true, String::new()),
            Err(why) => reply(false, why.unwrap_or_else(|| NO_LEADER.into())),
        }))
    }

    async fn abandon(&self, request: Request<AbandonRequest>) -> Result<Response<AbandonReply>, Status> {
        let by = visitor(request.extensions())?;
        let AbandonRequest { shard, accept_loss } = request.into_inner();
        let leader = self.leader();
        let reply = |accepted, why: String| AbandonReply { accepted, leader: leader.clone(), why };
        let shard = JobShard::from_number(shard);
        let outcome = self.agent.abandon(shard, accept_loss).await;
        if let Ok(_) | Err(Some(_)) = &outcome {
            self.audit.note(
                &by,
                format!("abandon {shard}"),
                outcome.as_ref().err().and_then(Option::as_deref),
            );
        }
        Ok(Response::new(match outcome {
            Ok(given_up) => reply(true, given_up),
            Err(why) => reply(false, why.unwrap_or_else(|| NO_LEADER.into())),
        }))
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
        // One that nobody knows any more is refused below, to those who may do as much with any.
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
        let leader = self.leader();
        let reply = |accepted, why, job| SubmitReply { accepted, leader: leader.clone(), why, job };
        if !self.agent.leads() {
            return Ok(Response::new(reply(false, NO_LEADER.into(), 0)));
        }
        let outcome = jobs::submit(&self.agent, request.into_inner()).await;
        self.audit.note(&by, act, outcome.as_ref().err().map(String::as_str));
        Ok(Response::new(match outcome {
            Ok(job) => reply(true, String::new(), job),
            Err(why) => reply(false, why, 0),
        }))
    }

    async fn end_job(&self, request: Request<EndJobRequest>) -> Result<Response<EndJobReply>, Status> {
        let by = visitor(request.extensions())?;
        let what = if request.get_ref().delete { "delete" } else { "stop" };
        let act = format!("{what} of job `{}`", request.get_ref().job);
        by.may(Need::Submit, &request.get_ref().job)
            .await
            .inspect_err(|denied| self.audit.note(&by, &act, Some(denied.message())))?;
        let leader = self.leader();
        let reply = |accepted, why, state: &str| EndJobReply {
            accepted,
            leader: leader.clone(),
            why,
            state: state.into(),
        };
        if !self.agent.leads() {
            return Ok(Response::new(reply(false, NO_LEADER.into(), "")));
        }
        let outcome = jobs::end(&self.agent, request.into_inner()).await;
        self.audit.note(&by, act, outcome.as_ref().err().map(String::as_str));
        Ok(Response::new(match outcome {
            Ok(state) => reply(true, String::new(), state),
            Err(why) => reply(false, why, ""),
        }))
    }

    async fn describe(&self, request: Request<DescribeRequest>) -> Result<Response<DescribeReply>, Status> {
        connections::mark(request.extensions(), Rank::Reader);
        let by = visitor(request.extensions())?;
        let mut all = describe::reply(&self.agent, self.leader());
        if !by.sees_all() {
            all.keep_jobs(|name| by.sees(name));
        }
        Ok(Response::new(all))
    }
}

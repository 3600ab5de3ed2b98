//! A server's requests to the other servers of its fleet. `rpc` transports them.

use super::{
    plan::{Directive, Report},
    state::Shape,
};
use crate::{admission::Answer, raft::ReplicaId};
use futures::future::BoxFuture;
use paraft_common::{JobShard, ServerId};
use std::collections::BTreeSet;

/// A server's description of itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hello {
    /// Its id.
    pub server: ServerId,
    /// Its replica of the control group.
    pub node: ReplicaId,
    /// Its fleet; 0: none yet.
    pub fleet: u64,
    /// That fleet's shape, or that of its start options.
    pub shape: Option<Shape>,
    /// The control group's members, as it knows them.
    pub members: BTreeSet<ReplicaId>,
}

/// A report to send: the difference to the one that the leader has, or all of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SentReport {
    /// The reporting server.
    pub server: ServerId,
    /// Drawn at random.
    pub number: u64,
    /// The number of the report that this one is a difference to; 0: it is whole.
    pub since: u64,
    /// All of it, or the replicas that changed.
    pub report: Report,
    /// Shards of which nothing is left there.
    pub gone: Vec<JobShard>,
}

/// The answer to a report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReportAnswer {
    /// The control group's leader has taken it.
    pub accepted: bool,
    /// The leader's address, if known there.
    pub leader: Option<String>,
    /// The leader does not have the report that this is a difference to: send all of it.
    pub whole: bool,
    /// Number of the report that the leader has; 0: none.
    pub number: u64,
    /// Why the reporter cannot take part; empty: nothing, or the answering server does not lead.
    pub why: String,
    /// Generation of the agreed state.
    pub generation: u64,
    /// Directives for the reporter.
    pub directives: Vec<Directive>,
}

/// Requests to the server at an address. An error says why there is no answer.
pub trait Calls: Send + Sync {
    /// Asks for its identity.
    fn hello<'a>(&'a self, address: &'a str) -> BoxFuture<'a, Result<Hello, String>>;

    /// Reports a server of `fleet`.
    fn report<'a>(
        &'a self,
        address: &'a str,
        fleet: u64,
        told: &'a SentReport,
    ) -> BoxFuture<'a, Result<ReportAnswer, String>>;

    /// Asks whether `server` has room for this job (in its form for the log).
    fn room<'a>(
        &'a self,
        address: &'a str,
        server: ServerId,
        job: &'a str,
    ) -> BoxFuture<'a, Result<Answer, String>>;
}

//! What a server asks the other servers of its fleet. How the questions travel is `rpc`'s.

use super::{
    plan::{Directive, Report},
    state::Shape,
};
use crate::{admission::Answer, raft::ReplicaId};
use futures::future::BoxFuture;
use paraft_common::{JobShard, ServerId};
use std::collections::BTreeSet;

/// Who a server is, in its own words.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hello {
    /// Its id.
    pub server: ServerId,
    /// Its replica of the control group.
    pub node: ReplicaId,
    /// The fleet that it belongs to; 0: none yet.
    pub fleet: u64,
    /// That fleet's settings, or those that it was started with.
    pub shape: Option<Shape>,
    /// The control group's members, as it knows them.
    pub members: BTreeSet<ReplicaId>,
}

/// A report as it is told: what has changed since the one that the leader has, or all.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Told {
    /// Whose.
    pub server: ServerId,
    /// Drawn at random.
    pub number: u64,
    /// The number of the report that this is told upon; 0: it is whole.
    pub since: u64,
    /// All of it, or what has changed of the replicas.
    pub report: Report,
    /// Of these shards nothing is there any more.
    pub gone: Vec<JobShard>,
}

/// What becomes of a report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reported {
    /// The control group's leader has taken it.
    pub accepted: bool,
    /// Where the leader is, if that is known there.
    pub leader: Option<String>,
    /// It was told upon another than the leader has: tell all of it.
    pub whole: bool,
    /// Of the report that the leader has; 0: it has none.
    pub number: u64,
    /// What keeps the reporter out; empty: nothing, or who was asked does not lead.
    pub why: String,
    /// Of what is agreed on.
    pub generation: u64,
    /// What the reporter is to do.
    pub directives: Vec<Directive>,
}

/// Questions to the server at an address. An error says why there is no answer.
pub trait Calls: Send + Sync {
    /// Who are you?
    fn hello<'a>(&'a self, address: &'a str) -> BoxFuture<'a, Result<Hello, String>>;

    /// This is how a server of `fleet` is.
    fn report<'a>(
        &'a self,
        address: &'a str,
        fleet: u64,
        told: &'a Told,
    ) -> BoxFuture<'a, Result<Reported, String>>;

    /// Has `server`, which is there, room for this job (as it goes to the log)?
    fn room<'a>(
        &'a self,
        address: &'a str,
        server: ServerId,
        job: &'a str,
    ) -> BoxFuture<'a, Result<Answer, String>>;
}

//! What a server asks the other servers of its fleet. How the questions travel is `rpc`'s.

use super::{
    plan::{Directive, Report},
    state::Shape,
};
use crate::{admission::Answer, raft::ReplicaId};
use futures::future::BoxFuture;
use paraft_common::ServerId;
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

/// What becomes of a report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reported {
    /// The control group's leader has taken it.
    pub accepted: bool,
    /// Where the leader is, if that is known there.
    pub leader: Option<String>,
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

    /// This is how `server` of `fleet` is.
    fn report<'a>(
        &'a self,
        address: &'a str,
        fleet: u64,
        server: ServerId,
        report: &'a Report,
    ) -> BoxFuture<'a, Result<Reported, String>>;

    /// Has `server`, which is there, room for this job (as it goes to the log)?
    fn room<'a>(
        &'a self,
        address: &'a str,
        server: ServerId,
        job: &'a str,
    ) -> BoxFuture<'a, Result<Answer, String>>;
}

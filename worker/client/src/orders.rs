//! A user's orders to a fleet: requests to one server, and its answers.
//!
//! `Err` says by its advice whether the refusal is final. If the server was not reached or did not answer, it may
//! still carry out the order; `paraft_fleet::orders` repeats the order with the same token.

use crate::connect::{Transport, channel, shards, words};
use paraft_common::{JobShard, ServerId};
use paraft_proto::{
    AbandonRequest, Advice, DrainRequest, EndJobRequest, ForgetRequest, PROTOCOL, Refused, SaveRequest,
    SubmitRequest, SwitchModeRequest, WireKind, control_client::ControlClient,
};
use std::time::Duration;
use tonic::{Code, Response, Status, transport::Channel};

/// An order to the leader of the control group.
#[derive(Clone, Debug, PartialEq)]
pub enum Order {
    /// Empty a server, or fill it again.
    Drain {
        /// Which server.
        server: ServerId,
        /// Fill it again.
        undo: bool,
    },
    /// A server will not return.
    Forget {
        /// Which server.
        server: ServerId,
    },
    /// Give up a shard's state.
    Abandon {
        /// Which shard.
        shard: JobShard,
        /// Without it the control group does nothing; its refusal says what would be lost.
        accept_loss: bool,
    },
    /// Create a job's shards. Its token is the order's.
    Submit(SubmitRequest),
    /// Stop a job where it is, or delete all that the servers hold of it.
    EndJob {
        /// Its name.
        job: String,
        /// Delete it.
        delete: bool,
    },
}

/// The control group's answer to a completed order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// The number of a submitted job.
    pub job: u32,
    /// The former state of an ended job, or the former content of a shard that was given up.
    pub was: String,
}

/// Sends one server an order. Each attempt uses the same `token`.
///
/// # Errors
/// The server refuses, or does not answer.
pub async fn order(address: &str, order: &Order, token: u64, within: Duration) -> Result<Done, Refused> {
    let asking = async |channel| {
        let mut c = ControlClient::new(channel);
        let nothing = Done::default();
        let (accepted, refused, done) = match order.clone() {
            Order::Drain { server, undo } => {
                let r = c.drain(DrainRequest { server: server.0, undo, token }).await?.into_inner();
                (r.accepted, r.refused, nothing)
            }
            Order::Forget { server } => {
                let r = c.forget(ForgetRequest { server: server.0, token }).await?.into_inner();
                (r.accepted, r.refused, nothing)
            }
            Order::Abandon { shard, accept_loss } => {
                let request = AbandonRequest { shard: shard.number(), accept_loss, token };
                let r = c.abandon(request).await?.into_inner();
                (r.accepted, r.refused, Done { was: r.lost, ..nothing })
            }
            Order::Submit(request) => {
                let r = c.submit(SubmitRequest { token, ..request }).await?.into_inner();
                (r.accepted, r.refused, Done { job: r.job, ..nothing })
            }
            Order::EndJob { job, delete } => {
                let r = c.end_job(EndJobRequest { job, delete, token }).await?.into_inner();
                (r.accepted, r.refused, Done { was: r.state, ..nothing })
            }
        };
        let unsaid = || Refused::unheard("it did not take the order, and does not say why");
        Ok(if accepted { Ok(done) } else { Err(refused.unwrap_or_else(unsaid)) })
    };
    asked(address, within, asking).await
}

/// Asks the leader of a job's shard 0 to have one of its workers write a checkpoint now; returns which worker.
///
/// # Errors
/// The server refuses, or does not answer.
pub async fn save(address: &str, job: &str, within: Duration) -> Result<u32, Refused> {
    let request = SaveRequest { protocol: PROTOCOL, job: job.into() };
    let asking = async |channel| {
        let reply = shards(channel).save(request.clone()).await.map(Response::into_inner)?;
        Ok(reply.refused.map_or(Ok(reply.worker), Err))
    };
    asked(address, within, asking).await
}

/// Asks a server to switch the mode of a shard that it leads. `number`: 0 for the next switch. Returns the number
/// of the last switch in effect, and its mode.
///
/// # Errors
/// The server refuses, or does not answer.
pub async fn switch_mode(
    address: &str,
    request: SwitchModeRequest,
    within: Duration,
) -> Result<(u64, String), Refused> {
    let asking = async |channel| {
        let reply = shards(channel).switch_mode(request.clone()).await.map(Response::into_inner)?;
        Ok(reply.refused.map_or(Ok((reply.number, reply.mode)), Err))
    };
    asked(address, within, asking).await
}

pub(crate) async fn asked<T>(
    address: &str,
    within: Duration,
    ask: impl AsyncFnOnce(Channel) -> Result<Result<T, Refused>, Status>,
) -> Result<T, Refused> {
    let asking = async {
        let channel = channel(address, Transport::Auto).await.map_err(Refused::unheard)?;
        ask(channel).await.map_err(|status| refused(address, &status))?
    };
    let late = |_| Err(Refused::unheard(format!("no answer within {within:?}")));
    tokio::time::timeout(within, asking).await.unwrap_or_else(late)
}

/// Converts a call's status. A server uses a status only to refuse an unauthorized or unknown request; any other
/// status is the connection's.
pub(crate) fn refused(address: &str, status: &Status) -> Refused {
    let message = words(address, status);
    let of_the_server = std::error::Error::source(status).is_none();
    match status.code() {
        Code::PermissionDenied | Code::Unauthenticated | Code::Unimplemented | Code::InvalidArgument
            if of_the_server =>
        {
            let kind = match status.code() {
                Code::PermissionDenied | Code::Unauthenticated => WireKind::Denied,
                _ => WireKind::Unspecified,
            };
            Refused { advice: Advice::Fix as i32, kind: kind as i32, message, ..Refused::default() }
        }
        _ => Refused::unheard(message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_of_a_server_is_final_by_its_code_alone() {
        for (status, is_final) in [
            (Status::permission_denied("not yours"), true),
            (Status::unauthenticated("who?"), true),
            (Status::unimplemented("no such method"), true),
            (Status::unavailable("denied: not yours"), false),
            (Status::unknown("transport error"), false),
            (Status::cancelled("goes"), false),
            (Status::internal("h2 protocol error"), false),
            (Status::deadline_exceeded("late"), false),
        ] {
            assert_eq!(refused("h:1", &status).is_final(), is_final, "{status:?}");
        }
    }

    #[test]
    fn status_of_the_connection_is_never_final() {
        for code in
            [Code::PermissionDenied, Code::Unauthenticated, Code::Unimplemented, Code::InvalidArgument]
        {
            let mut status = Status::new(code, "the connection broke");
            status.set_source(std::sync::Arc::new(std::io::Error::other("h2")));
            assert!(!refused("h:1", &status).is_final(), "{status:?}");
        }
    }
}

//! Which request needs which role.
//!
//! The table is complete: what is not in it is refused. Where a role is for jobs, a request passes here if it is for some job, and
//! its handler asks again once it knows for which ([`Visitor::may`]).

use super::audit::Audit;
use crate::connections::{self, Visitor, WatchedBody};
use http::{Request, Response};
use paraft_proto::services::{APPEND, CALL, CHECKPOINT, EXCHANGE, READ};
use paraft_tls::{Need, access::DENIED};
use std::{
    convert::Infallible,
    sync::Arc,
    task::{Context, Poll},
};
use tonic::{Status, body::Body};
use tower::{Layer, Service};

/// Each method, and the role that it needs.
pub const NEEDS: &[(&str, Need)] = &[
    ("/paraft.v1.Control/Hello", Need::Peer),
    ("/paraft.v1.Control/Report", Need::Peer),
    ("/paraft.v1.Control/Join", Need::Peer),
    ("/paraft.v1.Control/Room", Need::Peer),
    ("/paraft.v1.Control/Drain", Need::Operate),
    ("/paraft.v1.Control/Forget", Need::Admin),
    ("/paraft.v1.Control/Abandon", Need::Admin),
    ("/paraft.v1.Control/Submit", Need::Submit),
    ("/paraft.v1.Control/EndJob", Need::Submit),
    ("/paraft.v1.Control/NoteCheckpoints", Need::Worker),
    ("/paraft.v1.Control/JoinGroup", Need::Worker),
    ("/paraft.v1.Control/GroupHeartbeat", Need::Worker),
    ("/paraft.v1.Control/Describe", Need::Any),
    (EXCHANGE, Need::Worker),
    (CHECKPOINT, Need::Worker),
    (READ, Need::Reader),
    ("/paraft.v1.Shards/SwitchMode", Need::Submit),
    ("/paraft.v1.Shards/Save", Need::Submit),
    ("/paraft.v1.Shards/Status", Need::Any),
    (CALL, Need::Peer),
    (APPEND, Need::Peer),
];

/// Administrative acts: whoever asks for one, also in vain, is written down.
const ACTS: [&str; 8] = ["Join", "Drain", "Forget", "Abandon", "Submit", "EndJob", "SwitchMode", "Save"];

/// What a method needs; `None`: there is no such method.
pub fn need_of(path: &str) -> Option<Need> {
    NEEDS.iter().find(|(p, _)| *p == path).map(|(_, need)| *need)
}

/// What who asked for it is told.
fn refusal(visitor: &Visitor, need: Need) -> Status {
    Status::permission_denied(format!(
        "{DENIED}: this needs the role {need}, and it is of {}",
        visitor.rights()
    ))
}

impl Visitor {
    /// Whether it may do this with a job.
    ///
    /// # Errors
    /// It may not; it was noted and held for a while.
    pub async fn may(&self, need: Need, job: &str) -> Result<(), Status> {
        if self.rights().are_enough_for(need, Some(job)) {
            return Ok(());
        }
        // Whether there is such a job it does not hear.
        let shown: String = job.chars().take(100).collect();
        self.denied(&format!("job `{}`", shown.escape_debug()), need).await;
        Err(refusal(self, need))
    }

    /// Whether it may look at a job, without a word about it.
    pub fn sees(&self, job: &str) -> bool {
        self.rights().are_enough_for(Need::Reader, Some(job)) || self.sees_all()
    }

    /// Whether it may look at whatever there is.
    pub fn sees_all(&self) -> bool {
        self.rights().are_for_all(Need::Reader) || self.rights().are_for_all(Need::Peer)
    }
}

/// Who made a request.
///
/// # Errors
/// Nobody of whom the door knows.
pub fn visitor(extensions: &http::Extensions) -> Result<Visitor, Status> {
    connections::of(extensions).ok_or_else(|| Status::unauthenticated("nobody knows who asks"))
}

/// Puts the table before a router.
#[derive(Clone)]
pub struct Guard(pub Arc<Audit>);

impl<S> Layer<S> for Guard {
    type Service = Guarding<S>;

    fn layer(&self, inner: S) -> Guarding<S> {
        Guarding(inner, self.0.clone())
    }
}

/// See [`Guard`].
#[derive(Clone)]
pub struct Guarding<S>(S, Arc<Audit>);

impl<S> Service<Request<Body>> for Guarding<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = futures::future::BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let path = request.uri().path();
        let refused = match (need_of(path), visitor(request.extensions())) {
            (None, _) => Some(Err(Status::unimplemented("no such method"))),
            (_, Err(nobody)) => Some(Err(nobody)),
            (Some(need), Ok(visitor)) if !visitor.rights().are_enough_for(need, None) => {
                Some(Ok((visitor, need, path.to_string())))
            }
            _ => None,
        };
        let audit = self.1.clone();
        match refused {
            None => {
                let watched = need_of(path).zip(connections::of(request.extensions()));
                // Answers to other servers have times of their own.
                let Some((need, visitor)) = watched.filter(|(need, _)| *need != Need::Peer) else {
                    return Box::pin(self.0.call(request));
                };
                // The service that was found ready takes it, and leaves a copy.
                let mut inner = self.0.clone();
                std::mem::swap(&mut inner, &mut self.0);
                Box::pin(async move {
                    let answer = match need {
                        Need::Any | Need::Reader => visitor.answer_question().await,
                        _ => visitor.answer(),
                    };
                    Ok(inner.call(request).await?.map(|body| WatchedBody::of(body, answer)))
                })
            }
            Some(refused) => Box::pin(async move {
                let status = match refused {
                    Err(status) => status,
                    Ok((visitor, need, path)) => {
                        let refusal = refusal(&visitor, need);
                        if path.rsplit('/').next().is_some_and(|method| ACTS.contains(&method)) {
                            audit.note(
                                &visitor,
                                path.trim_start_matches("/paraft.v1."),
                                Some(refusal.message()),
                            );
                        }
                        visitor.denied(&path, need).await;
                        refusal
                    }
                };
                Ok(status.into_http())
            }),
        }
    }
}

//! The role that each request needs.
//!
//! The table is complete: any other method is refused. If a role is limited to jobs, a request passes here if
//! the role covers some job. Its handler checks again once it knows the job ([`Visitor::may`]).

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
    ("/paraft.v1.Shards/ReadRows", Need::Reader),
    ("/paraft.v1.Shards/ReadVersion", Need::Reader),
    ("/paraft.v1.Shards/EditRows", Need::Submit),
    ("/paraft.v1.Shards/SwitchMode", Need::Submit),
    ("/paraft.v1.Shards/Save", Need::Submit),
    ("/paraft.v1.Shards/Status", Need::Any),
    (CALL, Need::Peer),
    (APPEND, Need::Peer),
];

/// Administrative acts: each request for one is recorded, even a refused one.
const ADMINISTRATIVE_METHODS: [&str; 9] =
    ["Join", "Drain", "Forget", "Abandon", "Submit", "EndJob", "SwitchMode", "Save", "EditRows"];

/// The need of a method; `None`: there is no such method.
pub fn need_of(path: &str) -> Option<Need> {
    NEEDS.iter().find(|(p, _)| *p == path).map(|(_, need)| *need)
}

/// The refusal for the caller.
fn refusal(visitor: &Visitor, need: Need) -> Status {
    Status::permission_denied(format!(
        "{DENIED}: this needs the role {need}, and it is of {}",
        visitor.rights()
    ))
}

impl Visitor {
    /// Checks whether the caller may do this with a job.
    ///
    /// # Errors
    /// It may not; this was logged, and its connection held for a while.
    pub async fn may(&self, need: Need, job: &str) -> Result<(), Status> {
        if self.rights().are_enough_for(need, Some(job)) {
            return Ok(());
        }
        // The caller must not learn whether there is such a job.
        let shown: String = job.chars().take(100).collect();
        self.denied(&format!("job `{}`", shown.escape_debug()), need).await;
        Err(refusal(self, need))
    }

    /// Whether the caller may read of a job; logs nothing.
    pub fn sees(&self, job: &str) -> bool {
        self.rights().are_enough_for(Need::Reader, Some(job)) || self.may_read_all()
    }

    /// Whether the caller may read of all jobs.
    pub fn may_read_all(&self) -> bool {
        self.rights().are_for_all(Need::Reader) || self.rights().are_for_all(Need::Peer)
    }
}

/// The caller of a request.
///
/// # Errors
/// The door does not know the caller.
pub fn visitor(extensions: &http::Extensions) -> Result<Visitor, Status> {
    connections::of(extensions).ok_or_else(|| Status::unauthenticated("the peer has no identity"))
}

/// Puts the table of needs before a router, with the record of administrative requests, if the process keeps one.
#[derive(Clone)]
pub struct RightsLayer(pub Option<Arc<Audit>>);

impl<S> Layer<S> for RightsLayer {
    type Service = RightsService<S>;

    fn layer(&self, inner: S) -> RightsService<S> {
        RightsService(inner, self.0.clone())
    }
}

/// See [`RightsLayer`].
#[derive(Clone)]
pub struct RightsService<S>(S, Option<Arc<Audit>>);

impl<S> Service<Request<Body>> for RightsService<S>
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
            (_, Err(unknown)) => Some(Err(unknown)),
            (Some(need), Ok(visitor)) if !visitor.rights().are_enough_for(need, None) => {
                Some(Ok((visitor, need, path.to_string())))
            }
            _ => None,
        };
        let audit = self.1.clone();
        match refused {
            None => {
                let watched = need_of(path).zip(connections::of(request.extensions()));
                // Answers to other servers have timeouts of their own.
                let Some((need, visitor)) = watched.filter(|(need, _)| *need != Need::Peer) else {
                    return Box::pin(self.0.call(request));
                };
                // The ready service takes the request, and leaves a clone.
                let mut inner = self.0.clone();
                std::mem::swap(&mut inner, &mut self.0);
                Box::pin(async move {
                    let answer = match need {
                        Need::Any | Need::Reader => visitor.answer_request().await,
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
                        if let Some(audit) = audit
                            && path
                                .rsplit('/')
                                .next()
                                .is_some_and(|method| ADMINISTRATIVE_METHODS.contains(&method))
                        {
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

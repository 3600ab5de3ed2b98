//! Tests of `control`.

use super::*;
use crate::control::tests::an_agent;
use paraft_store::RealDisk;
use std::time::Duration;

#[tokio::test]
async fn nobody_refuses_finally_without_a_majority() {
    let scratch = tempfile::tempdir().expect("a folder");
    let calls = Box::new(GrpcCalls::new(paraft_tls::Access::Insecure));
    // Its control group is not founded, so nobody leads it.
    let agent = an_agent(scratch.path(), (Duration::from_secs(10), calls), Arc::default()).await;
    let audit = Arc::new(Audit::of(Arc::new(RealDisk), scratch.path()));
    let service = ControlService { agent, audit };
    let refused = service.surely(RefusalKind::NoSuchServer(ServerId(7))).await;
    assert!(matches!(refused, RefusalKind::NotAgreed(_)) && refused.is_for_now(), "{refused}");
}

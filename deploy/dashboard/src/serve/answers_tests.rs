//! Tests of `answers`.

use super::{
    super::{MAX_LAG, Token},
    *,
};
use crate::local::LocalControl;
use parking_lot::Mutex;
use std::time::Instant;
use tokio::sync::{Notify, Semaphore};

#[tokio::test]
async fn pages_that_are_open_have_a_bound() {
    let shared = Arc::new(Shared {
        sweep: None,
        here: LocalControl::default(),
        reads: Arc::new(Semaphore::new(1)),
        token: Token::new("0123456789abcdef").expect("long enough"),
        history: Mutex::default(),
        logged: Mutex::new((0, Instant::now())),
        news: broadcast::channel(MAX_LAG).0,
        listed: Vec::new(),
        wakes: Notify::new(),
    });
    let pages: Vec<Response> = (0..MAX_PAGES).map(|_| live(&shared)).collect();
    assert!(pages.iter().all(|page| page.status() == StatusCode::OK));
    assert_eq!(live(&shared).status(), StatusCode::SERVICE_UNAVAILABLE);
    drop(pages);
    assert_eq!(live(&shared).status(), StatusCode::OK);
}

//! Tests of `answers`.

use super::super::{Connections, Origin};
use super::*;
use futures::{StreamExt, stream};
use http_body::Body as _;
use paraft_tls::Access;

/// A connection of a client.
fn visitor(connections: &Arc<Connections>) -> Visitor {
    connections.admit(Origin::Here).expect("there is room")
}

#[tokio::test]
async fn a_connection_whose_client_takes_nothing_is_closed() {
    let connections = Connections::new(|| 10, Access::Insecure);
    let (takes, stalls, idles) = (visitor(&connections), visitor(&connections), visitor(&connections));
    let parts = || stream::iter([1, 2]).chain(stream::pending());
    let (mut taken, mut stalled, mut idle) =
        (watched(parts(), &takes), watched(parts(), &stalls), watched(parts(), &idles));
    assert_eq!((taken.next().await, stalled.next().await), (Some(1), Some(1)));
    // The transport has asked for more than there is: the answer waits for this server.
    while futures::poll!(idle.next()).is_ready() {}
    while futures::poll!(taken.next()).is_ready() {}
    connections.close_stalled(Duration::from_secs(3600));
    assert_eq!(connections.counts().stalled, 0, "an hour has not passed");
    for _ in 0..2 {
        connections.close_stalled(Duration::ZERO);
        assert_eq!([&takes, &stalls, &idles].map(Visitor::is_shed), [false, true, false]);
        assert_eq!(connections.counts().stalled, 1);
    }
    drop((taken, stalled, idle));
    assert!(connections.answers.open.lock().is_empty(), "answers leave the table");
}

#[tokio::test]
async fn an_answer_lasts_until_its_last_byte_is_sent() {
    let connections = Connections::new(|| 10, Access::Insecure);
    let visitor = visitor(&connections);
    let mut body = WatchedBody::of(Body::new(String::from("weights")), visitor.answer());
    let part = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await;
    let bytes = part.expect("a part").expect("no error").into_data().expect("data");
    drop(body);
    assert_eq!(&bytes[..], b"weights");
    connections.close_stalled(Duration::ZERO);
    assert!(visitor.is_shed(), "the transport still has its bytes");
    drop(bytes);
    assert!(connections.answers.open.lock().is_empty());
}

#[tokio::test]
async fn questions_of_a_certificate_have_a_bound() {
    let connections = Connections::new(|| 10, Access::Insecure);
    let visitor = visitor(&connections);
    // tokio suspends a task that takes much at once, even if there is more.
    let asks = tokio::task::unconstrained(async {
        let mut asked = Vec::new();
        for _ in 0..MAX_OPEN_ANSWERS {
            asked.push(visitor.answer_request().await);
        }
        let mut next = std::pin::pin!(visitor.answer_request());
        assert!(futures::poll!(&mut next).is_pending(), "its turn has not come");
        let other = visitor.connections.answers.question("another certificate".into());
        assert!(futures::poll!(std::pin::pin!(other)).is_ready(), "it has its own");
        asked.pop();
        next.await;
    });
    asks.await;
}

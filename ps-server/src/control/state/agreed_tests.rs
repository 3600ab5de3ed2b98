//! Tests of `agreed`.

use super::*;
use crate::control::state::Shape;
use paraft_common::{Durability, ServerId};
use std::collections::BTreeMap;

fn found(agreed: &Agreed) {
    let shape = Shape { shards: 1, replicas: 1, durability: Durability::QuorumDisk };
    let servers = BTreeMap::from([(ServerId(0), "a:1".to_string())]);
    agreed.apply(&Command::Found { fleet: 7, shape, servers }).expect("it is new");
}

fn join(agreed: &Agreed, address: &str) {
    agreed.apply(&Command::Join { address: address.into() }).expect("applied");
}

#[test]
fn agreed_state_stays_readable_while_it_is_learned_again() {
    let agreed = Agreed::default();
    found(&agreed);
    join(&agreed, "b:1");
    let servers = |agreed: &Agreed| agreed.read(|s| s.servers.len());
    for _ in 0..2 {
        agreed.learn_again(); // each failed start of the replica
        assert_eq!((servers(&agreed), agreed.get().fleet), (2, 7));
    }
    found(&agreed);
    assert_eq!(servers(&agreed), 2, "the log has not brought as much yet");
    assert_eq!(
        format::read(&agreed.image().head).expect("its own").servers.len(),
        1,
        "a snapshot has what is applied"
    );
    join(&agreed, "b:1");
    join(&agreed, "c:1");
    assert_eq!(servers(&agreed), 3);
    // A leader has applied everything.
    agreed.learn_again();
    found(&agreed);
    agreed.is_current();
    assert_eq!(servers(&agreed), 1);
}

//! Replicas with the same log are equal, bit for bit, including those that started from a snapshot.

use crate::shard::simulation::cluster::Cluster;

/// Compares every replica with the true state at its index.
pub fn replicas(cluster: &Cluster) {
    let g = cluster.0.lock();
    for (i, n) in g.nodes.iter().enumerate() {
        let digest = n.shard.cut().digest();
        assert_eq!(
            digest,
            g.digests[n.applied],
            "node {i} differs at entry {} of {}",
            n.applied,
            g.committed.len()
        );
    }
}

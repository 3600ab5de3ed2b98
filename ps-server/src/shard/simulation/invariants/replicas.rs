//! Replicas with the same log are the same, bit for bit, also those that began from a snapshot.

use crate::shard::simulation::cluster::Cluster;

/// Compares every replica with what the truth was at its index.
pub fn replicas(cluster: &Cluster) {
    let g = cluster.0.lock();
    for (i, n) in g.nodes.iter().enumerate() {
        let digest = n.shard.image().digest();
        assert_eq!(
            digest,
            g.digests[n.applied],
            "node {i} differs at entry {} of {}",
            n.applied,
            g.committed.len()
        );
    }
}

//! Where the log holds what workers pull, it holds what they got.

use super::History;
use crate::shard::Shard;

impl History {
    pub(super) fn recorded_pulls_are_what_workers_got(&self, truth: &Shard) {
        let Some(conf) = truth.configured() else { return };
        for ((worker, bucket), (version, got)) in &self.got {
            let data = conf.buckets[*bucket].image();
            let Some((recorded, weights)) = data.kept.get(worker).and_then(|k| k.pulled.clone()) else {
                continue;
            };
            // It may have pulled again, and not have read the answer. What it has read was in the log before.
            assert!(
                recorded >= *version,
                "{worker} got bucket {bucket} at {version}, the log has {recorded}"
            );
            if recorded == *version {
                let got = Self::weights(got);
                let same = got.iter().zip(weights.iter()).all(|(g, w)| -g == *w);
                assert!(same, "{worker} got other weights of bucket {bucket} at {version} than the log says");
            }
        }
    }
}

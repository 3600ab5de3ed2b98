//! If the log records pulls, it records the weights that the workers got.

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
            // The worker may have pulled again without reading the answer. The log recorded what it has read before
            // that.
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

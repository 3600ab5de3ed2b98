//! The part of a job that the servers receive, and the layout that it determines.

use crate::{Exchange, Job, constraints, fingerprint};
use paraft_common::{
    AutoConfig, Layout, LeaderWindow, TensorKind, TensorSpec,
    codec::F32_BYTES,
    config::ServerJob,
    layout::{Cuts, LayoutError},
    optim::Descent,
    placement,
};

/// The size of a shard, if there are too few buckets for the requested number of shards.
const SHARD_BYTES: usize = 1 << 20;

impl Job {
    /// Like [`Self::server_job`], for this data: workers with other data are refused.
    pub fn server_job_on(&self, tensors: &[TensorSpec], data: &dyn std::fmt::Display) -> ServerJob {
        self.server_job_cut_on(tensors, Cuts::default(), data)
    }

    /// Like [`Self::server_job_cut`], for this data.
    pub fn server_job_cut_on(
        &self,
        tensors: &[TensorSpec],
        cuts: Cuts,
        data: &dyn std::fmt::Display,
    ) -> ServerJob {
        let mut job = self.server_job_cut(tensors, cuts);
        job.fingerprint = format!("{}, {data}", job.fingerprint);
        job
    }

    /// Reduces the number of shards if the model has too few buckets: each remaining shard has about one MiB,
    /// because a Raft group costs more than a small bucket. Bucket lengths do not change.
    pub fn only_shards_with_buckets(&mut self, layout: &Layout) {
        let buckets = layout.buckets().len() as u32;
        if buckets > 0 && buckets < self.shards() {
            let full = (layout.len() * F32_BYTES).div_ceil(SHARD_BYTES) as u32;
            self.cluster.bucket_bytes = Some(self.bucket_len(layout.params_len()) * F32_BYTES);
            self.cluster.shards = Some(full.clamp(1, buckets).max(layout.stages() as u32));
        }
    }

    /// The maximum bucket length of a model with this many trained values, in values.
    fn bucket_len(&self, params_len: usize) -> usize {
        let of_shards = || placement::default_bucket_len(params_len, self.shards());
        self.cluster.bucket_bytes.map_or_else(of_shards, |bytes| bytes / F32_BYTES)
    }

    /// The servers' job, for a model with these tensors.
    pub fn server_job(&self, tensors: &[TensorSpec]) -> ServerJob {
        self.server_job_cut(tensors, Cuts::default())
    }

    /// Likewise, with parameter groups with their own rates and decays, and with stages. The groups belong to the
    /// servers' optimizer, which differs from the job file's with local steps. [`Self::layout_cut`] reports
    /// incompatible constraints.
    pub fn server_job_cut(&self, tensors: &[TensorSpec], cuts: Cuts) -> ServerJob {
        let len = |kind| tensors.iter().filter(|t| t.kind == kind).map(TensorSpec::len).sum();
        let params_len: usize = len(TensorKind::Param);
        let bucket_len = self.bucket_len(params_len);
        let Descent { optimizer, schedule, clip } = self.on_servers();
        ServerJob {
            name: self.name.clone(),
            fingerprint: fingerprint::of(self, tensors),
            workers: self.train.workers,
            mode: self.train.mode,
            auto: AutoConfig::default(),
            all_reduce: self.train.exchange == Exchange::AllReduce,
            params_len,
            buffers_len: len(TensorKind::Buffer),
            results_len: len(TensorKind::Result),
            bucket_len,
            grace_ms: self.cluster.grace_ms,
            durability: self.cluster.durability,
            leader_window: LeaderWindow::default(),
            algorithm: self.algorithm,
            round: self.train.round(),
            encoding: self.train.encoding,
            early_stop: self.eval.early_stop,
            optimizer,
            schedule,
            clip,
            start: None,
            groups: cuts.groups.to_vec(),
            stages: cuts.stages.to_vec(),
            constraints: constraints::of(&self.constraints, tensors).unwrap_or_default(),
            chunks: None,
            tables: Vec::new(),
            tensors: ServerJob::named(tensors),
        }
    }

    /// The layout that [`Self::server_job`] describes, with the model's tensor names.
    pub fn layout(&self, tensors: Vec<TensorSpec>) -> Result<Layout, LayoutError> {
        self.layout_cut(tensors, Cuts::default())
    }

    /// The layout of [`Self::server_job_cut`].
    pub fn layout_cut(&self, tensors: Vec<TensorSpec>, cuts: Cuts) -> Result<Layout, LayoutError> {
        let constraints = constraints::of(&self.constraints, &tensors)?;
        let bucket_len = self.server_job(&tensors).bucket_len;
        Layout::cut(tensors, Cuts { constraints: &constraints, ..cuts }, bucket_len)
    }
}

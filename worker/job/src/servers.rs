//! The part of a job that travels to the servers, and the layout that it fixes.

use crate::{Exchange, Job, constraints, fingerprint};
use paraft_common::{
    Layout, LeaderWindow, TensorKind, TensorSpec,
    codec::F32_BYTES,
    config::ServerJob,
    layout::{Cuts, LayoutError},
    optim::Descent,
    placement,
};

/// What a shard should have, where there are too few buckets for as many as were asked for.
const SHARD_BYTES: usize = 1 << 20;

impl Job {
    /// As [`Self::server_job`], for this data: workers with other data are refused.
    pub fn server_job_on(&self, tensors: &[TensorSpec], data: &dyn std::fmt::Display) -> ServerJob {
        self.server_job_cut_on(tensors, Cuts::default(), data)
    }

    /// As [`Self::server_job_cut`], for this data.
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

    /// Takes shards back where this model has too few buckets for them: what is left has about a MiB in each, since a
    /// Raft group costs more than a small bucket. Buckets stay as long as they were.
    pub fn only_shards_with_buckets(&mut self, layout: &Layout) {
        let buckets = layout.buckets().len() as u32;
        if buckets > 0 && buckets < self.shards() {
            let full = (layout.len() * F32_BYTES).div_ceil(SHARD_BYTES) as u32;
            self.cluster.bucket_bytes = Some(self.bucket_len(layout.params_len()) * F32_BYTES);
            self.cluster.shards = Some(full.clamp(1, buckets).max(layout.stages() as u32));
        }
    }

    /// The longest bucket of a model with so many trained values, in values.
    fn bucket_len(&self, params_len: usize) -> usize {
        let of_shards = || placement::default_bucket_len(params_len, self.shards());
        self.cluster.bucket_bytes.map_or_else(of_shards, |bytes| bytes / F32_BYTES)
    }

    /// What the servers need to know, for a model with these tensors.
    pub fn server_job(&self, tensors: &[TensorSpec]) -> ServerJob {
        self.server_job_cut(tensors, Cuts::default())
    }

    /// Likewise, with trained tensors in groups that have rates and decays of their own, and in stages. The former are those of the
    /// optimizer on the servers, which local steps make another than the job file's. What constraints do not fit, [`Self::layout_cut`] says.
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
            auto: self.auto,
            all_reduce: self.train.exchange == Exchange::AllReduce,
            params_len,
            buffers_len: len(TensorKind::Buffer),
            bucket_len,
            grace_ms: self.cluster.grace_ms,
            durability: self.cluster.durability,
            leader_window: LeaderWindow::default(),
            algorithm: self.algorithm,
            round: self.round,
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
        }
    }

    /// The layout that [`Self::server_job`] describes, with the model's tensor names.
    pub fn layout(&self, tensors: Vec<TensorSpec>) -> Result<Layout, LayoutError> {
        self.layout_cut(tensors, Cuts::default())
    }

    /// That of [`Self::server_job_cut`].
    pub fn layout_cut(&self, tensors: Vec<TensorSpec>, cuts: Cuts) -> Result<Layout, LayoutError> {
        let constraints = constraints::of(&self.constraints, &tensors)?;
        let bucket_len = self.server_job(&tensors).bucket_len;
        Layout::cut(tensors, Cuts { constraints: &constraints, ..cuts }, bucket_len)
    }
}

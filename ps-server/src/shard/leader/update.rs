//! An update of a bucket: a push, or the sum of a round, on its way to the log.

use super::{Leader, ProposalSpan, Purpose};
use crate::shard::{
    command::{Command, Contribution, Proposal, PushEntry},
    round::{RoundPush, Sum},
    state::ShardConfig,
};
use paraft_common::{Payload, optim::Overrides};
use paraft_trace::Stage;

/// What a proposed update holds.
pub(super) struct UpdatePlan {
    contributions: Vec<Contribution>,
    factor: f32,
    closes: bool,
    payload: Payload,
    overrides: Overrides,
    /// No push of it is applied.
    skip: bool,
}

impl UpdatePlan {
    /// A push that is an update by itself.
    pub(super) fn alone(part: RoundPush, factor: f32) -> Self {
        let RoundPush { contribution, payload, overrides, skip, .. } = part;
        Self { contributions: vec![contribution], factor, closes: false, payload, overrides, skip }
    }

    /// A round; its mean is multiplied by `clipped`.
    pub(super) fn round(sum: Sum, clipped: f32, closes: bool) -> Self {
        let Sum { contributions, payload, factor, overrides, skip, .. } = sum;
        Self { contributions, factor: clipped * factor, closes, payload, overrides, skip }
    }
}

impl Leader {
    /// Proposes an update.
    pub(super) fn update(&mut self, conf: &ShardConfig, bucket: usize, update: UpdatePlan) {
        let UpdatePlan { contributions, factor, closes, payload, overrides, skip } = update;
        let (id, encoding) = (conf.buckets[bucket].id, conf.encoding(bucket));
        // Pushes of sessions that are over are not reported.
        let reported: Vec<Contribution> = self.shard.read(|m| {
            let in_session = |c: &&Contribution| m.members.in_session(c.worker, c.session).is_some();
            contributions.iter().filter(in_session).copied().collect()
        });
        for c in &reported {
            let waited = self.epoch.as_mut().and_then(|e| e.pending.proposed(bucket, c));
            if let Some((arrived, pushed)) = waited {
                self.note(Stage::Queue, arrived, (bucket, c.step, Some(c.worker)), pushed);
            }
        }
        let entry =
            PushEntry { bucket: id, contributions: &contributions, encoding, factor, closes, overrides };
        let command = match skip {
            true => Command::Skip { bucket: id, contributions: contributions.clone(), closes },
            false => Command::of_pushes(entry),
        };
        let step = command.latest_step().unwrap_or_default();
        let of = ProposalSpan { began: self.now.moment, step, bytes: payload.len() as u64 };
        self.propose(Purpose::Update { bucket, contributions, of }, Proposal { command, payload });
    }
}

//! V-trace: targets for values and policy from fragments that an older policy played (Espeholt et al. 2018, "IMPALA",
//! arXiv 1802.01561, section 4.1).
//!
//! With ratios r of the probabilities of the action taken, new over old, ρ = min(ρ̄, r) and c = min(c̄, r):
//!
//! ```text
//! δ[t] = ρ[t] (reward[t] + γ[t] V[t+1] - V[t])
//! v[t] = V[t] + δ[t] + γ[t] c[t] (v[t+1] - V[t+1])          v[n] = V[n]
//! advantage[t] = ρ[t] (reward[t] + γ[t] v[t+1] - V[t])
//! ```

/// Upper bounds of the importance weights, each above 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bars {
    /// ρ̄: decides which policy's value the targets converge to.
    pub rho: f32,
    /// c̄, at most ρ̄: decides how fast they do.
    pub c: f32,
}

/// What each step of a fragment is trained towards.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Targets {
    /// v: what the value of each observation should be.
    pub values: Vec<f32>,
    /// What the gradient of the action's log-probability is multiplied by; ρ is in it.
    pub advantages: Vec<f32>,
}

/// The steps of a fragment, in their order. All slices but `values` have a value for each.
#[derive(Clone, Copy, Debug)]
pub struct Steps<'a> {
    /// V of each observation, and behind them that of the observation after the last step.
    pub values: &'a [f32],
    /// The rewards.
    pub rewards: &'a [f32],
    /// γ; 0 where the episode was over after the step.
    pub discounts: &'a [f32],
    /// The action's probability in the policy that is trained, over that in the policy that played.
    pub ratios: &'a [f32],
}

/// The targets of a fragment. Steps that lack a value in one of the slices are left out.
pub fn targets(steps: Steps<'_>, bars: Bars) -> Targets {
    let Steps { values, rewards, discounts, ratios } = steps;
    let n = rewards.len().min(discounts.len()).min(ratios.len()).min(values.len().saturating_sub(1));
    let mut targets = Targets { values: vec![0.0; n], advantages: vec![0.0; n] };
    let mut next = values.get(n).copied().unwrap_or_default();
    for t in (0..n).rev() {
        let (rho, c) = (ratios[t].min(bars.rho), ratios[t].min(bars.c));
        let delta = rho * (rewards[t] + discounts[t] * values[t + 1] - values[t]);
        targets.advantages[t] = rho * (rewards[t] + discounts[t] * next - values[t]);
        targets.values[t] = values[t] + delta + discounts[t] * c * (next - values[t + 1]);
        next = targets.values[t];
    }
    targets
}

#[cfg(test)]
#[path = "vtrace_tests.rs"]
mod tests;

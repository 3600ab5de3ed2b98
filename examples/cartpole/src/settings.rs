//! Settings that are not the job's: variables of the environment, since `paraft train` passes that on to the learner, whose flags
//! are those of `paraft worker`. The learner gives its own actors theirs; for an actor elsewhere they are flags too.

use crate::vtrace::Bars;
use clap::{Args, Parser, ValueEnum};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// How the learner treats that an older policy played.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Correct {
    /// V-trace.
    Vtrace,
    /// As if the newest policy had played: all ratios are 1.
    None,
}

impl Correct {
    /// Its name, as on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vtrace => "vtrace",
            Self::None => "none",
        }
    }
}

/// What an actor does.
#[derive(Args, Clone, Copy, Debug, PartialEq)]
pub struct Acting {
    /// Steps of a fragment; the end of an episode by the time limit ends one earlier.
    #[arg(long, env = "CARTPOLE_FRAGMENT", value_name = "STEPS", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub fragment: u32,
    /// An actor takes a version once its policy is at least so many updates old.
    #[arg(long, env = "CARTPOLE_REFRESH", value_name = "UPDATES", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub refresh: u64,
    /// The learner drops fragments of policies that are more updates old, and actors with such a policy wait for a version.
    #[arg(long, env = "CARTPOLE_MAX_AGE", value_name = "UPDATES", default_value_t = 50)]
    pub max_age: u64,
}

/// What the learner does.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct Settings {
    /// The flags of actors.
    #[command(flatten)]
    pub acting: Acting,
    /// The correction.
    #[arg(long, env = "CARTPOLE_CORRECT", value_enum, default_value = "vtrace")]
    pub correct: Correct,
    /// Actors in the learner's process.
    #[arg(long, env = "CARTPOLE_ACTORS", value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(0..=64))]
    pub actors: u32,
    /// Where the learner waits for actors. They send plain text: leave this host only through a tunnel.
    #[arg(long, env = "CARTPOLE_LISTEN", value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
    pub listen: String,
    /// Training ends once the last 100 episodes, and then 100 new ones of the newest weights, have this mean reward; over 500: only
    /// after train.max_steps.
    #[arg(long, env = "CARTPOLE_TARGET", value_name = "REWARD", default_value_t = 475.0)]
    pub target: f64,
    /// Discount of later rewards, from 0 to 1.
    #[arg(long, env = "CARTPOLE_GAMMA", default_value_t = 0.99)]
    pub gamma: f32,
    /// What a reward counts in returns: values near 1 are learned faster than values near 100.
    #[arg(long, env = "CARTPOLE_REWARD_SCALE", default_value_t = 0.05)]
    pub reward_scale: f32,
    /// Weight of the policy's entropy.
    #[arg(long, env = "CARTPOLE_ENTROPY", default_value_t = 0.01)]
    pub entropy: f32,
    /// Weight of the value's loss.
    #[arg(long, env = "CARTPOLE_VALUE", default_value_t = 0.5)]
    pub value: f32,
    /// The upper bound of V-trace's weights ρ.
    #[arg(long, env = "CARTPOLE_RHO_BAR", default_value_t = 1.0)]
    pub rho_bar: f32,
    /// The upper bound of V-trace's weights c.
    #[arg(long, env = "CARTPOLE_C_BAR", default_value_t = 1.0)]
    pub c_bar: f32,
    /// The learner's report, as JSON.
    #[arg(long, env = "CARTPOLE_REPORT", value_name = "FILE")]
    pub report: Option<PathBuf>,
}

/// [`Settings`] alone.
#[derive(Parser)]
struct OfEnvironment {
    #[command(flatten)]
    settings: Settings,
}

impl Settings {
    /// The defaults, and what the environment says otherwise.
    ///
    /// # Errors
    /// A variable is out of its range; the text names it.
    pub fn of_environment() -> Result<Self, String> {
        let of = OfEnvironment::try_parse_from(["cartpole"]).map_err(|e| e.to_string())?;
        of.settings.check().map(|()| of.settings)
    }

    /// Bounds of the importance weights.
    pub fn bars(&self) -> Bars {
        Bars { rho: self.rho_bar, c: self.c_bar }
    }

    /// Checks what a flag's range does not say.
    ///
    /// # Errors
    /// A number is out of its range; the text names it and the range.
    pub fn check(&self) -> Result<(), String> {
        let within = |name: &str, v: f32, low: f32, high: f32| match (low..=high).contains(&v) {
            true => Ok(()),
            false => Err(format!("{name} is {v}; use {low} to {high}")),
        };
        within("gamma", self.gamma, 0.0, 1.0)?;
        within("reward scale", self.reward_scale, 1e-4, 1.0)?;
        within("entropy", self.entropy, 0.0, 1.0)?;
        within("value", self.value, 0.0, 10.0)?;
        within("rho bar", self.rho_bar, 0.01, 100.0)?;
        within("c bar", self.c_bar, 0.01, self.rho_bar)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    /// The defaults.
    pub(crate) fn settings() -> Settings {
        OfEnvironment::parse_from(["cartpole"]).settings
    }

    #[test]
    fn defaults_are_within_their_ranges() {
        assert_eq!(settings().check(), Ok(()));
    }

    #[test]
    fn settings_out_of_their_ranges_are_refused() {
        let refused = |settings: Settings| settings.check().expect_err("out of range");
        assert!(refused(Settings { gamma: 1.5, ..settings() }).contains("gamma is 1.5; use 0 to 1"));
        assert!(refused(Settings { rho_bar: f32::NAN, ..settings() }).contains("rho bar"));
        assert!(refused(Settings { c_bar: 2.0, ..settings() }).contains("use 0.01 to 1"));
    }
}

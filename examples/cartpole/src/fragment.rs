//! Fragments of episodes, and how actors send them to the learner.
//!
//! An actor sends a fragment and waits for the answer, which also says how far training is. So an actor has at most one
//! fragment on its way. All numbers are little-endian:
//!
//! ```text
//! fragment: "CPF1"  version u64  steps u16  episodes u16
//!           for each step: observation 4 f32, log-probability f32, flags u8 (1: pushed right, 2: the episode is over)
//!           observation after the last step 4 f32; for each episode that ended: reward u32
//! answer:   updates u64  over u8
//! ```

use crate::env::{MAX_STEPS, OBSERVATION};
use std::io::{self, Read, Write};

const MAGIC: [u8; 4] = *b"CPF1";
/// Steps of the longest fragment.
pub const MAX_FRAGMENT: usize = 1024;
const HEADER: usize = 16;
const STEP: usize = 4 * OBSERVATION + 5;
const RIGHT: u8 = 1;
const OVER: u8 = 2;

/// A step of an actor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// What the policy saw.
    pub observation: [f32; OBSERVATION],
    /// Log-probability of its action.
    pub log_probability: f32,
    /// Its action.
    pub right: bool,
    /// The episode was over after the step, and not because of the time limit.
    pub over: bool,
}

/// Steps of one actor in their order, by one version of the policy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fragment {
    /// The step of the job that names the version.
    pub version: u64,
    /// At least one.
    pub steps: Vec<Step>,
    /// What the policy saw after the last step, if that did not end the episode by a fall.
    pub last: [f32; OBSERVATION],
    /// Rewards of the episodes that ended in this fragment.
    pub episodes: Vec<u32>,
}

/// What the learner answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Updates so far: the job's step.
    pub updates: u64,
    /// Training is over: send no more.
    pub over: bool,
}

/// Why a fragment or an answer was not received.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The connection.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The other side is no actor of this release.
    #[error("this is no fragment: {0}")]
    Malformed(&'static str),
}

impl WireError {
    /// The other side has closed the connection between two fragments, as it may.
    pub fn is_end(&self) -> bool {
        matches!(self, Self::Io(e) if e.kind() == io::ErrorKind::UnexpectedEof)
    }
}

fn floats<const N: usize>(bytes: &[u8]) -> Result<[f32; N], WireError> {
    let mut values = [0.0; N];
    for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
        *value = f32::from_le_bytes(*bytes);
    }
    match values.iter().all(|v| v.is_finite()) {
        true => Ok(values),
        false => Err(WireError::Malformed("a number is not finite")),
    }
}

impl Fragment {
    /// Sends it.
    ///
    /// # Errors
    /// The connection fails, or the fragment has no steps or too many.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let (steps, episodes) = (self.steps.len(), self.episodes.len());
        if steps == 0 || steps > MAX_FRAGMENT || episodes > steps {
            let why = format!(
                "a fragment has {steps} steps and {episodes} episodes; it may have {MAX_FRAGMENT} steps"
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend((steps as u16).to_le_bytes());
        bytes.extend((episodes as u16).to_le_bytes());
        for step in &self.steps {
            step.observation.iter().for_each(|v| bytes.extend(v.to_le_bytes()));
            bytes.extend(step.log_probability.to_le_bytes());
            bytes.push(RIGHT * u8::from(step.right) + OVER * u8::from(step.over));
        }
        self.last.iter().for_each(|v| bytes.extend(v.to_le_bytes()));
        self.episodes.iter().for_each(|reward| bytes.extend(reward.to_le_bytes()));
        to.write_all(&bytes)
    }

    /// Receives one.
    ///
    /// # Errors
    /// The connection ends or fails, or the bytes are no fragment.
    pub fn read(from: &mut impl Read) -> Result<Self, WireError> {
        let mut header = [0; HEADER];
        from.read_exact(&mut header)?;
        let [m0, m1, m2, m3, v0, v1, v2, v3, v4, v5, v6, v7, s0, s1, e0, e1] = header;
        if [m0, m1, m2, m3] != MAGIC {
            return Err(WireError::Malformed("it begins otherwise"));
        }
        let version = u64::from_le_bytes([v0, v1, v2, v3, v4, v5, v6, v7]);
        let (steps, episodes) =
            (usize::from(u16::from_le_bytes([s0, s1])), usize::from(u16::from_le_bytes([e0, e1])));
        if steps == 0 || steps > MAX_FRAGMENT || episodes > steps {
            return Err(WireError::Malformed("its number of steps or episodes is out of range"));
        }
        let mut body = vec![0; steps * STEP + 4 * OBSERVATION + 4 * episodes];
        from.read_exact(&mut body)?;
        let (of_steps, rest) = body.split_at(steps * STEP);
        let (last, of_episodes) = rest.split_at(4 * OBSERVATION);
        let steps = of_steps.as_chunks::<STEP>().0.iter().map(|bytes| {
            let [a, b, c, d, log_probability] = floats(bytes)?;
            let flags = bytes[STEP - 1];
            if flags & !(RIGHT | OVER) != 0 || log_probability > 0.0 {
                return Err(WireError::Malformed("a step has unknown flags, or a probability above 1"));
            }
            let (right, over) = (flags & RIGHT != 0, flags & OVER != 0);
            Ok(Step { observation: [a, b, c, d], log_probability, right, over })
        });
        let steps = steps.collect::<Result<_, _>>()?;
        let episodes: Vec<_> = of_episodes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        if episodes.iter().any(|reward| *reward > MAX_STEPS) {
            return Err(WireError::Malformed("an episode is longer than its time limit"));
        }
        Ok(Self { version, steps, last: floats(last)?, episodes })
    }
}

impl Answer {
    /// Sends it.
    ///
    /// # Errors
    /// The connection fails.
    pub fn write(self, to: &mut impl Write) -> io::Result<()> {
        let mut bytes = self.updates.to_le_bytes().to_vec();
        bytes.push(u8::from(self.over));
        to.write_all(&bytes)
    }

    /// Receives one.
    ///
    /// # Errors
    /// The connection ends or fails.
    pub fn read(from: &mut impl Read) -> io::Result<Self> {
        let (mut updates, mut over) = ([0; 8], [0]);
        from.read_exact(&mut updates)?;
        from.read_exact(&mut over)?;
        Ok(Self { updates: u64::from_le_bytes(updates), over: over[0] != 0 })
    }
}

#[cfg(test)]
#[path = "fragment_tests.rs"]
mod tests;

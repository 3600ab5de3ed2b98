//! CartPole-v1: a pole on a cart that is pushed left or right (Barto, Sutton and Anderson 1983), with the numbers and the
//! integrator of Gymnasium. Each step is worth a reward of 1.

use crate::rng::Rng;

/// Values of an observation: position (m), velocity (m/s), angle (rad), angular velocity (rad/s).
pub const OBSERVATION: usize = 4;
/// Actions: push to the left, push to the right.
pub const ACTIONS: usize = 2;
/// Steps after which an episode ends while the pole still stands.
pub const MAX_STEPS: u32 = 500;
/// The reward of each step.
pub const REWARD: f32 = 1.0;

const GRAVITY: f64 = 9.8;
const CART_MASS: f64 = 1.0;
const POLE_MASS: f64 = 0.1;
const TOTAL_MASS: f64 = CART_MASS + POLE_MASS;
/// Half the pole's length.
const LENGTH: f64 = 0.5;
const FORCE: f64 = 10.0;
/// Seconds of a step.
const TAU: f64 = 0.02;
const MAX_POSITION: f64 = 2.4;
/// 12 degrees.
const MAX_ANGLE: f64 = 12.0 * 2.0 * std::f64::consts::PI / 360.0;
/// The first state's values lie between this and its negative.
const START: f64 = 0.05;

/// Why an episode is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The pole fell, or the cart left the track: there is no further reward.
    Fell,
    /// [`MAX_STEPS`] were reached. The state is not a last one: its value counts.
    TimeLimit,
}

/// An episode.
#[derive(Clone, Debug)]
pub struct CartPole {
    state: [f64; OBSERVATION],
    steps: u32,
}

impl CartPole {
    /// A new episode with a random first state.
    pub fn start(rng: &mut Rng) -> Self {
        Self::at(std::array::from_fn(|_| rng.between(-START, START)))
    }

    /// A new episode with this first state.
    pub fn at(state: [f64; OBSERVATION]) -> Self {
        Self { state, steps: 0 }
    }

    /// The same state, with so many steps behind it.
    #[cfg(test)]
    pub(crate) fn after(self, steps: u32) -> Self {
        Self { steps, ..self }
    }

    /// What a policy sees.
    pub fn observation(&self) -> [f32; OBSERVATION] {
        self.state.map(|v| v as f32)
    }

    /// Steps so far, which is also the sum of the rewards.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// Pushes the cart for one step. `Some`: the episode is over, and no step may follow.
    pub fn step(&mut self, right: bool) -> Option<End> {
        let [x, x_dot, theta, theta_dot] = self.state;
        let force = if right { FORCE } else { -FORCE };
        let (sin, cos) = (theta.sin(), theta.cos());
        let pole = POLE_MASS * LENGTH;
        let temp = (force + pole * theta_dot * theta_dot * sin) / TOTAL_MASS;
        let theta_acc =
            (GRAVITY * sin - cos * temp) / (LENGTH * (4.0 / 3.0 - POLE_MASS * cos * cos / TOTAL_MASS));
        let x_acc = temp - pole * theta_acc * cos / TOTAL_MASS;
        // Euler's method: positions move by the old velocities.
        self.state =
            [x + TAU * x_dot, x_dot + TAU * x_acc, theta + TAU * theta_dot, theta_dot + TAU * theta_acc];
        self.steps += 1;
        let [x, _, theta, _] = self.state;
        if x.abs() > MAX_POSITION || theta.abs() > MAX_ANGLE {
            return Some(End::Fell);
        }
        (self.steps >= MAX_STEPS).then_some(End::TimeLimit)
    }
}

#[cfg(test)]
#[path = "env_tests.rs"]
mod tests;

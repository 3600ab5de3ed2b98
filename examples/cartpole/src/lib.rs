//! Asynchronous actor-critic on CartPole-v1. Actors read the weights of the job while it trains, play with versions that may be
//! many updates old, and send what they played to the learner, which corrects for the age by V-trace:
//!
//! ```text
//!          servers ──▶ versions ──▶ actor ─┐
//!             ▲    ──▶ versions ──▶ actor ─┼─▶ fragments ──▶ learner, the job's worker
//!             └───────────── gradients ────┴──────────────────┘
//! ```
//!
//! - [`mod@env`]: CartPole. [`net`]: policy and value. [`vtrace`], [`loss`]: the gradient.
//! - [`actor`]: reads versions and plays. [`fragment`]: what it sends. [`intake`]: how the learner receives it.
//! - [`learner`]: the training loop. [`report`]: rewards by the policy's age.
//! - [`settings`]: flags. [`compare`]: several runs, with correction and without.

pub mod actor;
pub mod compare;
pub mod env;
pub mod fragment;
pub mod intake;
pub mod learner;
pub mod loss;
pub mod net;
pub mod report;
mod rng;
pub mod settings;
pub mod vtrace;

//! Plain asynchronous SGD: Recht, Re, Wright, Niu, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient
//! Descent", NIPS 2011; Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012.
//!
//! ```text
//!  w <- w - lr * g        whatever the weights were that g was computed from
//! ```

use super::Algorithm;
use serde::{Deserialize, Serialize};

/// Gradients are applied as they come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asgd {}

impl Algorithm for Asgd {}

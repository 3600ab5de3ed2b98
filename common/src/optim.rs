//! Optimizers: what a server does to a bucket's weights when an update is applied.
//!
//! Every replica of a shard runs this on the same entries in the same order and must end with the same bits,
//! on any host. So the module keeps to operations IEEE 754 defines exactly (`+ - * /`, `sqrt`, comparison) in
//! a fixed order for each value: no fused multiply-add (the compiler does not fuse on its own, and no code here
//! may call `mul_add`), no `exp`, `cos` or `powf` from the platform's libm ([`exact`] has our own). A value's
//! update reads nothing but the value's own weight, slots and gradient, so the length of a bucket and the
//! width of the vector unit change no bit.
//!
//! That is also the rule for every loop that is compiled for wider vectors (`simd.rs`): elementwise, the operations
//! above and no others, nothing reassociated; a sum over values has a fixed number of running sums, whatever the width.
//! The compiler may then use any width, since Rust gives it no leave to fuse or to reorder. (One thing IEEE leaves open: the sign and payload of a NaN. Pushes
//! that are not finite are refused before they get here.)
//!
//! An update goes through these stages, each in its own place:
//!
//! ```text
//!  payload (LE f32) --> * scale --> clip by value --> + weight decay --> rule (adam, ...) --> weights, slots
//!                       |           ^                                    ^
//!                       |           [`ClipConfig::value`]                lr = config.lr() * schedule.factor()
//!                       1 / contributions  * [`clip::norm_factor`]
//! ```
//!
//! Formulas, names and defaults are those of `torch.optim` (PyTorch 2.15); `tools/golden/optimizers.py` writes
//! the vectors the tests compare with.
//!
//! What it is not: it does not average pushes, count updates or keep the clock; the shard does.

pub mod adadelta;
pub mod adagrad;
pub mod adam;
pub mod adamax;
mod check;
pub mod clip;
pub mod descent;
pub mod exact;
mod gradient;
mod mean;
pub mod nadam;
mod overrides;
pub mod radam;
pub mod rmsprop;
mod rule;
pub mod schedule;
pub mod sgd;

#[cfg(test)]
mod golden;
#[cfg(test)]
mod identities;

pub use adadelta::{Adadelta, AdadeltaRule};
pub use adagrad::{Adagrad, AdagradRule};
pub use adam::{Adam, AdamRule, AdamW};
pub use adamax::{Adamax, AdamaxRule};
pub use check::OptimError;
pub use clip::{ClipConfig, norm_factor};
pub use descent::{Descent, NotFinite};
pub use gradient::Gradient;
pub use mean::{take_mean, take_result};
pub use nadam::{NAdam, NAdamRule};
pub use overrides::Overrides;
pub use radam::{RAdam, RAdamRule};
pub use rmsprop::{Norm, RmsProp, RmsPropRule};
pub use rule::Rule;
pub use schedule::{LrScale, ScheduleConfig, Shape};
pub use sgd::{Momentum, MomentumRule, Nesterov, NesterovRule, Sgd, apply_buffer};

pub(crate) use check::Check;

use crate::simd::wide;
use check::OPTIMIZER;
use gradient::Stages;
use serde::Serialize;

/// The `[optimizer]` table of a job: `kind` and the options of that kind; other keys are refused.
///
/// ```
/// use paraft_common::optim::OptimizerConfig;
/// let adam: OptimizerConfig = toml::from_str("kind = \"adam\"\nlr = 0.01").expect("valid");
/// assert_eq!((adam.lr(), adam.slots()), (0.01, 2));
/// assert!(toml::from_str::<OptimizerConfig>("kind = \"adam\"\nbeta3 = 0.9").is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum OptimizerConfig {
    /// Plain stochastic gradient descent.
    Sgd(Sgd),
    /// SGD with a momentum buffer.
    Momentum(Momentum),
    /// SGD with Nesterov's momentum.
    Nesterov(Nesterov),
    /// Adagrad.
    Adagrad(Adagrad),
    /// RMSprop.
    RmsProp(RmsProp),
    /// Adam; its weight decay is added to the gradient.
    Adam(Adam),
    /// AdamW; its weight decay shrinks the weights directly.
    AdamW(AdamW),
    /// Adadelta.
    Adadelta(Adadelta),
    /// Adamax: Adam with the infinity norm.
    Adamax(Adamax),
    /// NAdam: Adam with Nesterov's momentum.
    NAdam(NAdam),
    /// RAdam: Adam that rectifies the variance of its adaptive rate.
    RAdam(RAdam),
}

crate::kinds!(OptimizerConfig {
    "sgd" => Self::Sgd,
    "momentum" => Self::Momentum,
    "nesterov" => Self::Nesterov,
    "adagrad" => Self::Adagrad,
    "rmsprop" => Self::RmsProp,
    "adam" => Self::Adam,
    "adamw" => Self::AdamW,
    "adadelta" => Self::Adadelta,
    "adamax" => Self::Adamax,
    "nadam" => Self::NAdam,
    "radam" => Self::RAdam,
});

/// What changes from one update to the next. It must be the same on every replica: derive it from replicated
/// state or carry it in the entry.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    /// The rate of this update: the base rate times the schedule's factor.
    pub lr: f32,
    /// The number of this bucket's update, counted from 1 (0 is read as 1).
    pub t: u64,
    /// Bound on the magnitude of each gradient value, after scaling.
    pub clip_value: Option<f32>,
}

impl OptimizerConfig {
    /// SGD without decay.
    pub fn sgd(lr: f64) -> Self {
        Self::Sgd(Sgd { lr, ..Sgd::default() })
    }

    /// Adam with the default options.
    pub fn adam(lr: f64) -> Self {
        Self::Adam(Adam { lr, ..Adam::default() })
    }

    /// The kind, as the job file writes it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Sgd(_) => "sgd",
            Self::Momentum(_) => "momentum",
            Self::Nesterov(_) => "nesterov",
            Self::Adagrad(_) => "adagrad",
            Self::RmsProp(_) => "rmsprop",
            Self::Adam(_) => "adam",
            Self::AdamW(_) => "adamw",
            Self::Adadelta(_) => "adadelta",
            Self::Adamax(_) => "adamax",
            Self::NAdam(_) => "nadam",
            Self::RAdam(_) => "radam",
        }
    }

    /// The base rate, before the schedule.
    pub fn lr(&self) -> f64 {
        match self {
            Self::Sgd(c) => c.lr,
            Self::Momentum(c) => c.lr,
            Self::Nesterov(c) => c.lr,
            Self::Adagrad(c) => c.lr,
            Self::RmsProp(c) => c.lr,
            Self::Adam(c) => c.lr,
            Self::AdamW(c) => c.lr,
            Self::Adadelta(c) => c.lr,
            Self::Adamax(c) => c.lr,
            Self::NAdam(c) => c.lr,
            Self::RAdam(c) => c.lr,
        }
    }

    /// Whether a GPU kernel exists for it, for ranks that apply their gradients themselves.
    pub fn has_kernel(&self) -> bool {
        match self {
            Self::Adadelta(_) | Self::Adamax(_) | Self::NAdam(_) | Self::RAdam(_) => false,
            Self::Adam(Adam { amsgrad, .. }) | Self::AdamW(AdamW { amsgrad, .. }) => !amsgrad,
            _ => true,
        }
    }

    /// The same optimizer with this base rate and weight decay.
    pub fn with(&self, lr: f64, weight_decay: f64) -> Self {
        let mut with = self.clone();
        macro_rules! set {
            ($($kind:ident),*) => {
                match &mut with {
                    $(Self::$kind(c) => (c.lr, c.weight_decay) = (lr, weight_decay),)*
                }
            };
        }
        set!(Sgd, Momentum, Nesterov, Adagrad, RmsProp, Adam, AdamW, Adadelta, Adamax, NAdam, RAdam);
        with
    }

    /// Checks every option; the error names the key and its range.
    pub fn validate(&self) -> Result<(), OptimError> {
        match self {
            Self::Sgd(c) => c.validate(),
            Self::Momentum(c) => c.validate(),
            Self::Nesterov(c) => c.validate(),
            Self::Adagrad(c) => c.validate(),
            Self::RmsProp(c) => c.validate(),
            Self::Adam(c) => c.validate(),
            Self::AdamW(c) => c.validate(),
            Self::Adadelta(c) => c.validate(),
            Self::Adamax(c) => c.validate(),
            Self::NAdam(c) => c.validate(),
            Self::RAdam(c) => c.validate(),
        }
    }

    /// State vectors this optimizer keeps, each as long as the weights.
    pub fn slots(&self) -> usize {
        match self {
            Self::Sgd(_) => 0,
            Self::Momentum(_) | Self::Nesterov(_) | Self::Adagrad(_) => 1,
            Self::RmsProp(c) => c.slots(),
            Self::Adam(Adam { amsgrad: true, .. }) | Self::AdamW(AdamW { amsgrad: true, .. }) => 3,
            Self::Adam(_) | Self::AdamW(_) | Self::Adadelta(_) => 2,
            Self::Adamax(_) | Self::NAdam(_) | Self::RAdam(_) => 2,
        }
    }

    /// PyTorch's names of the state vectors, in our order: the keys of `optimizer.state_dict()["state"]`.
    pub fn slot_names(&self) -> Vec<&'static str> {
        match self {
            Self::Sgd(_) => vec![],
            Self::Momentum(_) | Self::Nesterov(_) => vec!["momentum_buffer"],
            Self::Adagrad(_) => vec!["sum"],
            Self::RmsProp(c) => c.slot_names(),
            Self::Adadelta(_) => vec!["square_avg", "acc_delta"],
            Self::Adamax(_) => vec!["exp_avg", "exp_inf"],
            Self::Adam(Adam { amsgrad: true, .. }) | Self::AdamW(AdamW { amsgrad: true, .. }) => {
                vec!["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
            }
            Self::Adam(_) | Self::AdamW(_) | Self::NAdam(_) | Self::RAdam(_) => {
                vec!["exp_avg", "exp_avg_sq"]
            }
        }
    }

    /// The state of a bucket of `len` values before its first update.
    pub fn new_slots(&self, len: usize) -> Vec<Vec<f32>> {
        let first = match self {
            Self::Adagrad(c) => c.initial_accumulator as f32,
            _ => 0.0,
        };
        vec![vec![first; len]; self.slots()]
    }

    /// Applies one update to a bucket.
    ///
    /// # Panics
    ///
    /// If the length of the gradient or of a slot, or the number of slots, does not match the weights.
    /// Callers check lengths from the network first, and create the slots with [`Self::new_slots`].
    pub fn apply(&self, hyper: &Hyper, weights: &mut [f32], slots: &mut [Vec<f32>], grad: Gradient<'_>) {
        assert_eq!(slots.len(), self.slots(), "{} got the wrong number of slots", self.kind());
        assert!(slots.iter().all(|s| s.len() == weights.len()), "slot and bucket differ in length");
        let limit = hyper.clip_value.unwrap_or(f32::INFINITY);
        let stages = Stages { scale: grad.scale, limit, decay: self.decay() };
        let rule = self.rule(hyper);
        gradient::runs(grad, weights.len(), stages, |at, grad| {
            let (weights, slots) = (&mut weights[at.clone()], &mut *slots);
            wide(
                #[inline(always)]
                || rule.run(weights, slots, at, grad),
            );
        });
    }

    /// The share of a weight that is added to its gradient, before the rule.
    pub fn decay(&self) -> f32 {
        let decay = match self {
            Self::Sgd(c) => c.weight_decay,
            Self::Momentum(c) => c.weight_decay,
            Self::Nesterov(c) => c.weight_decay,
            Self::Adagrad(c) => c.weight_decay,
            Self::RmsProp(c) => c.weight_decay,
            Self::Adam(c) => c.weight_decay,
            Self::Adadelta(c) => c.weight_decay,
            Self::Adamax(c) => c.weight_decay,
            Self::NAdam(c) if !c.decoupled_weight_decay => c.weight_decay,
            Self::RAdam(c) if !c.decoupled_weight_decay => c.weight_decay,
            // Decoupled decay: these rules shrink the weights themselves.
            Self::AdamW(_) | Self::NAdam(_) | Self::RAdam(_) => 0.0,
        };
        decay as f32
    }

    /// The constants of an update. [`Self::apply`] runs the CPU loops with them; GPU kernels have their
    /// own loops.
    pub fn rule(&self, hyper: &Hyper) -> Rule {
        let hyper = &Hyper { t: hyper.t.max(1), ..*hyper };
        match self {
            Self::Sgd(_) => Rule::Sgd { lr: hyper.lr },
            Self::Momentum(c) => Rule::Momentum(c.rule(hyper)),
            Self::Nesterov(c) => Rule::Nesterov(c.rule(hyper)),
            Self::Adagrad(c) => Rule::Adagrad(c.rule(hyper)),
            Self::RmsProp(c) => Rule::RmsProp(c.rule(hyper)),
            Self::Adam(c) => Rule::Adam(c.rule(hyper)),
            Self::AdamW(c) => Rule::Adam(c.rule(hyper)),
            Self::Adadelta(c) => Rule::Adadelta(c.rule(hyper)),
            Self::Adamax(c) => Rule::Adamax(c.rule(hyper)),
            Self::NAdam(c) => Rule::NAdam(c.rule(hyper)),
            Self::RAdam(c) => Rule::RAdam(c.rule(hyper)),
        }
    }
}

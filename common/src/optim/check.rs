//! The checks of options.

/// An option outside its range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("[{section}] {key} = {value}: must be {range}")]
pub struct OptimError {
    /// The table of the job file.
    pub section: &'static str,
    /// The key in that table.
    pub key: &'static str,
    /// The given value.
    pub value: f64,
    /// The allowed range, for people.
    pub range: &'static str,
}

/// Range checks with the same wording for all optimizers.
pub(crate) struct Check(pub(crate) &'static str);

impl Check {
    pub(crate) fn that(
        &self,
        key: &'static str,
        value: f64,
        ok: bool,
        range: &'static str,
    ) -> Result<(), OptimError> {
        // Rates and factors are used as `f32`, so a value that overflows there is as invalid as
        // infinity.
        if ok && (value as f32).is_finite() {
            return Ok(());
        }
        Err(OptimError { section: self.0, key, value, range })
    }

    pub(crate) fn not_negative(&self, key: &'static str, v: f64) -> Result<(), OptimError> {
        self.that(key, v, v >= 0.0, "a finite number, 0 or more")
    }

    pub(crate) fn below_one(&self, key: &'static str, v: f64) -> Result<(), OptimError> {
        self.that(key, v, (0.0..1.0).contains(&v), "at least 0 and less than 1")
    }

    /// `eps` prevents 0/0, so it must not round to 0 as an `f32`.
    pub(crate) fn eps(&self, v: f64) -> Result<(), OptimError> {
        self.that("eps", v, (1e-30..=1.0).contains(&v), "between 1e-30 and 1")
    }

    /// The common options of Adam and its variants.
    pub(crate) fn adaptive(
        &self,
        lr: f64,
        [beta1, beta2]: [f64; 2],
        eps: f64,
        weight_decay: f64,
    ) -> Result<(), OptimError> {
        self.not_negative("lr", lr)?;
        self.below_one("beta1", beta1)?;
        self.below_one("beta2", beta2)?;
        self.eps(eps)?;
        self.not_negative("weight_decay", weight_decay)
    }
}

/// The checks of the table `[optimizer]`.
pub(super) const OPTIMIZER: Check = Check("optimizer");

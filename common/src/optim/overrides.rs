//! Options of an update that its pushes set, in place of the job's.

use super::OptimizerConfig;
use serde::{Deserialize, Serialize};

/// What a loop sets for its next pushes, as PyTorch's schedulers change an optimizer's groups between two steps.
/// Absent: the job's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Overrides {
    /// The rate of the update, in place of the optimizer's times the schedule's factor.
    pub rate: Option<f64>,
    /// `weight_decay`.
    pub weight_decay: Option<f64>,
    /// `momentum`, or `beta1`.
    pub momentum: Option<f64>,
    /// The decay of the mean square: `beta2`, `alpha` or `rho`.
    pub square: Option<f64>,
    /// `eps`.
    pub eps: Option<f64>,
    /// Bound on the size of each gradient value.
    pub clip_value: Option<f64>,
}

impl Overrides {
    /// Only the rate.
    pub fn rate(rate: Option<f64>) -> Self {
        Self { rate, ..Self::default() }
    }

    /// Whether nothing but the rate is set.
    pub fn is_rate_alone(&self) -> bool {
        *self == Self::rate(self.rate)
    }

    /// The mean of a round's pushes, option by option, over those that set it.
    pub fn mean(all: &[Self]) -> Self {
        let of = |option: fn(&Self) -> Option<f64>| {
            let said = || all.iter().filter_map(option);
            let first = said().next()?;
            if said().all(|value| value == first) {
                return Some(first); // exact, without the rounding of a mean
            }
            Some(said().sum::<f64>() / said().count() as f64)
        };
        Self {
            rate: of(|o| o.rate),
            weight_decay: of(|o| o.weight_decay),
            momentum: of(|o| o.momentum),
            square: of(|o| o.square),
            eps: of(|o| o.eps),
            clip_value: of(|o| o.clip_value),
        }
    }
}

impl OptimizerConfig {
    /// The same optimizer with these options; the rate is not one of them. `None`: it has no such option, or would keep
    /// other state with it.
    pub fn overridden(&self, by: &Overrides) -> Option<Self> {
        let mut with = self.clone();
        if let Some(weight_decay) = by.weight_decay {
            with = with.with(self.lr(), weight_decay);
        }
        let (mut momentum, mut square, mut eps) = (by.momentum, by.square, by.eps);
        macro_rules! set {
            ($config:ident: $($option:ident = $field:ident),*) => {{
                $(if let Some(value) = $option.take() { $config.$field = value; })*
            }};
        }
        match &mut with {
            Self::Sgd(_) => {}
            Self::Momentum(c) => set!(c: momentum = momentum),
            Self::Nesterov(c) => set!(c: momentum = momentum),
            Self::Adagrad(c) => set!(c: eps = eps),
            Self::RmsProp(c) => set!(c: momentum = momentum, square = alpha, eps = eps),
            Self::Adam(c) => set!(c: momentum = beta1, square = beta2, eps = eps),
            Self::AdamW(c) => set!(c: momentum = beta1, square = beta2, eps = eps),
            Self::Adadelta(c) => set!(c: square = rho, eps = eps),
            Self::Adamax(c) => set!(c: momentum = beta1, square = beta2, eps = eps),
            // Its momenta follow from all earlier ones, which are computed from the job's.
            Self::NAdam(c) => set!(c: square = beta2, eps = eps),
            Self::RAdam(c) => set!(c: momentum = beta1, square = beta2, eps = eps),
        }
        let has_all = momentum.is_none() && square.is_none() && eps.is_none();
        // RMSprop has its momentum's vector only with momentum.
        (has_all && with.slots() == self.slots()).then_some(with)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_option_replaces_the_optimizers() {
        let adam = OptimizerConfig::adam(0.5);
        let set = Overrides { momentum: Some(0.5), weight_decay: Some(0.25), ..Overrides::default() };
        let OptimizerConfig::Adam(c) = adam.overridden(&set).expect("it has both") else { panic!() };
        assert_eq!((c.lr, c.beta1, c.beta2, c.weight_decay), (0.5, 0.5, 0.999, 0.25));
        assert_eq!(adam.overridden(&Overrides::default()), Some(adam.clone()));
    }

    #[test]
    fn an_option_that_the_optimizer_lacks_is_refused() {
        let set = Overrides { momentum: Some(0.5), ..Overrides::default() };
        assert_eq!(OptimizerConfig::sgd(0.5).overridden(&set), None);
        let nadam: OptimizerConfig = toml::from_str("kind = \"nadam\"").expect("a kind");
        assert_eq!(nadam.overridden(&set), None);
    }

    #[test]
    fn a_round_has_the_mean_of_what_its_pushes_set() {
        let of = |rate, eps| Overrides { rate, eps, ..Overrides::default() };
        let all = [of(Some(0.1), None), of(Some(0.3), Some(1e-8)), of(None, None)];
        assert_eq!(Overrides::mean(&all), of(Some(0.2), Some(1e-8)));
        assert_eq!(Overrides::mean(&[of(Some(0.1), None); 3]).rate, Some(0.1));
    }
}

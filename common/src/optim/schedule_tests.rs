//! Tests of `schedule`.

use super::*;

#[test]
fn keys_of_another_kind_and_unknown_keys_are_refused() {
    for bad in [
        "kind = \"constant\"\nsteps = 3",
        "kind = \"step\"",
        "kind = \"step\"\nsteps = 3\nmin_factor = 0.1",
        "kind = \"cosine\"\nmin_factor = 0.1",
        "kind = \"cosine\"\nsteps = 3\nlast = 1",
        "kind = \"wave\"",
    ] {
        assert!(toml::from_str::<ScheduleConfig>(bad).is_err(), "{bad}");
    }
    assert_eq!(toml::from_str::<ScheduleConfig>(""), Ok(ScheduleConfig::default()));
}

#[test]
fn a_schedule_survives_toml() {
    for text in
        ["warmup = 5", "kind = \"step\"\nsteps = 2", "kind = \"cosine\"\nsteps = 9\nscale = \"linear\""]
    {
        let s: ScheduleConfig = toml::from_str(text).expect("valid");
        let back = toml::from_str(&toml::to_string(&s).expect("writes")).expect("reads");
        assert_eq!(s, back);
    }
}

#[test]
fn bad_ranges_are_named() {
    let zero = ScheduleConfig { shape: Shape::Step { steps: 0, gamma: 0.1 }, ..Default::default() };
    let text = zero.validate().expect_err("zero").to_string();
    assert_eq!(text, "[schedule] steps = 0: must be 1 or more");
    let up = ScheduleConfig { shape: Shape::Cosine { steps: 3, min_factor: 1.5 }, ..Default::default() };
    assert_eq!(up.validate().expect_err("above 1").key, "min_factor");
}

#[test]
fn linear_scaling_follows_the_pushes_averaged_into_the_update() {
    let linear = ScheduleConfig { scale: LrScale::Linear, ..Default::default() };
    assert_eq!((linear.factor(3.0, 8), linear.factor(3.0, 1), linear.factor(3.0, 0)), (8.0, 1.0, 1.0));
    assert_eq!(ScheduleConfig::default().factor(3.0, 8), 1.0);
}

#[test]
fn a_fraction_of_a_step_never_leaves_the_range() {
    let s = ScheduleConfig {
        shape: Shape::Cosine { steps: 10, min_factor: 0.2 },
        warmup: 3,
        scale: LrScale::None,
    };
    for i in 0..400 {
        let f = s.factor(f64::from(i) * 0.05, 1);
        assert!((0.0..=1.0).contains(&f), "{f} at {i}");
    }
    assert_eq!(s.factor(1e9, 1), 0.2);
    assert_eq!(s.factor(f64::NAN, 1), s.factor(0.0, 1));
}

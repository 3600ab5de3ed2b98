//! Tests of `sweep`.

use super::*;

fn sweep(score: impl Fn(usize, usize) -> f64) -> Sweep {
    let axis = |key: &str| Axis { key: key.into(), ticks: vec![(0.0, "low".into()), (1.0, "high".into())] };
    let trial = |i: usize| {
        let (a, b) = (i % 4, i / 4);
        let value = Some(score(a, b));
        let set = vec![(format!("a{a}"), a as f64 / 3.0), (format!("b{b}"), b as f64 / 3.0)];
        Trial { trial: i, set, epochs: 1, first: value, value, seconds: 1.0, why: String::new() }
    };
    Sweep {
        job: "<b>job".into(),
        metric: "accuracy".into(),
        axes: vec![axis("optimizer.lr"), axis("</script>")],
        trials: (0..16).map(trial).collect(),
        ..Sweep::default()
    }
}

#[test]
fn a_setting_that_decides_everything_explains_everything() {
    assert_eq!(sweep(|a, _| a as f64).importance(), [Some(1.0), Some(0.0)]);
    assert_eq!(sweep(|_, _| 0.5).importance(), [Some(0.0), Some(0.0)]);
    // Two settings add up, one with twice the weight of the other: four fifths and one fifth, less
    // the share of chance.
    let both = sweep(|a, b| 2.0 * a as f64 + b as f64).importance();
    let [Some(a), Some(b)] = both[..] else { panic!("{both:?}") };
    assert!((a - 0.75).abs() < 0.01 && b < 0.01, "{a} {b}");
    let few = Sweep { trials: sweep(|a, _| a as f64).trials[..1].to_vec(), ..sweep(|_, _| 0.0) };
    assert_eq!(few.importance(), [None, None]);
}

#[test]
fn names_are_text_wherever_they_stand() {
    let page = render_sweep(&sweep(|a, b| (a * b) as f64));
    assert!(!page.contains("<b>job") && page.contains("&lt;b&gt;job"));
    assert_eq!(page.matches("</script>").count(), page.matches("<script").count());
    assert_eq!(page.matches("<tr data-trial").count(), 16);
}

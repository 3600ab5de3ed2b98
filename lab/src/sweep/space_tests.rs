//! Tests of `space`.

use super::*;

const TEXT: &str = r#"
        metric = "loss"
        [space]
        "optimizer.lr" = { min = 0.001, max = 1.0, log = true, points = 4 }
        train = { batch = [32, 64, 128] }
        "model.hidden" = [[64], [128, 64]]
    "#;

#[test]
fn a_grid_goes_through_every_point_once() {
    let space = Space::parse(TEXT).expect("read");
    assert_eq!((space.metric, space.grid()), (Metric::Loss, Ok(24)));
    let all: Vec<_> = (0..24).map(|i| space.set(&space.of_grid(i)).join(" ")).collect();
    let different: std::collections::BTreeSet<_> = all.iter().collect();
    assert_eq!(different.len(), 24);
    for expected in [
        "model.hidden=[64]",
        "model.hidden=[128, 64]",
        "optimizer.lr=0.001",
        "optimizer.lr=0.01",
        "optimizer.lr=1.0",
        "train.batch=128",
    ] {
        assert!(all.iter().any(|s| s.contains(expected)), "{expected}: {all:#?}");
    }
}

#[test]
fn what_is_drawn_depends_on_the_seed_and_the_trial_alone() {
    let space = Space::parse(TEXT).expect("read");
    let all: Vec<_> = (0..200).map(|t| space.drawn(7, t)).collect();
    assert_eq!(all[13], space.drawn(7, 13));
    assert_ne!(all[13], space.drawn(8, 13));
    let lr = space.axes.iter().position(|a| a.key == "optimizer.lr").expect("an axis");
    let rates: Vec<f64> = all.iter().filter_map(|p| p[lr].as_float()).collect();
    assert!(rates.iter().all(|r| (0.001..=1.0).contains(r)));
    // Uniform in the logarithm: a third in each decade.
    let decade = |from: f64| rates.iter().filter(|r| (from..from * 10.0).contains(*r)).count();
    assert!(
        [0.001, 0.01, 0.1].map(decade).iter().all(|n| (40..95).contains(n)),
        "{:?}",
        [0.001, 0.01, 0.1].map(decade)
    );
    for (axis, i) in space.axes.iter().zip(0..) {
        assert!(all.iter().all(|p| (0.0..=1.0).contains(&axis.place(&p[i]))));
    }
}

#[test]
fn what_is_wrong_is_said_with_its_key() {
    for (text, expected) in [
        ("", "no [space]"),
        ("[space]", "empty"),
        ("metric = \"speed\"\n[space]\na = [1]", "\"speed\""),
        ("[space]\na = []", "`a` has no values"),
        ("[space]\na = [1, 2, 1]", "`a` has 1 twice"),
        ("[space]\na = 3", "`a` = 3"),
        ("[space]\na = { min = 1 }", "min and max"),
        ("[space]\na = { min = 2, max = 1 }", "not below"),
        ("[space]\na = { min = 0.0, max = 1.0, log = true }", "above 0"),
        ("[space]\na = { min = 0, max = 1, steps = 3 }", "no `steps`"),
        ("[space]\na = { min = nan, max = 1 }", "no number"),
        ("[space]\na = { min = 0, max = 1, points = 1 }", "2 or more"),
        ("[spice]\na = [1]", "no [space]"),
        ("other = 1\n[space]\na = [1]", "`other`"),
    ] {
        let said = Space::parse(text).expect_err(text);
        assert!(said.contains(expected), "{text}: {said}");
    }
    let range = Space::parse("[space]\na = { min = 0.0, max = 1.0 }").expect("read");
    assert!(range.grid().is_err_and(|e| e.contains("`a`") && e.contains("points")));
    let whole = |points| Space::parse(&format!("[space]\na = {{ min = 1, max = 3, points = {points} }}"));
    assert_eq!(whole(3).expect("valid").grid(), Ok(3));
    assert!(whole(4).is_err_and(|e| e.contains("`a`") && e.contains("two are 2")));
}

#[test]
fn a_relative_path_in_a_space_file_starts_in_its_folder() {
    let scratch = tempfile::tempdir().expect("scratch");
    let file = scratch.path().join("space.toml");
    let text = "[space]\n\"data.path\" = [\"a.csv\", \"/b.csv\"]\n\"train.mode\" = [\"bsp\"]\n";
    std::fs::write(&file, text).expect("a file");
    let space = Space::load(&file).expect("read");
    let points: Vec<Point> = (0..2).map(|i| space.of_grid(i)).collect();
    let words =
        |point: &Point| point.iter().filter_map(Value::as_str).map(str::to_string).collect::<Vec<_>>();
    let whole = scratch.path().join("a.csv").to_string_lossy().into_owned();
    assert_eq!(words(&points[0]), [whole, "bsp".into()]);
    assert_eq!(words(&points[1]), ["/b.csv", "bsp"]);
}

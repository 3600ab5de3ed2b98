//! Tests of `runs`.

use super::*;

fn point(tag: &'static str, wall: f64, value: f64) -> Point {
    Point { tag: tag.into(), value: Value::Number(value), step: 1, wall }
}

#[test]
fn what_was_said_at_one_moment_is_one_point() {
    let all = [
        point("train/loss", 1.0, 0.5),
        point("perf/samples_per_s", 1.0, 100.0),
        point("train/loss", 2.0, f64::NAN),
        point("eval/loss", 2.0, 0.25),
        point("eval/accuracy", 2.0, 0.875),
    ];
    let curves = of(&all);
    let trained = |at, loss, samples| TrainingPoint { at, loss, samples };
    assert_eq!(curves.points, [trained(1000, Some(0.5), Some(100.0)), trained(2000, None, None)]);
    assert_eq!(curves.evaluations, [EvaluationPoint { at: 2000, loss: Some(0.25), accuracy: Some(0.875) }]);
}

#[test]
fn no_name_leads_out_of_the_folder() {
    for name in ["", "..", "../x", "a/b", ".hidden", "a\0b", "/etc"] {
        assert!(curves(Path::new("/tmp"), name).is_err_and(|e| e.contains("no run's name")), "{name}");
    }
    assert!(["mnist-1", "lr=0.1,b=32", "über", "a b", "a&b@1"].into_iter().all(is_name));
}

#[test]
fn runs_are_those_with_a_record_and_what_is_none_is_said() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["digits-1", "digits-2", "no-run"] {
        fs::create_dir(folder.path().join(name)).expect("made");
    }
    for name in ["digits-1", "digits-2"] {
        fs::write(folder.path().join(name).join(METRICS_FILE), "").expect("written");
    }
    let names: Vec<_> = list(folder.path(), None).into_iter().map(|r| r.name).collect();
    assert_eq!(list(folder.path(), Some(&folder.path().join("digits-1"))).len(), 1);
    assert_eq!(names.len(), 2);
    assert!(names.contains(&"digits-1".into()) && names.contains(&"digits-2".into()));
    assert_eq!(curves(folder.path(), "digits-1"), Ok(Curves::default()));
    assert!(curves(folder.path(), "no-run").is_err());
}

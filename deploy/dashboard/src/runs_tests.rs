//! Tests of `runs`.

use super::*;
use paraft_record::{Event, MetricsWriter, Summary};

#[test]
fn no_name_leads_out_of_the_folder() {
    for name in ["", "..", "../x", "a/b", ".hidden", "a\0b", "/etc"] {
        assert!(one(Path::new("/tmp"), name).is_err_and(|e| e.contains("no run's name")), "{name}");
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
    let runs = list(folder.path(), None);
    let names: Vec<_> = runs.iter().map(|r| r.name.as_str()).collect();
    assert_eq!(list(folder.path(), Some(&folder.path().join("digits-1"))).len(), 1);
    assert_eq!(names.len(), 2);
    assert!(names.contains(&"digits-1") && names.contains(&"digits-2"));
    assert!(runs.iter().all(|r| r.row.is_none()), "an empty record has no settings");
    assert!(one(folder.path(), "digits-1").is_err_and(|e| e.contains("digits-1: the record has no first")));
    assert!(one(folder.path(), "no-run").is_err());
}

#[test]
fn a_row_has_the_settings_and_the_results() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path().join("t-1");
    fs::create_dir(&dir).expect("made");
    let mut writer = MetricsWriter::append(dir.join(METRICS_FILE)).expect("a record");
    let run = paraft_record::Run {
        mode: "bsp".into(),
        model: "mlp".into(),
        data: "digits".into(),
        workers: 2,
        lr: 0.5,
        ..paraft_record::Run::default()
    };
    writer.write(&Event::Run(run)).expect("written");
    let summary = Summary {
        switched_to: Some("asp".into()),
        samples: 10,
        final_loss: Some(0.25),
        servers_lost: 1,
        ..Summary::default()
    };
    writer.write(&Event::Summary(summary)).expect("written");
    let row = list(folder.path(), None).remove(0).row.expect("settings");
    let wanted = Row {
        state: "finished",
        mode: "bsp → asp".into(),
        what: "mlp on digits".into(),
        workers: 2,
        lr: 0.5,
        loss: Some(0.25),
        servers_lost: 1,
        ..Row::default()
    };
    assert_eq!(row, wanted);
}

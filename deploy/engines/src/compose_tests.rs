//! Tests of `compose`.

use super::*;
use crate::{
    Part,
    golden::{golden, some_fleet_of_images},
};

fn fleet() -> Fleet {
    let mounts = vec!["/srv/mnist:/data".parse().expect("a mount")];
    Fleet { owner: Some((1000, 1000)), mounts, certs: crate::Certs::InRun, ..some_fleet_of_images() }
}

#[test]
fn the_file_is_as_the_golden_one_and_read_back() {
    let paths = golden("compose", &Compose, &fleet());
    let text = std::fs::read_to_string(&paths[0]).expect("a golden file");
    let all: Value = serde_norway::from_str(&text).expect("YAML");
    let names: Vec<_> = all["services"].as_object().into_iter().flatten().map(|(name, _)| &**name).collect();
    assert_eq!(names.len(), 7, "{names:?}");
    let server = &all["services"]["server-2"];
    assert_eq!(server["environment"]["PARAFT_INDEX"], "2");
    assert!(server["command"].to_string().contains("--until-done"));
}

#[test]
fn values_are_read_as_they_were_given() {
    for odd in [
        "a b", "a\"b", "it's", "100%", "#1", "a: b", "- x", "{a}", "*a", "&a", "!a", "yes", "1e3", "a\nb",
        " ", "ü",
    ] {
        let (dir, at) = (format!("/runs/{odd}"), format!("/{odd}"));
        let mount = crate::Mount { what: odd.into(), at: at.clone() };
        let part = Part { memory: Some(odd.into()), ..fleet().servers };
        let odd = Fleet {
            program: odd.into(),
            image: Some(odd.into()),
            run_dir: dir.clone().into(),
            mounts: vec![mount],
            servers: part,
            ..fleet()
        };
        let text = &Compose.render(&odd).expect("rendered")[0].text;
        let all: Value = serde_norway::from_str(text).expect("YAML");
        let server = &all["services"]["server-0"];
        let name = json!(odd.program);
        assert_eq!((&server["entrypoint"][0], &server["image"]), (&name, &name), "{text}");
        assert_eq!(server["deploy"]["resources"]["limits"]["memory"], name, "{text}");
        let volumes = [&server["volumes"][0]["source"], &server["volumes"][1]["target"]];
        assert_eq!(volumes, [&json!(dir), &json!(at)], "{text}");
    }
}

#[test]
fn a_dollar_is_no_variable() {
    let odd = Fleet { run_dir: "/runs/$HOME".into(), ..fleet() };
    let text = &Compose.render(&odd).expect("rendered")[0].text;
    assert!(!text.replace("$$", "").contains('$'), "{text}");
}

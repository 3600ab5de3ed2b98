//! Golden files of all kinds, as text that is read back and found right by the schemas; and what is wrong on purpose is found.

use super::{Kubernetes, schema::wrongs};
use crate::{
    Certs, Engine, Fleet, Mount, Part,
    golden::{golden, some_fleet_of_images},
};
use serde::Deserialize;
use serde_json::{Value, json};
use std::{fs, path::PathBuf};

const ALL: [(Kubernetes, &str); 3] =
    [(Kubernetes::Sets, "kubernetes"), (Kubernetes::JobSet, "jobset"), (Kubernetes::Trainer, "trainer")];

fn fleet(kind: Kubernetes) -> Fleet {
    let disk = (kind == Kubernetes::Sets).then(|| "10Gi".to_string());
    let mounts = [("runs", "/paraft/run"), ("mnist", "/data")];
    let mounts = mounts.map(|(what, at)| Mount { what: what.into(), at: at.into() });
    Fleet { disk, mounts: mounts.into(), ..some_fleet_of_images() }
}

fn documents(text: &str) -> Vec<Value> {
    let all = serde_norway::Deserializer::from_str(text);
    all.map(|one| Value::deserialize(one).expect("YAML")).collect()
}

/// The manifests among them: what is not Kustomize's.
fn manifests(files: impl IntoIterator<Item = String>) -> Vec<Value> {
    let all = files.into_iter().flat_map(|text| documents(&text));
    all.filter(|m| m["kind"] != "Kustomization").collect()
}

fn rendered(kind: Kubernetes, fleet: &Fleet) -> Vec<Value> {
    manifests(kind.render(fleet).expect("rendered").into_iter().map(|f| f.text))
}

fn of_kind<'a>(all: &'a [Value], kind: &str) -> &'a Value {
    all.iter().find(|m| m["kind"] == kind).unwrap_or_else(|| panic!("no {kind}"))
}

#[test]
fn manifests_match_the_golden_files_and_their_schemas() {
    for (kind, folder) in ALL {
        let paths: Vec<PathBuf> = golden(folder, &kind, &fleet(kind));
        let text = paths.iter().map(|path| fs::read_to_string(path).expect("a golden file"));
        let all = manifests(text);
        assert!(all.len() >= 3, "{all:?}");
        for manifest in &all {
            assert_eq!(wrongs(manifest), Vec::<String>::new(), "{folder}: {}", manifest["kind"]);
        }
        // Kustomize is given all of them.
        let index = fs::read_to_string(paths[0].with_file_name("kustomization.yaml")).expect("one");
        let named = documents(&index)[0]["resources"].as_array().map(Vec::len);
        assert_eq!(named, Some(paths.len() - 1));
    }
}

#[test]
fn what_is_wrong_is_found() {
    let plants: [(Kubernetes, &str, &str, Value, &str); 12] = [
        (Kubernetes::Sets, "StatefulSet", "/spec/podManagmentPolicy", json!("Parallel"), "no such field"),
        (Kubernetes::Sets, "StatefulSet", "/spec/replicas", json!("3"), "is no"),
        (
            Kubernetes::Sets,
            "StatefulSet",
            "/spec/template/spec/containers/0/ports/0/containerPort",
            json!("x"),
            "is no",
        ),
        (Kubernetes::Sets, "Service", "/spec/selectors", json!({}), "no such field"),
        (Kubernetes::Sets, "PodDisruptionBudget", "/spec/maxUnavailable", json!([1]), "is no"),
        (Kubernetes::Sets, "ConfigMap", "/data/job.toml", json!(1), "is no"),
        (Kubernetes::Sets, "Job", "/spec/backofLimitPerIndex", json!(1), "no such field"),
        (Kubernetes::Sets, "Job", "/spec/podFailurePolicy/rules/0", json!({}), "is missing"),
        (
            Kubernetes::JobSet,
            "JobSet",
            "/spec/failurePolicy/rules/1/action",
            json!("RestartJobAndIgnorreMaxRestarts"),
            "none of",
        ),
        (
            Kubernetes::JobSet,
            "JobSet",
            "/spec/replicatedJobs/0/template/spec/backofLimit",
            json!(0),
            "no such field",
        ),
        (Kubernetes::Trainer, "ClusterTrainingRuntime", "/spec/mlPolicy/numNode", json!(2), "no such field"),
        (Kubernetes::Trainer, "TrainJob", "/spec/runtimeRef", json!({}), "is missing"),
    ];
    for (kind, object, place, value, why) in plants {
        let all = rendered(kind, &fleet(kind));
        let mut planted = of_kind(&all, object).clone();
        let (parent, key) = place.rsplit_once('/').expect("a place");
        let parent = planted.pointer_mut(parent).unwrap_or_else(|| panic!("{place}"));
        match parent {
            Value::Array(all) => all[key.parse::<usize>().expect("a number")] = value,
            other => other[key] = value,
        }
        let found = wrongs(&planted);
        assert!(found.iter().any(|w| w.contains(why)), "{place}: {found:?}");
    }
    assert!(wrongs(&json!({"apiVersion": "apps/v1", "kind": "StatefullSet"}))[0].contains("no schema"));
}

#[test]
fn manifests_contain_the_fleets_options() {
    let plain = Fleet { certs: Certs::Insecure, ..some_fleet_of_images() };
    let all = rendered(Kubernetes::Sets, &plain);
    let pod = &of_kind(&all, "StatefulSet")["spec"]["template"]["spec"];
    let apart = &pod["affinity"]["podAntiAffinity"];
    assert!(apart.get("requiredDuringSchedulingIgnoredDuringExecution").is_some(), "{apart}");
    assert_eq!(pod["terminationGracePeriodSeconds"], 30);
    let words = pod["containers"][0]["args"].to_string();
    assert!(
        !words.contains("--certs") && words.contains("--insecure") && !words.contains("--until-done"),
        "{words}"
    );
    // A partition must not have servers started again that are well.
    let probes = |kind: &str| all.iter().filter(|m| m.to_string().contains(kind)).count();
    assert_eq!((probes("livenessProbe"), probes("readinessProbe")), (0, 1));
    assert!(of_kind(&all, "StatefulSet")["spec"].get("volumeClaimTemplates").is_none());
    let env = pod["containers"][0]["env"].to_string();
    assert!(
        env.contains("digits-servers-0.digits-servers:7071,digits-servers-1.digits-servers:7071"),
        "{env}"
    );

    let together = Fleet { spread: false, workers: Part::default(), ..plain.clone() };
    let all = rendered(Kubernetes::Sets, &together);
    assert!(all.iter().all(|m| m["kind"] != "Job"), "a fleet that stands has no workers");
    let pod = &of_kind(&all, "StatefulSet")["spec"]["template"]["spec"];
    let apart = &pod["affinity"]["podAntiAffinity"];
    assert!(apart.get("preferredDuringSchedulingIgnoredDuringExecution").is_some(), "{apart}");

    let secret = Fleet { workers: Part::default(), ..some_fleet_of_images() };
    let text = of_kind(&rendered(Kubernetes::Sets, &secret), "StatefulSet").to_string();
    assert!(text.contains(r#"{"defaultMode":256,"secretName":"digits-peer"}"#), "{text}");
    assert!(text.contains(r#""--certs","/etc/paraft/certs""#), "{text}");
}

#[test]
fn what_kubernetes_cannot_have_is_refused() {
    let fine = some_fleet_of_images();
    let why = |kind: Kubernetes, fleet: Fleet| kind.render(&fleet).expect_err("refused").to_string();
    for name in ["1st", "a_b", "-a", "a-", "", &"a".repeat(41)] {
        let said = why(Kubernetes::Sets, Fleet { name: name.into(), ..fine.clone() });
        assert!(said.contains("--set name="), "{said}");
    }
    assert!(why(Kubernetes::Sets, Fleet { image: None, ..fine.clone() }).contains("--image"));
    assert!(why(Kubernetes::Sets, Fleet { time: Some("1h".into()), ..fine.clone() }).contains("--time"));
    for kind in [Kubernetes::JobSet, Kubernetes::Trainer] {
        assert!(why(kind, Fleet { workers: Part::default(), ..fine.clone() }).contains("--on kubernetes"));
        assert!(why(kind, Fleet { disk: Some("1Gi".into()), ..fine.clone() }).contains("--server-disk"));
    }
    assert_eq!(super::name_of("Digits-2").expect("right"), "digits-2");
}

#[test]
fn a_job_file_of_any_text_is_read_back_as_it_is() {
    for job in [
        "",
        "a",
        "name = \"x: # y\"\n",
        "  indented\n\n\n",
        "tab\there\r\nkey: |\n  x\n",
        "---\n{{ a }} é \u{1}\n",
    ] {
        let fleet = Fleet { job: job.into(), ..some_fleet_of_images() };
        let all = rendered(Kubernetes::Sets, &fleet);
        assert_eq!(of_kind(&all, "ConfigMap")["data"]["job.toml"], job, "{job:?}");
    }
}

#[test]
fn values_are_read_as_they_were_given() {
    for odd in
        ["a b", "a\"b", "it's", "100%", "#1", "a: b", "- x", "{a}", "*a", "yes", "1e3", "a\nb", " ", "ü"]
    {
        let (what, at) = (odd.to_string(), format!("/{odd}"));
        let mounts = vec![Mount { what: what.clone(), at: at.clone() }];
        let part = Part { memory: Some(what.clone()), ..some_fleet_of_images().servers };
        let (program, image) = (what.clone(), Some(what));
        let fleet = Fleet { mounts, servers: part, program, image, ..some_fleet_of_images() };
        let all = rendered(Kubernetes::Sets, &fleet);
        let pod = &of_kind(&all, "StatefulSet")["spec"]["template"]["spec"];
        let one = &pod["containers"][0];
        assert_eq!([&one["image"], &one["command"][0]], [&json!(odd); 2]);
        assert_eq!(one["resources"]["limits"]["memory"], json!(odd));
        let claims = pod["volumes"].as_array().expect("volumes").last().expect("the mount");
        assert_eq!(claims["persistentVolumeClaim"]["claimName"], json!(odd));
        let paths = one["volumeMounts"].as_array().expect("mounts").last().expect("the mount");
        assert_eq!(paths["mountPath"], json!(at));
    }
    let fleet = Fleet { program: "/opt/$(HOME)/x".into(), ..some_fleet_of_images() };
    let all = rendered(Kubernetes::Sets, &fleet);
    let command = &of_kind(&all, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]["command"];
    assert_eq!(command, &json!(["/opt/$$(HOME)/x"]), "no variable");
}

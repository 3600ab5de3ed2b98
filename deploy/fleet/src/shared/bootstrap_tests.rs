//! Tests of `bootstrap`.

use super::*;
use crate::shared::Address;

struct Run {
    scratch: tempfile::TempDir,
    folder: Folder,
}

impl Run {
    fn new() -> Self {
        let scratch = tempfile::tempdir().expect("scratch");
        let folder = Folder::of(scratch.path()).expect("folder");
        Self { scratch, folder }
    }

    /// Server `me` decides, with this data folder.
    fn way(&self, me: u32, port: u16, data: &str, identity: bool, answers: Option<u64>) -> JoinDecision {
        let data = self.scratch.path().join(data);
        std::fs::create_dir_all(&data).expect("data");
        let at = Address { address: format!("h:{port}"), host: "h".into(), node: "n".into(), attempt: 0 };
        self.folder.publish(&format!("server-{me}"), &at).expect("published");
        let ask = |_: &[String]| answers.map(|fleet| RunningFleet { fleet, servers: vec!["h:9".into()] });
        self.folder.way(me, 3, &data, identity, ask).expect("a way")
    }

    fn listed(&self, me: u32, port: u16, data: &str, identity: bool) -> Vec<String> {
        match self.way(me, port, data, identity, None) {
            JoinDecision::Listed(list) => list,
            other => panic!("{other:?}"),
        }
    }
}

fn waits(way: &JoinDecision) -> &str {
    match way {
        JoinDecision::Wait(why) | JoinDecision::Missed(why) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_place_without_an_identity_is_taken_by_one_folder_only() {
    let run = Run::new();
    assert!(waits(&run.way(0, 1, "a", false, None)).contains("1 of 3"));
    assert!(waits(&run.way(2, 3, "c", false, None)).contains("missing: s1"));
    assert!(waits(&run.way(1, 2, "b", false, None)).contains("agreed on"));
    // A server that has moved is listed with its new address.
    assert_eq!(run.listed(0, 7, "a", false), ["h:7", "h:2", "h:3"]);
    assert_eq!(run.listed(1, 2, "b", false), ["h:7", "h:2", "h:3"]);
    // Killed before it had an identity: the same folder may retry, another may not.
    assert_eq!(run.listed(0, 8, "a", false)[0], "h:8");
    assert!(waits(&run.way(0, 9, "a2", false, Some(5))).contains("being founded"));
    run.folder.belongs(5).expect("first");
    assert!(waits(&run.way(0, 9, "a2", false, None)).contains("no server answers"));
    assert!(waits(&run.way(0, 9, "a2", false, Some(6))).contains("another fleet"));
    assert_eq!(
        run.way(0, 9, "a2", false, Some(5)),
        JoinDecision::Joins(vec!["h:2".into(), "h:3".into(), "h:9".into()])
    );
    // A server with an identity rejoins as itself.
    assert_eq!(run.listed(0, 8, "a", true)[0], "h:8");
    assert_eq!(
        run.way(0, 9, "a2", true, None),
        JoinDecision::Joins(vec!["h:9".into(), "h:2".into(), "h:3".into()])
    );
    assert!(run.folder.belongs(6).expect_err("another").message().contains("run's is"));
}

#[test]
fn a_data_folder_of_another_run_is_refused() {
    let run = Run::new();
    let data = run.scratch.path().join("a");
    std::fs::create_dir_all(&data).expect("data");
    let why = run.folder.way(0, 3, &data, true, |_| None).expect_err("refused");
    assert!(why.message().contains("does not know"), "{}", why.message());
}

#[test]
fn the_first_to_say_how_it_ended_is_believed() {
    use crate::shared::JobEnd;
    let run = Run::new();
    let failed = JobEnd::Failed { worker: 1, node: "n2".into(), code: 78, said: "no".into() };
    assert_eq!(run.folder.ended().expect("readable"), None);
    assert_eq!(run.folder.end(&failed).expect("said"), failed);
    assert_eq!(run.folder.end(&JobEnd::Done).expect("said"), failed);
    let start =
        |lost, latest: Option<&str>| run.folder.start_after(lost, || latest.map(Into::into)).expect("read");
    assert_eq!(start(0, None), None);
    assert_eq!(start(0, Some("c")), None, "whoever came first began anew");
    assert_eq!(start(7, Some("c")), Some("c".into()));
}

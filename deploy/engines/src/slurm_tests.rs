//! Tests of `slurm`.

use super::*;
use crate::golden::{golden, some_fleet};

#[test]
fn the_scripts_are_as_in_the_golden_files() {
    for path in golden("slurm", &Slurm, &some_fleet()) {
        let checked = std::process::Command::new("bash").arg("-n").arg(&path).status().expect("bash");
        assert!(checked.success(), "{}", path.display());
    }
}

/// The words of the directives, parsed as `sbatch` does (`_get_argument` in its `opt.c`).
fn read(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    for line in text.lines().filter_map(|line| line.strip_prefix("#SBATCH")) {
        let mut rest = line.chars().peekable();
        loop {
            while rest.next_if(|c| c.is_ascii_whitespace()).is_some() {}
            let (mut word, mut quote, mut any) = (String::new(), None, false);
            while let Some(c) = rest.next_if(|c| quote.is_some() || !c.is_ascii_whitespace()) {
                any = true;
                match (c, quote) {
                    ('\\', _) => word.extend(rest.next()),
                    (c, Some(q)) if c == q => quote = None,
                    (c, Some(_)) => word.push(c),
                    ('"' | '\'', None) => quote = Some(c),
                    ('#', None) => {
                        rest.by_ref().for_each(drop);
                        break;
                    }
                    (c, None) => word.push(c),
                }
            }
            assert_eq!(quote, None, "unmatched in {line}");
            if !any {
                break;
            }
            words.push(word);
        }
    }
    words
}

#[test]
fn directives_are_read_as_they_were_given() {
    let odd = ["two words", "a\"b", "it's", "$HOME", "100%", "#1", "back\\slash", "\"", "", "ü"];
    let args: Vec<String> = odd.iter().map(|o| format!("--comment={o}")).collect();
    let (time, memory) = (Some("1 day".to_string()), Some("8 G".to_string()));
    let run_dir = "/my runs/50% #1 \"x\" 'y' $z".into();
    let servers = Part { memory, ..some_fleet().servers };
    let fleet = Fleet { args: args.clone(), time, servers, run_dir, ..some_fleet() };
    for file in Slurm.render(&fleet).expect("rendered") {
        let words = read(&file.text);
        assert_eq!(&words[words.len() - args.len()..], &args[..]);
        let chdir = format!("--chdir={}", fleet.run_dir.display());
        assert!(words.contains(&chdir) && words.contains(&"--time=1 day".to_string()), "{words:?}");
        assert!(words.iter().any(|w| w.starts_with("--output=/my runs/50%% #1")), "{words:?}");
        assert!(words.iter().all(|w| w.starts_with("--")), "{words:?}");
        assert!(!file.name.starts_with("server") || words.contains(&"--mem=8 G".to_string()), "{words:?}");
        let scratch = tempfile::NamedTempFile::new().expect("scratch");
        std::fs::write(scratch.path(), &file.text).expect("written");
        let checked = std::process::Command::new("bash").arg("-n").arg(scratch.path()).status();
        assert!(checked.expect("bash").success(), "{}", file.text);
    }
}

#[test]
fn value_of_two_lines_is_refused() {
    for fleet in [
        Fleet { args: vec!["--comment=a\n#SBATCH --uid=0".into()], ..some_fleet() },
        Fleet { run_dir: "/a\nb".into(), ..some_fleet() },
        Fleet { run_dir: "/a\\b".into(), ..some_fleet() },
        Fleet { time: Some("1:00\n".into()), ..some_fleet() },
        Fleet { program: "/a\rb".into(), ..some_fleet() },
    ] {
        let wrong = Slurm.render(&fleet).expect_err("refused");
        assert!(wrong.help.is_some(), "{wrong:?}");
    }
}

#[test]
fn lines_of_squeue_are_read() {
    let running = member(Role::Server, "2|RUNNING|n5|None|2026-11-26T03:14:22").expect("one");
    assert_eq!((running.index, &*running.node, &*running.why), (Some(2), "n5", "since 2026-11-26T03:14:22"));
    let waits = member(Role::Worker, "0|PENDING||BeginTime|2026-11-26T03:16:23").expect("one");
    assert_eq!(waits.why, "BeginTime, not before 2026-11-26T03:16:23");
    assert_eq!(member(Role::Worker, "N/A|PENDING||Resources|N/A").expect("one").index, None);
    assert_eq!(member(Role::Worker, "nothing"), None);
}

//! Tests of `systemd`.

use super::*;
use crate::{
    Part,
    golden::{golden, some_fleet},
};
use std::{fs, process::Command};

fn fleet() -> Fleet {
    // A program that is there: what verifies units looks for it.
    Fleet { time: None, program: "/bin/true".into(), args: Vec::new(), ..some_fleet() }
}

/// What systemd says against a unit; `None`: there is no systemd here.
fn said_of(path: &Path) -> Option<String> {
    let out = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(path).output().ok()?;
    let said = [out.stdout, out.stderr].concat();
    Some(String::from_utf8_lossy(&said).trim().to_string())
}

#[test]
fn systemd_units_match_the_golden_files_and_verify() {
    for path in golden("systemd", &Systemd, &fleet()) {
        match said_of(&path) {
            Some(said) => assert_eq!(said, "", "{}", path.display()),
            None => eprintln!("skipped: no systemd-analyze"),
        }
    }
}

#[test]
fn systemd_finds_what_is_wrong() {
    let scratch = tempfile::tempdir().expect("scratch");
    let right = template(&fleet(), Role::Server);
    for (from, to) in [
        ("Restart=on-failure", "Restrat=on-failure"),
        ("Type=exec", "Type=exce"),
        ("TimeoutStopSec=30", "TimeoutStopSec=x"),
        ("ExecStart=/bin/true", "ExecStart=bin/nothing"),
    ] {
        assert!(right.contains(from), "{from}");
        let path = scratch.path().join("paraft-t-server@.service");
        fs::write(&path, right.replace(from, to)).expect("written");
        match said_of(&path) {
            Some(said) => assert_ne!(said, "", "{to}"),
            None => eprintln!("skipped: no systemd-analyze"),
        }
    }
}

#[test]
fn what_systemctl_shows_is_read() {
    let name = unit("t", Role::Worker, Some(3));
    let handle = Handle { parts: vec![(Role::Worker, name.clone())], ..Handle::default() };
    let block = format!(
        "Id={name}\nActiveState=failed\nSubState=failed\nStateChangeTimestamp=then\nNRestarts=2\nExecMainStatus=78"
    );
    let m = member(&handle, &block).expect("a member");
    assert_eq!(
        (m.index, &*m.state, &*m.why),
        (Some(3), "failed (failed)", "since then, code 78, started again 2 times")
    );
    assert_eq!(member(&handle, "Id=other.service"), None);
}

const ODD: [&str; 9] = ["a b", "a\"b", "it's", "$HOME", "${x}", "50%", "%i", "a#b;c", "back\\slash"];

#[test]
fn systemd_finds_the_program_whatever_its_name() {
    let scratch = tempfile::tempdir().expect("scratch");
    for odd in ODD {
        let program = scratch.path().join(odd);
        fs::copy("/bin/true", &program).expect("copied");
        let fleet = Fleet { program: program.to_string_lossy().into(), run_dir: program, ..fleet() };
        if odd.contains(['"', '\'', '\\']) {
            assert!(Systemd.render(&fleet).is_err(), "{odd}");
            continue;
        }
        let path = scratch.path().join("paraft-t-server@.service");
        fs::write(&path, &Systemd.render(&fleet).expect("rendered")[0].text).expect("written");
        // It says so of a program that is not there.
        match said_of(&path) {
            Some(said) => assert_eq!(said, "", "{odd}"),
            None => eprintln!("skipped: no systemd-analyze"),
        }
    }
}

/// The words of a command as systemd reads them (systemd.service(5), "Command lines"), of an instance `7`.
fn read(line: &str) -> Vec<String> {
    let line = line.replace("%%", "\0").replace("%i", "7").replace('\0', "%");
    let (mut words, mut rest) = (Vec::new(), line.chars().peekable());
    while rest.peek().is_some() {
        let (mut word, mut quote) = (String::new(), None);
        while let Some(c) = rest.next_if(|c| quote.is_some() || *c != ' ') {
            match (c, quote) {
                ('\\', _) => word.extend(rest.next()),
                (c, Some(q)) if c == q => quote = None,
                ('"' | '\'', None) if word.is_empty() => quote = Some(c),
                (c, _) => word.push(c),
            }
        }
        rest.next();
        // Anywhere but in the program's name a `$` begins a variable, and `$$` is one.
        let plain = word.replace("$$", "\0");
        let name = words.is_empty();
        assert!(name || !plain.contains('$'), "a variable in {word}");
        words.push(if name { word } else { plain.replace('\0', "$") });
    }
    words
}

#[test]
fn commands_are_read_as_they_were_given() {
    for odd in ODD {
        let dir = format!("/runs/{odd}");
        let program = format!("/opt/{}", odd.replace(['"', '\'', '\\'], ""));
        let fleet = Fleet { program, run_dir: dir.clone().into(), ..fleet() };
        for file in Systemd.render(&fleet).expect("rendered") {
            let line = file.text.lines().find_map(|l| l.strip_prefix("ExecStart=")).expect("a command");
            let words = read(line);
            let at = |flag: &str| words.iter().position(|w| w == flag).map(|n| &*words[n + 1]);
            assert_eq!((&*words[0], at("--run-dir")), (&*fleet.program, Some(&*dir)), "{line}");
            assert_eq!(words.last(), Some(&format!("{dir}/job.toml")), "{line}");
        }
    }
}

#[test]
fn value_of_two_lines_is_refused() {
    let memory = Part { memory: Some("8G\nUser=root".into()), ..fleet().servers };
    for fleet in [
        Fleet { run_dir: "/a\nb".into(), ..fleet() },
        Fleet { program: "/a\nb".into(), ..fleet() },
        Fleet { servers: memory, ..fleet() },
    ] {
        assert!(Systemd.render(&fleet).is_err());
    }
}

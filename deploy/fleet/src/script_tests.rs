//! Tests of `script`.

use super::*;

fn words(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_string).collect()
}

#[test]
fn it_is_called_as_people_call_it() {
    for (line, called) in [
        ("python3 /a/train.py --lr 0.1", "train.py"),
        ("/venv/bin/python3.12 train.py", "train.py"),
        ("python3 -m pkg.train --lr 0.1", "pkg.train"),
        ("/a/run.sh config.toml", "run.sh"),
        ("sh run.sh", "run.sh"),
        ("python3 -u", "python3"),
    ] {
        assert_eq!(name(&words(line)), called, "{line}");
    }
}

#[test]
fn what_cannot_be_started_is_said_with_why() {
    let scratch = tempfile::tempdir().expect("scratch");
    let path = |name: &str| scratch.path().join(name).to_string_lossy().into_owned();
    fs::write(path("plain.sh"), "").expect("a file");
    for (line, why) in [
        (vec!["no-such-program".to_string()], "on the PATH"),
        (vec![path("none.sh")], "cannot be started"),
        (vec![path("plain.sh")], "not executable"),
        (vec![path("")], "is a folder"),
        (vec!["sh".into(), path("none.py")], "cannot be read"),
    ] {
        let said = check(&line).expect_err(why);
        assert!(said.message().contains(why), "{line:?}: {}", said.message());
    }
    assert!(check(&words("sh -c exit")).is_ok());
    let mut relative = words("./plain.sh plain.sh other");
    absolute(&mut relative, scratch.path());
    assert!(Path::new(&relative[0]).is_file() && Path::new(&relative[1]).is_absolute(), "{relative:?}");
    assert_eq!(relative[2], "other");
}

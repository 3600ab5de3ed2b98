//! Tests of `config`.

use super::*;

#[test]
fn unknown_and_missing_keys_are_refused() {
    for bad in [
        "kind = \"digits\"\nextra = 1",
        "kind = \"idx\"",
        "kind = \"idx\"\npath = \"a\"\nlabel = \"last\"",
        "kind = \"csv\"\npath = \"a\"\nheaders = \"yes\"",
        "kind = \"csv\"\npath = \"a\"\nlabel = -1",
        "kind = \"csv\"\npath = \"a\"\nlabel = 1.5",
        "kind = \"csv\"\npath = \"a\"\nignore = \"id\"",
        "kind = \"csv\"\npath = \"a\"\nignore = [-1]",
        "kind = \"csv\"\npath = \"a\"\ntask = \"ranking\"",
        "kind = \"parquet\"",
        "path = \"a\"",
    ] {
        assert!(toml::from_str::<DataConfig>(bad).is_err(), "{bad}");
    }
}

#[test]
fn a_config_survives_toml() {
    for text in [
        "kind = \"digits\"",
        "kind = \"idx\"\npath = \"mnist\"",
        "kind = \"csv\"\npath = \"a.csv\"\nlabel = 3\ntest_fraction = 0.5",
        "kind = \"csv\"\npath = \"a.csv\"\nlabel = \"none\"\ntest_path = \"b.csv\"\nscale = 2",
        "kind = \"csv\"\npath = \"a.csv\"\nlabel = \"price\"\ntask = \"regression\"\nignore = [\"id\", 4]",
        "kind = \"text\"\npath = \"a.txt\"\ncontext = 4",
    ] {
        let config: DataConfig = toml::from_str(text).expect(text);
        let back: DataConfig = toml::from_str(&toml::to_string(&config).expect("writes")).expect("reads");
        assert_eq!(config, back);
    }
}

#[test]
fn text_loads_as_samples() {
    let dir = tempfile::tempdir().expect("temp dir");
    std::fs::write(dir.path().join("a.txt"), "to be or not to be".repeat(9)).expect("writes");
    let config: DataConfig = toml::from_str("kind = \"text\"\npath = \"a.txt\"\ncontext = 4").expect("valid");
    let split = config.load(dir.path()).expect("splits");
    assert_eq!((split.train.len(), split.test.len()), (145 / 4, 15 / 4));
}

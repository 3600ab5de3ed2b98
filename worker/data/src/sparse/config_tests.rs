//! Tests of `config`.

use super::*;
use std::fs;

fn config(text: &str) -> DataConfig {
    toml::from_str(text).expect(text)
}

#[test]
fn a_config_survives_toml_and_refuses_other_keys() {
    for text in [
        "kind = \"libsvm\"\npath = \"a\"\ntask = \"regression\"\nhash_bits = 20",
        "kind = \"vw\"\npath = \"a\"\ntest_path = \"b\"\nbits = 20\nhash = \"all\"\nconstant = false",
        "kind = \"criteo\"\npath = \"a\"\ntest_fraction = 0.2\nsplit_seed = 3",
        "kind = \"ratings\"\npath = \"a\"\nids = \"texts\"",
        "kind = \"clicks\"\nsamples = 100\nmax_categories = 50",
    ] {
        let config = config(text);
        let back: DataConfig = toml::from_str(&toml::to_string(&config).expect("writes")).expect("reads");
        assert_eq!(config, back);
        assert!(config.is_sparse() && config.load(Path::new(".")).is_err());
        assert!(toml::from_str::<DataConfig>(&format!("{text}\nlabel = \"x\"")).is_err(), "{text}");
    }
    assert!(config("kind = \"digits\"").load_sparse(Path::new(".")).is_err());
}

#[test]
fn files_and_streams_load_and_have_digests() {
    let dir = tempfile::tempdir().expect("a folder");
    let rows: String = (0..20).map(|i| format!("{} {}:1\n", i % 2, i + 1)).collect();
    fs::write(dir.path().join("a"), &rows).expect("writes");
    fs::write(dir.path().join("b"), "1 3:1\n").expect("writes");
    let load =
        |more: &str| config(&format!("kind = \"libsvm\"\npath = \"a\"\n{more}")).load_sparse(dir.path());
    let fraction = load("test_fraction = 0.25").expect("loads");
    assert_eq!((fraction.train.len(), fraction.test.len(), fraction.classes), (15, 5, true));
    let other = load("test_fraction = 0.25\nsplit_seed = 1").expect("loads");
    assert_ne!(fraction.digest(), other.digest());
    assert_eq!(fraction.digest(), load("test_fraction = 0.25").expect("loads").digest());
    assert_ne!(fraction.digest(), load("test_fraction = 0.25\nhash_bits = 9").expect("loads").digest());
    let beside = load("test_path = \"b\"").expect("loads");
    assert_eq!((beside.train.len(), beside.test.len()), (20, 1));
    assert_eq!(beside.train.mean_label(), Some(0.5));
    for bad in [
        "test_path = \"b\"\ntest_fraction = 0.5",
        "test_fraction = 1.5",
        "hash_bits = 65",
        "test_path = \"c\"",
    ] {
        assert!(load(bad).is_err(), "{bad}");
    }
    let clicks =
        |more: &str| config(&format!("kind = \"clicks\"\nsamples = 50\n{more}")).load_sparse(dir.path());
    let all = clicks("").expect("computes");
    assert_eq!((all.train.len(), all.test.len(), all.train.fields(), all.train.dense()), (45, 5, 26, 13));
    assert_ne!(all.digest(), clicks("seed = 1").expect("computes").digest());
    assert!(clicks("drift = 2.0").is_err());
}

//! Every seed through its target, with the ordinary compiler: what a fuzzer once found stays found.

use paraft_decoders::TARGETS;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// A corpus is read by people and kept in the repository: a few inputs of some hundred bytes.
const MAX_SEED: usize = 2048;
const MAX_SEEDS: usize = 24;

#[test]
fn every_target_passes_its_seeds() {
    let corpus = fuzz().join("corpus");
    for (name, target) in TARGETS {
        let seeds: Vec<_> =
            fs::read_dir(corpus.join(name)).expect(name).flatten().map(|f| f.path()).collect();
        assert!((2..=MAX_SEEDS).contains(&seeds.len()), "{name} has {} seeds", seeds.len());
        for seed in seeds {
            let bytes = fs::read(&seed).expect("a seed");
            assert!(bytes.len() <= MAX_SEED, "{} has {} bytes", seed.display(), bytes.len());
            println!("{}", seed.display()); // the last one is the culprit
            target(&bytes);
        }
    }
}

#[test]
fn every_target_has_its_binary_and_every_binary_its_target() {
    let manifest = fs::read_to_string(fuzz().join("Cargo.toml")).expect("fuzz/Cargo.toml");
    let mut bins: Vec<_> =
        manifest.split("[[bin]]\nname = \"").skip(1).filter_map(|b| b.split('"').next()).collect();
    bins.sort_unstable();
    assert_eq!(bins, TARGETS.map(|(name, _)| name));
    for name in bins {
        let source = fs::read_to_string(fuzz().join(format!("fuzz_targets/{name}.rs"))).expect(name);
        assert!(source.contains("fuzz_target!(|data: &[u8]| paraft_decoders::"), "{name}");
        assert!(source.contains(&format!("::{name}(data)")), "{name} runs another target");
    }
}

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
}

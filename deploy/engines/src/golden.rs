//! For the tests of all engines: a fleet, and what was once found right to be rendered of it.

use crate::{Certs, Engine, Fleet, Part};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// A fleet that asks for everything that every engine has.
pub(crate) fn some_fleet() -> Fleet {
    Fleet {
        name: "digits".into(),
        job: "name = \"digits\"\n\n[model]\nkind = \"mlp\"\n\n[data]\nkind = \"digits\"\n".into(),
        program: "/opt/paraft/bin/paraft".into(),
        run_dir: "/shared/runs/digits-1".into(),
        servers: Part { count: 3, cpus: 2, gpus: 0, memory: Some("8G".into()) },
        workers: Part { count: 4, cpus: 8, gpus: 1, memory: None },
        until_done: true,
        grace: 20,
        restarts: 10,
        time: Some("2:00:00".into()),
        spread: true,
        port: 7071,
        args: vec!["--partition=batch".into()],
        ..Fleet::default()
    }
}

/// The same for an engine that runs images.
pub(crate) fn some_fleet_of_images() -> Fleet {
    Fleet {
        program: "paraft".into(),
        image: Some("registry.example/paraft:0.1.0".into()),
        time: None,
        certs: Certs::Each { server: "digits-peer".into(), worker: "digits-worker".into() },
        args: Vec::new(),
        ..some_fleet()
    }
}

/// Compares what is rendered with the files of this folder, which it writes where `PARAFT_BLESS` is set; their paths.
pub(crate) fn golden(folder: &str, engine: &dyn Engine, fleet: &Fleet) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(folder);
    let files = engine.render(fleet).expect("rendered");
    if std::env::var_os("PARAFT_BLESS").is_some() {
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder");
        files.iter().for_each(|f| fs::write(folder.join(&f.name), &f.text).expect("written"));
    }
    let there = fs::read_dir(&folder).expect("golden files: PARAFT_BLESS=1 writes them");
    let mut names: Vec<_> = there.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    let mut rendered: Vec<_> = files.iter().map(|f| f.name.clone()).collect();
    names.sort();
    rendered.sort();
    assert_eq!(rendered, names, "PARAFT_BLESS=1 writes them anew");
    for file in &files {
        let path = folder.join(&file.name);
        let text = fs::read_to_string(&path).expect("a golden file");
        assert_eq!(file.text, text, "{}: PARAFT_BLESS=1 writes it anew", path.display());
    }
    names.iter().map(|name| folder.join(name)).collect()
}

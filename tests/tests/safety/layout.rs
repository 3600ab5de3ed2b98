//! The structure of the code: which crate may depend on which. ARCHITECTURE.md says why.

use anyhow::{Context, Result};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Our crates, and for each the crates that it may use. A missing name is a new crate: add it here and to
/// ARCHITECTURE.md.
const EDGES: [(&str, &[&str]); 36] = [
    ("simd", &[]),
    ("common", &["simd"]),
    ("host", &[]),
    ("tls", &[]),
    ("compute", &["tls", "simd"]),
    ("data", &["host", "common"]),
    ("proto", &["common"]),
    ("record", &["common"]),
    ("trace", &["common"]),
    ("checkpoint", &["common"]),
    ("models", &["compute", "common"]),
    ("job", &["models", "data", "common"]),
    ("lanes", &["proto", "tls", "common"]),
    ("session", &["proto", "common"]),
    ("trainer", &["session", "common"]),
    ("client", &["session", "lanes", "proto", "tls", "trace", "host", "common"]),
    ("proof", &["worker", "client", "models", "data", "common"]),
    ("store", &["common"]),
    ("changes", &["common"]),
    ("raft", &["changes", "store", "lanes", "proto", "tls", "host", "common"]),
    ("server", &["raft", "changes", "store", "session", "lanes", "proto", "tls", "trace", "host", "common"]),
    (
        "worker",
        &[
            "job",
            "client",
            "trainer",
            "checkpoint",
            "compute",
            "models",
            "data",
            "record",
            "trace",
            "tls",
            "host",
            "common",
            "simd",
        ],
    ),
    (
        "sim",
        &["server", "proto", "worker", "session", "trainer", "models", "data", "record", "trace", "common"],
    ),
    ("fake-cuda", &[]),
    ("decoders", &["common", "proto", "lanes", "store", "server", "checkpoint", "data", "record", "worker"]),
    ("example-cartpole", &["worker", "tls"]),
    ("example-custom-model", &["worker", "models", "data", "common"]),
    ("example-own-loop", &["worker", "models", "data", "common"]),
    ("example-serve-digits", &["worker", "tls"]),
    ("python", &["worker", "tls", "host"]),
    ("engines", &[]),
    ("dashboard", &["fleet", "client", "record", "tls", "proto", "host", "common"]),
    (
        "fleet",
        &["engines", "worker", "client", "checkpoint", "record", "tls", "trace", "proto", "host", "common"],
    ),
    (
        "lab",
        &[
            "fleet",
            "proof",
            "sim",
            "dashboard",
            "server",
            "worker",
            "client",
            "checkpoint",
            "record",
            "models",
            "data",
            "compute",
            "proto",
            "tls",
            "host",
            "common",
            "simd",
        ],
    ),
    (
        "deploy",
        &[
            "lab",
            "fleet",
            "dashboard",
            "engines",
            "server",
            "store",
            "worker",
            "client",
            "checkpoint",
            "record",
            "trace",
            "models",
            "compute",
            "proto",
            "tls",
            "host",
            "common",
            "simd",
        ],
    ),
    (
        "tests",
        &[
            "common",
            "tls",
            "lanes",
            "host",
            "compute",
            "data",
            "proto",
            "record",
            "trace",
            "models",
            "client",
            "fleet",
            "server",
            "store",
            "worker",
            "checkpoint",
            "proof",
            "sim",
        ],
    ),
];

/// Unsafe code: CUDA, one call of the allocator and one that maps a file, memory shared by two processes,
/// Python's memory, and the fakes of the CUDA libraries.
const MAY_BE_UNSAFE: [&str; 5] = ["host", "compute", "lanes", "python", "fake-cuda"];

struct Package {
    dir: PathBuf,
    /// Ordinary and build dependencies: what a user of the crate gets.
    dependencies: BTreeSet<String>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_path_buf).unwrap_or_default()
}

/// Our packages, by name without `paraft-`.
fn packages() -> Result<BTreeMap<String, Package>> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["metadata", "--no-deps", "--format-version", "1", "--offline"]).current_dir(root());
    let out = command.output().context("cargo metadata")?;
    anyhow::ensure!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let metadata: Value = serde_json::from_slice(&out.stdout)?;
    let text = |v: &Value| v.as_str().unwrap_or_default().to_string();
    let list = |v: &Value| v.as_array().cloned().unwrap_or_default();
    Ok(list(&metadata["packages"])
        .iter()
        .map(|p| {
            let name = text(&p["name"]).trim_start_matches("paraft-").to_string();
            let dir =
                PathBuf::from(text(&p["manifest_path"])).parent().map(Path::to_path_buf).unwrap_or_default();
            let used = list(&p["dependencies"]).into_iter().filter(|d| d["kind"] != "dev");
            (name, Package { dir, dependencies: used.map(|d| text(&d["name"])).collect() })
        })
        .collect())
}

fn sources(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut files = Vec::new();
    for path in entries.flatten().map(|e| e.path()) {
        let inner = path.file_name().is_some_and(|n| n == "target" || n.to_string_lossy().starts_with('.'));
        // A folder with its own manifest is another crate.
        if path.is_dir() && !inner && !path.join("Cargo.toml").exists() {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
    files
}

/// Lines of code, without comments and quoted text (a log filter may name a crate).
fn code(path: &Path) -> Result<Vec<(usize, String)>> {
    let text = fs::read_to_string(path)?;
    let cut = |l: &str| {
        let unquoted: String = l.split('"').step_by(2).collect();
        unquoted.split("//").next().unwrap_or_default().to_string()
    };
    Ok((1usize..).zip(text.lines().map(cut)).collect())
}

#[test]
fn crates_depend_on_each_other_only_along_the_allowed_edges() -> Result<()> {
    let packages = packages()?;
    let allowed: BTreeMap<_, _> = EDGES.into_iter().collect();
    for (name, package) in &packages {
        let may = allowed.get(name.as_str()).with_context(|| format!("paraft-{name} is not in EDGES"))?;
        for used in package.dependencies.iter().filter_map(|d| d.strip_prefix("paraft-")) {
            assert!(may.contains(&used), "paraft-{name} may not depend on paraft-{used}");
        }
    }
    Ok(())
}

#[test]
fn server_and_worker_do_not_reach_each_other_by_any_path() -> Result<()> {
    let packages = packages()?;
    let reach = |from: &str| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from.to_string()]);
        while let Some(name) = next.pop() {
            if let Some(p) = packages.get(&name).filter(|_| seen.insert(name.clone())) {
                next.extend(
                    p.dependencies.iter().filter_map(|d| d.strip_prefix("paraft-")).map(str::to_string),
                );
            }
        }
        seen
    };
    // `session` is the protocol without I/O; a server that fetches weights from another is a client, too.
    let workers = ["worker", "client", "trainer", "checkpoint", "compute", "models", "data", "job"];
    assert!(workers.iter().all(|w| !reach("server").contains(*w)), "{:?}", reach("server"));
    assert!(workers.iter().all(|w| !reach(w).contains("server")));
    Ok(())
}

#[test]
fn heavy_libraries_stay_where_they_belong() -> Result<()> {
    for (name, package) in packages()? {
        let uses = |library: &str| package.dependencies.contains(library);
        if ["common", "session", "trainer"].contains(&name.as_str()) {
            for library in ["tokio", "tonic", "prost", "openraft", "cudarc", "rand", "futures"] {
                assert!(!uses(library), "{name} is pure: no {library}");
            }
        }
        assert!(!uses("openraft") || name == "raft", "{name} depends on openraft");
        assert!(!uses("cudarc") || name == "compute", "{name} depends on cudarc");
        assert!(
            !uses("libloading") || ["compute", "fake-cuda"].contains(&name.as_str()),
            "{name} loads libraries"
        );
    }
    Ok(())
}

#[test]
fn libraries_that_may_have_to_go_are_named_in_one_place() -> Result<()> {
    for (library, place) in
        [("openraft", "ps-server/raft/src"), ("bincode", "ps-server/changes/src/header.rs")]
    {
        let place = root().join(place);
        for package in packages()?.into_values() {
            for path in sources(&package.dir).into_iter().filter(|p| !p.starts_with(&place)) {
                for (line, text) in code(&path)? {
                    assert!(!text.contains(&format!("{library}::")), "{}:{line}: {text}", path.display());
                }
            }
        }
    }
    Ok(())
}

/// Wire types stop at `rpc/`, and those of Raft's own messages at `raft/`. Refusals are domain types that
/// know their wire form.
#[test]
fn wire_types_stay_at_the_doors_of_the_server() -> Result<()> {
    let server = root().join("ps-server/src");
    let rooms = ["control", "replicas", "shard", "connections", "control.rs", "room.rs", "admission.rs"];
    let mut seen = 0;
    for path in sources(&server) {
        let inside = path.strip_prefix(&server).is_ok_and(|p| rooms.iter().any(|room| p.starts_with(room)));
        let test = path.file_stem().is_some_and(|n| n.to_string_lossy().contains("test"));
        if !inside || test || path.components().any(|c| c.as_os_str() == "simulation") {
            continue;
        }
        seen += 1;
        for (line, text) in code(&path)? {
            let at = format!("{}:{line}: {text}", path.display());
            assert!(!text.contains("rpc::"), "{at}");
            let refusal = text.replace(['{', '}', ' '], "");
            let of_proto = refusal.split("paraft_proto::").nth(1).unwrap_or("Refusal;");
            assert!(
                of_proto.trim_end_matches(';').split(',').all(|t| t.starts_with("Refusal") || t == "limits"),
                "{at}"
            );
        }
    }
    anyhow::ensure!(seen > 30, "{seen} files were looked at");
    Ok(())
}

/// The modules that a file uses: the names after `path` (`crate::`, `super::`), also in a list.
fn rooms_used(text: &str, path: &str) -> BTreeSet<String> {
    let mut used = BTreeSet::new();
    for (at, _) in text.match_indices(path) {
        let rest = &text[at + path.len()..];
        let named =
            |name: &str| name.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
        let Some(list) = rest.strip_prefix('{') else {
            used.insert(named(rest));
            continue;
        };
        let (mut depth, mut begins) = (0, true);
        for (i, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => begins = true,
                c if begins && !c.is_whitespace() => {
                    used.insert(named(&list[i..]));
                    begins = false;
                }
                _ => {}
            }
        }
    }
    used
}

/// A module, and those that it uses directly or through others.
fn reached<'a>(from: &'a str, edges: &'a BTreeMap<String, BTreeSet<String>>) -> BTreeSet<&'a str> {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(room) = next.pop() {
        for used in edges.get(room).into_iter().flatten() {
            if seen.insert(used.as_str()) {
                next.push(used);
            }
        }
    }
    seen
}

/// The code outside of tests, which may use any module.
fn outside_tests(path: &Path) -> Result<String> {
    let lines = code(path)?.into_iter().map(|(_, line)| line).take_while(|l| l.trim() != "#[cfg(test)]");
    Ok(lines.collect::<Vec<_>>().join("\n"))
}

#[test]
fn files_of_raft_and_store_log_have_no_cycles() -> Result<()> {
    for room in ["ps-server/raft/src", "ps-server/store/src/log"] {
        let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for path in sources(&root().join(room)) {
            let name = path.file_stem().context("a file")?.to_string_lossy().into_owned();
            if !name.contains("test") && !["properties", "mod", "lib"].contains(&name.as_str()) {
                edges.insert(name, rooms_used(&outside_tests(&path)?, "super::"));
            }
        }
        let files: BTreeSet<String> = edges.keys().cloned().collect();
        edges.iter_mut().for_each(|(file, used)| used.retain(|u| files.contains(u) && u != file));
        anyhow::ensure!(edges.len() > 7 && edges.values().any(|n| n.len() > 2), "{room}: {edges:?}");
        for file in &files {
            let circle = reached(file, &edges).contains(file.as_str());
            assert!(!circle, "{room}: a circle through {file}: {edges:?}");
        }
    }
    Ok(())
}

/// A write that bypasses the store's `Disk` is one that no test can make fail.
#[test]
fn server_writes_files_only_through_the_store_disk() -> Result<()> {
    const WRITES: [&str; 12] = [
        "fs::write",
        "fs::remove",
        "fs::rename",
        "fs::create",
        "fs::copy",
        "fs::set_permissions",
        "fs::hard_link",
        "File::create",
        "File::options",
        "OpenOptions",
        "DirBuilder",
        "tempfile::",
    ];
    let (server, disk) = (root().join("ps-server"), root().join("ps-server/store/src/disk.rs"));
    let mut seen = 0;
    for path in ["src", "raft/src", "store/src"].into_iter().flat_map(|dir| sources(&server.join(dir))) {
        let test = path.file_stem().is_some_and(|n| n.to_string_lossy().contains("test"));
        if test || path == disk {
            continue;
        }
        seen += 1;
        for line in outside_tests(&path)?.lines() {
            // A server's own socket is not a file of its data folder.
            let socket = path.ends_with("src/server.rs") && line.contains("fs::remove_file(path)");
            let writes = WRITES.iter().find(|w| line.contains(**w) && !socket);
            assert!(writes.is_none(), "{} writes past the disk: {line}", path.display());
        }
    }
    anyhow::ensure!(seen > 50, "{seen} files were looked at");
    Ok(())
}

/// `paraft-raft` replicates changes whose content it does not look at.
#[test]
fn raft_does_not_know_what_it_replicates() -> Result<()> {
    let mut seen = 0;
    for path in sources(&root().join("ps-server/raft/src")) {
        let test = is_test_file(&path);
        let lines = code(&path)?;
        seen += 1;
        for (line, text) in lines.into_iter().filter(|_| !test) {
            let names = text.split(|c: char| !c.is_alphanumeric() && c != '_');
            let knows =
                |n: &str| ["shard", "control", "Shard", "Control", "ShardId", "BucketId"].contains(&n);
            assert!(!names.clone().any(knows), "{}:{line}: {text}", path.display());
        }
    }
    anyhow::ensure!(seen > 5, "{seen} uses were looked at");
    Ok(())
}

#[test]
fn commands_launchers_and_experiments_have_no_cycles() -> Result<()> {
    for name in ["deploy", "deploy/fleet", "lab", "worker/job"] {
        let src = root().join(name).join("src");
        let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for path in sources(&src) {
            let inside = path.strip_prefix(&src)?.with_extension("");
            let room = inside.iter().next().context("a file")?.to_string_lossy().into_owned();
            edges.entry(room).or_default().extend(rooms_used(&outside_tests(&path)?, "crate::"));
        }
        edges.retain(|room, _| !["lib", "main"].contains(&room.as_str()));
        let rooms: BTreeSet<String> = edges.keys().cloned().collect();
        edges.iter_mut().for_each(|(room, used)| used.retain(|u| rooms.contains(u) && u != room));
        anyhow::ensure!(edges.len() > 5 && edges.values().any(|u| !u.is_empty()), "{name}: {edges:?}");
        for room in &rooms {
            assert!(
                !reached(room, &edges).contains(room.as_str()),
                "{name}: a circle through {room}: {edges:?}"
            );
        }
    }
    Ok(())
}

#[test]
fn unsafe_is_forbidden_everywhere_but_where_it_must_be() -> Result<()> {
    let manifest: toml::Table = toml::from_str(&fs::read_to_string(root().join("Cargo.toml"))?)?;
    assert_eq!(manifest["workspace"]["lints"]["rust"]["unsafe_code"].as_str(), Some("forbid"));
    for (name, package) in packages()? {
        let manifest: toml::Table = toml::from_str(&fs::read_to_string(package.dir.join("Cargo.toml"))?)?;
        let inherits = manifest.get("lints").and_then(|l| l.get("workspace")).and_then(toml::Value::as_bool);
        assert!(
            inherits == Some(true) || MAY_BE_UNSAFE.contains(&name.as_str()),
            "{name} does not take the workspace's lints"
        );
        for path in sources(&package.dir).into_iter().filter(|_| !MAY_BE_UNSAFE.contains(&name.as_str())) {
            for (line, text) in code(&path)? {
                let allows = text.contains("allow(") && text.contains("unsafe_code");
                assert!(!allows, "{}:{line}: {text}", path.display());
            }
        }
    }
    Ok(())
}

#[test]
fn every_mutation_fits_the_code_that_it_breaks() -> Result<()> {
    let folder = root().join("tests/mutations");
    let files = fs::read_dir(&folder)?.map(|f| Ok(f?.path())).collect::<Result<Vec<_>>>()?;
    for patch in files.iter().filter(|p| p.extension().is_some_and(|e| e == "patch")) {
        let mut command = Command::new("git");
        command.args(["apply", "--check"]).arg(patch).current_dir(root());
        let out = command.output().context("git")?;
        let said = String::from_utf8_lossy(&out.stderr);
        anyhow::ensure!(out.status.success(), "{}: mend it: {said}", patch.display());
    }
    anyhow::ensure!(files.len() > 20, "{} mutations", files.len());
    Ok(())
}

#[test]
fn every_source_file_starts_with_a_description() -> Result<()> {
    for (_, package) in packages()? {
        for path in sources(&package.dir.join("src")) {
            let text = fs::read_to_string(&path)?;
            assert!(text.starts_with("//!"), "{} opens without saying what it is", path.display());
        }
    }
    Ok(())
}

/// Files that only tests compile.
fn is_test_file(path: &Path) -> bool {
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    ["tests", "properties", "identities", "testing"].iter().any(|end| name.ends_with(end))
        || path.iter().any(|part| part == "tests" || part == "simulation" || part == "faulty")
}

#[test]
fn no_file_outside_tests_has_more_than_500_lines() -> Result<()> {
    for (_, package) in packages()? {
        for path in sources(&package.dir).into_iter().filter(|p| !is_test_file(p)) {
            let lines = fs::read_to_string(&path)?.lines().count();
            assert!(lines <= 500, "{} has {lines} lines: give each noun a file of its own", path.display());
        }
    }
    Ok(())
}

/// Files that read an error's words, since a library or another program gives nothing else.
const READS_WORDS: [&str; 2] = ["ps-server/changes/src/header.rs", "ps-server/store/src/error.rs"];

#[test]
fn decisions_do_not_depend_on_the_words_of_errors() -> Result<()> {
    let texts = ["message", "message()", "why", "error", "err", "cause", "reason", "said", "to_string()"];
    let looks = ["contains", "starts_with", "ends_with", "trim_start_matches", "strip_prefix"];
    for (_, package) in packages()? {
        for path in sources(&package.dir.join("src")).into_iter().filter(|p| !is_test_file(p)) {
            let text = fs::read_to_string(&path)?;
            for line in text.lines().take_while(|l| !l.starts_with("#[cfg(test)]")) {
                let reads = texts.iter().any(|t| looks.iter().any(|l| line.contains(&format!("{t}.{l}(\""))));
                assert!(
                    !reads || READS_WORDS.iter().any(|f| path.ends_with(f)),
                    "{}: {line}",
                    path.display()
                );
            }
        }
    }
    Ok(())
}

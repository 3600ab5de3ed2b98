//! What the fuzz targets run: one function for each decoder of bytes that come from outside the process. Each takes any bytes, and
//! panics where a promise does not hold: whatever comes is read or refused, what is read is written back as it was, and
//! what is let through fits.
//!
//! - [`wire`]: messages of workers and servers.
//! - [`requests`]: what the leader of the control group is asked for.
//! - [`state`]: what servers replicate: headers, commands, images, the folder of a replica.
//! - [`store`]: log segments, snapshot files, small files.
//! - [`text`]: job files, the servers' job, `metrics.jsonl`.
//! - [`files`]: checkpoints, model files, data sets.
//! - [`input`]: how a target takes what steers it off its bytes. [`log_files`]: segments that are whole but for what
//!   the fuzzer chose.
//!
//! Many formats have checksums, which no fuzzer gets past by chance. Such a target has a bit that says to mend them, so
//! that both the checksum's test and the code behind it are reached.
//!
//! `fuzz/` at the repository's root has the binaries, which name one of these functions each, and their seeds in
//! `fuzz/corpus/`. `tests/corpus.rs` runs every seed with the ordinary compiler; `examples/seeds.rs` writes them.

pub mod files;
pub mod input;
pub mod log_files;
pub mod requests;
pub mod state;
pub mod store;
pub mod text;
pub mod wire;

/// Runs one input.
pub type Target = fn(&[u8]);

/// Every target, by the name of its binary and of its folder in `fuzz/corpus/`.
pub const TARGETS: [(&str, Target); 22] = [
    ("bulk", wire::bulk),
    ("control_requests", requests::control_requests),
    ("control_state", state::control_state),
    ("control_wire", wire::control_wire),
    ("csv", files::csv),
    ("encodings", wire::encodings),
    ("idx", files::idx),
    ("job_file", text::job_file),
    ("lane", wire::lane),
    ("log", store::log),
    ("manifest", files::manifest),
    ("metrics", text::metrics),
    ("peer", state::peer),
    ("push", wire::push),
    ("replica", state::replica),
    ("server_job", text::server_job),
    ("shard_state", state::shard_state),
    ("small_file", store::small_file),
    ("snapshot_file", store::snapshot_file),
    ("sparse", files::sparse),
    ("text", files::text),
    ("weights", files::weights),
];

//! Models of which a worker holds some layers at a time: the bits are those of a worker that holds all, whatever dies.

use anyhow::{Context, Result};
use paraft_common::ShardId;
use paraft_tests::{
    fleet::{At, Fleet, FleetOptions},
    train::{job, job_on, train},
    wait,
};
use paraft_worker::Job;
use std::{fs, path::Path, thread};

fn fleet() -> Result<Fleet> {
    Fleet::start(FleetOptions { servers: 3, shards: 3, replicas: 3, ..FleetOptions::default() })
}

/// Uneven layers, and buckets that two of them share.
const MLP: &str = "[model]\nkind = \"mlp\"\nhidden = [50, 31, 77, 20, 64]";
const AUTOENCODER: &str = "[model]\nkind = \"autoencoder\"\nhidden = [40, 9, 40]";
const TRANSFORMER: &str = "[model]\nkind = \"transformer\"\nlayers = 4\nheads = 2\nwidth = 32";

const SET: [&str; 4] = ["train.workers=2", "train.device=cpu", "optimizer.kind=adam", "optimizer.lr=0.001"];

fn on_digits(at: &At, model: &str, more: &[&str]) -> Result<Job> {
    let set = [
        "train.workers=2",
        "train.device=cpu",
        "optimizer.kind=adam",
        "optimizer.lr=0.001",
        "cluster.bucket_bytes=1024",
    ];
    job(at, model, &[&set[..], more].concat())
}

/// A transformer on a text.
fn on_text(at: &At, folder: &Path, more: &[&str]) -> Result<Job> {
    let path = folder.join("sums.txt");
    let sum = |i: u32| format!("{} and {} are {}; ", i % 7, i % 11, i % 7 + i % 11);
    fs::write(&path, (0..1500).map(sum).collect::<String>())?;
    let text = format!(
        "[data]\nkind = \"text\"\npath = {path:?}\ncontext = 16\n[eval]\nevery_epoch = false\n{TRANSFORMER}"
    );
    let set = ["train.batch=8", "train.epochs=1", "cluster.bucket_bytes=4096"];
    job_on(at, &text, &[&SET[..], &set, more].concat())
}

#[test]
fn a_streamed_model_comes_to_the_bits_of_one_that_is_there_whole() -> Result<()> {
    for model in [MLP, AUTOENCODER] {
        let whole = train(&on_digits(&fleet()?.at, model, &["train.epochs=2"])?)?;
        for resident in ["1", "2", "3", "\"1 GiB\""] {
            let resident = format!("memory.resident={resident}");
            let streamed = train(&on_digits(&fleet()?.at, model, &["train.epochs=2", &resident])?)?;
            assert!(streamed == whole, "{model}, {resident}");
        }
    }
    Ok(())
}

#[test]
fn a_streamed_transformer_with_a_tied_embedding_comes_to_the_same_bits_also_clipped_and_recomputed()
-> Result<()> {
    let folder = tempfile::tempdir()?;
    for more in [&["train.threads=1"][..], &["model.checkpoint_activations=true", "clip.norm=0.5"]] {
        let whole = train(&on_text(&fleet()?.at, folder.path(), more)?)?;
        for resident in ["memory.resident=1", "memory.resident=2"] {
            let streamed = train(&on_text(&fleet()?.at, folder.path(), &[more, &[resident]].concat())?)?;
            assert!(streamed == whole, "{more:?}, {resident}");
        }
    }
    Ok(())
}

#[test]
fn leaders_that_die_while_layers_are_pulled_change_no_bit() -> Result<()> {
    let quiet = train(&on_digits(&fleet()?.at, MLP, &["train.epochs=12", "memory.resident=1"])?)?;
    for steps in [20, 60] {
        let mut fleet = fleet()?;
        let job = on_digits(&fleet.at, MLP, &["train.epochs=12", "memory.resident=1"])?;
        let training = thread::spawn(move || train(&job));
        wait::until("it to get on", || fleet.leader(ShardId(0)).1.applied_index, |at| *at > steps);
        fleet.kill(fleet.leader(ShardId(0)).0);
        let ended = training.join().ok().context("a worker panicked")??;
        assert!(ended == quiet, "other bits");
    }
    Ok(())
}

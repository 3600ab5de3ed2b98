//! Event files are read back: by a small parser here, and by TensorBoard itself where Python has it.
#![allow(clippy::unwrap_used)]

use paraft_common::Step;
use paraft_common::histogram::DelayHistogram;
use paraft_record::follow::{export, points};
use paraft_record::tensorboard::EventFile;
use paraft_record::{
    Event, Follow, METRICS_FILE, MetricsWriter, RecordError, Run, TENSORBOARD_FOLDER, Train,
};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The data of every record; lengths must add up to the file.
fn records(path: &Path) -> Vec<Vec<u8>> {
    let bytes = std::fs::read(path).unwrap();
    let (mut at, mut all) = (0, Vec::new());
    while at < bytes.len() {
        let length = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
        all.push(bytes[at + 12..at + 12 + length].to_vec());
        at += 16 + length;
    }
    assert_eq!(at, bytes.len());
    all
}

/// The fields of a message: number and the bytes of its value (varints as 8 bytes).
fn fields(mut message: &[u8]) -> Vec<(u64, Vec<u8>)> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let mut n = 0;
        for shift in (0..).step_by(7) {
            let (first, rest) = bytes.split_first().unwrap();
            *bytes = rest;
            n |= u64::from(first & 0x7f) << shift;
            if first & 0x80 == 0 {
                break;
            }
        }
        n
    }
    let mut all = Vec::new();
    while !message.is_empty() {
        let key = varint(&mut message);
        let length = match key & 7 {
            0 => {
                all.push((key >> 3, varint(&mut message).to_le_bytes().to_vec()));
                continue;
            }
            1 => 8,
            2 => varint(&mut message) as usize,
            5 => 4,
            other => panic!("wire type {other}"),
        };
        let (value, rest) = message.split_at(length);
        all.push((key >> 3, value.to_vec()));
        message = rest;
    }
    all
}

#[test]
fn a_scalar_is_found_where_the_format_says() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = EventFile::create(dir.path().join("new"), 1_795_253_039.5).unwrap();
    file.scalar("train/loss", 0.25, 300, 1_795_253_040.0).unwrap();
    file.flush().unwrap();
    let name = file.path().file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with("events.out.tfevents.1795253039."), "{name}");

    let records = records(file.path());
    assert_eq!(records.len(), 2);
    assert_eq!(fields(&records[0])[1], (3, b"brain.Event:2".to_vec()));
    let event = fields(&records[1]);
    assert_eq!(event[0], (1, 1_795_253_040.0_f64.to_le_bytes().to_vec()));
    assert_eq!(event[1], (2, 300_u64.to_le_bytes().to_vec()));
    let (number, value) = &fields(&event[2].1)[0];
    assert_eq!((event[2].0, *number), (5, 1));
    assert_eq!(fields(value), [(1, b"train/loss".to_vec()), (2, 0.25_f32.to_le_bytes().to_vec())]);
}

/// Prints what TensorBoard's own reader found.
const READ: &str = r#"
import sys
from tensorboard.backend.event_processing import event_accumulator as ea
a = ea.EventAccumulator(sys.argv[1], size_guidance={ea.SCALARS: 0, ea.HISTOGRAMS: 0, ea.TENSORS: 0}); a.Reload()
for tag in sorted(a.Tags()['scalars']):
    for p in a.Scalars(tag): print(tag, p.step, p.wall_time, p.value)
for tag in sorted(a.Tags()['histograms']):
    for p in a.Histograms(tag):
        h = p.histogram_value
        print(tag, p.step, h.min, h.max, h.num, h.sum, list(h.bucket_limit), list(h.bucket))
for tag in sorted(a.Tags()['tensors']):
    plugin = a.SummaryMetadata(tag).plugin_data.plugin_name
    for p in a.Tensors(tag): print(tag, p.step, p.wall_time, plugin, p.tensor_proto.string_val[0].decode())
"#;

/// What it found in `dir`; `None`, said aloud, where this Python cannot.
fn read_with_tensorboard(dir: &Path) -> Option<String> {
    let python = std::env::var("PARAFT_PYTHON").unwrap_or_else(|_| "python3".into());
    match Command::new(&python).args(["-c", "import tensorboard"]).output() {
        Ok(out) if out.status.success() => {}
        Ok(_) => {
            eprintln!("SKIPPED: {python} has no tensorboard; set PARAFT_PYTHON to one that has");
            return None;
        }
        Err(e) => {
            eprintln!("SKIPPED: {python}: {e}; set PARAFT_PYTHON to a Python with tensorboard");
            return None;
        }
    }
    let out = Command::new(&python).args(["-c", READ]).arg(dir).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    Some(String::from_utf8(out.stdout).unwrap())
}

#[test]
fn tensorboard_reads_scalars_histograms_and_texts() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = EventFile::create(dir.path(), 1_795_253_039.5).unwrap();
    for step in 0..1000 {
        file.scalar("train/loss", 1.0 / (step + 1) as f32, step, 1_795_253_040.0 + step as f64).unwrap();
    }
    let delays = DelayHistogram::from_counts(&[0, 4, 0, 2]);
    file.histogram("ps/delay", &delays, 1000, 1_795_253_041.0).unwrap();
    file.text("events", "server 0 has ended", 500, 1_795_253_041.0).unwrap();
    file.flush().unwrap();
    let Some(found) = read_with_tensorboard(dir.path()) else { return };
    let lines: Vec<_> = found.lines().collect();
    assert_eq!(lines.len(), 1002);
    assert_eq!(lines[3], "train/loss 3 1795253043.0 0.25");
    let histogram = "ps/delay 1000 1.0 3.0 6.0 10.0 [-0.5, 0.5, 1.5, 2.5, 3.5] [0.0, 0.0, 4.0, 0.0, 2.0]";
    assert_eq!(lines[1000], histogram);
    assert_eq!(lines[1001], "events 500 1795253041.0 text server 0 has ended");
}

#[test]
fn tensorboard_reads_an_exported_run() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(METRICS_FILE), include_str!("samples/v1.jsonl")).unwrap();
    export(dir.path()).unwrap().unwrap();
    let Some(found) = read_with_tensorboard(&dir.path().join(TENSORBOARD_FOLDER)) else { return };
    for wanted in [
        "train/loss 320 1795253040.0 2.25",
        "eval/loss 320",
        "eval/accuracy 320",
        "perf/samples_per_s",
        "ps/delay 512",
    ] {
        assert!(found.contains(wanted), "{wanted} in\n{found}");
    }
}

/// The event files of a run, in the order in which TensorBoard reads them.
fn files(run: &Path) -> Vec<PathBuf> {
    let Ok(all) = std::fs::read_dir(run.join(TENSORBOARD_FOLDER)) else { return Vec::new() };
    let mut files: Vec<_> = all.map(|e| e.unwrap().path()).collect();
    files.sort();
    files
}

/// Step and tag of each point that is left when sessions have begun, and how many records there are.
fn left(run: &Path) -> (usize, Vec<(u64, String)>) {
    let mut left: Vec<(u64, String)> = Vec::new();
    let all: Vec<_> = files(run).iter().flat_map(|f| records(f)).collect();
    for event in &all {
        let fields = fields(event);
        let number = |n: u64| fields.iter().find(|(f, _)| *f == n).map(|(_, v)| v.clone());
        let step = number(2).map_or(0, |v| u64::from_le_bytes(v.try_into().unwrap()));
        if number(7).is_some() {
            left.retain(|(s, _)| *s < step);
        }
        if let Some(summary) = number(5) {
            let tag = self::fields(&self::fields(&summary)[0].1)[0].1.clone();
            left.push((step, String::from_utf8(tag).unwrap()));
        }
    }
    (all.len(), left)
}

fn wanted(run: &Path) -> Vec<(u64, String)> {
    points(run).unwrap().into_iter().map(|p| (p.step, p.tag.to_string())).collect()
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let began = std::time::Instant::now();
    while !done() {
        assert!(began.elapsed().as_secs() < 60, "gave up waiting for {what}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// Appends lines of a run of one worker, `from` to `to` seconds of it.
fn train(run: &Path, from: u32, to: u32) {
    let mut writer = MetricsWriter::append(run.join(METRICS_FILE)).unwrap();
    if from == 0 {
        writer.write(&Event::Run(Run { wall: 1000.0, workers: 1, batch: 4, ..Run::default() })).unwrap();
    }
    for second in from + 1..=to {
        let (wall, seconds) = (1000.0 + f64::from(second), f64::from(second));
        let samples = u64::from(second) * 10;
        let t = Train { wall, seconds, samples, loss: 1.0, samples_per_s: 10.0, ..Train::default() };
        writer.write(&Event::Train(t)).unwrap();
    }
}

fn unheard(e: &RecordError) {
    panic!("{e}");
}

#[test]
fn event_files_follow_a_run_and_end_equal_to_its_record() {
    let dir = tempfile::tempdir().unwrap();
    train(dir.path(), 0, 5);
    let follow = Follow::first(dir.path(), Box::new(|_| {}), unheard);
    until("the first points", || left(dir.path()).1.len() >= 10);
    train(dir.path(), 5, 8);
    until("the next ones", || left(dir.path()).1.len() >= 16);
    train(dir.path(), 8, 9);
    drop(follow);
    assert_eq!(left(dir.path()), (2 + 18, wanted(dir.path())));
    assert_eq!(files(dir.path()).len(), 1);
}

#[test]
fn a_successor_writes_event_files_without_duplicate_points() {
    let dir = tempfile::tempdir().unwrap();
    train(dir.path(), 0, 5);
    let first = Follow::first(dir.path(), Box::new(|_| {}), unheard);
    let second = Follow::beside(dir.path(), unheard);
    until("the first points", || left(dir.path()).1.len() >= 10);
    drop(Follow::beside(dir.path(), unheard)); // it ends before its turn comes
    assert_eq!(files(dir.path()).len(), 1);
    drop(first);
    train(dir.path(), 5, 8);
    until("the second file", || files(dir.path()).len() == 2);
    train(dir.path(), 8, 9);
    drop(second);
    assert_eq!(left(dir.path()).1, wanted(dir.path()));
    let Some(found) = read_with_tensorboard(&dir.path().join(TENSORBOARD_FOLDER)) else { return };
    assert_eq!(found.lines().filter(|l| l.starts_with("train/loss")).count(), 9, "{found}");
}

#[test]
fn a_resumed_run_replaces_points_after_its_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    train(dir.path(), 0, 9);
    drop(Follow::first(dir.path(), Box::new(|_| {}), unheard));
    std::fs::rename(dir.path().join(METRICS_FILE), dir.path().join("metrics.1.jsonl")).unwrap();
    let mut writer = MetricsWriter::append(dir.path().join(METRICS_FILE)).unwrap();
    let resumed_step = Some(Step(10)); // 40 samples
    writer
        .write(&Event::Run(Run { wall: 2000.0, workers: 1, batch: 4, resumed_step, ..Run::default() }))
        .unwrap();
    let t = Train { wall: 2001.0, seconds: 1.0, samples: 10, loss: 1.0, ..Train::default() };
    writer.write(&Event::Train(t)).unwrap();
    drop(Follow::first(dir.path(), Box::new(|_| {}), unheard));
    let steps: Vec<_> =
        left(dir.path()).1.into_iter().filter(|(_, t)| t == "train/loss").map(|(s, _)| s).collect();
    assert_eq!(steps, [10, 20, 30, 50]);
    let Some(found) = read_with_tensorboard(&dir.path().join(TENSORBOARD_FOLDER)) else { return };
    let losses: Vec<_> = found.lines().filter(|l| l.starts_with("train/loss")).collect();
    assert_eq!(losses.len(), 4, "{losses:?}");
}

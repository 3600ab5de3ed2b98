//! Event files are read back: by a small parser here, and by TensorBoard itself where Python has it.
#![allow(clippy::unwrap_used)]

use paraft_common::histogram::DelayHistogram;
use paraft_record::tensorboard::{EventFile, export};
use paraft_record::{Event, RunRecord};
use std::path::Path;
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
a = ea.EventAccumulator(sys.argv[1], size_guidance={ea.SCALARS: 0, ea.HISTOGRAMS: 0}); a.Reload()
for tag in sorted(a.Tags()['scalars']):
    for p in a.Scalars(tag): print(tag, p.step, p.wall_time, p.value)
for tag in sorted(a.Tags()['histograms']):
    for p in a.Histograms(tag):
        h = p.histogram_value
        print(tag, p.step, h.min, h.max, h.num, h.sum, list(h.bucket_limit), list(h.bucket))
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
fn tensorboard_reads_scalars_and_histograms() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = EventFile::create(dir.path(), 1_795_253_039.5).unwrap();
    for step in 0..1000 {
        file.scalar("train/loss", 1.0 / (step + 1) as f32, step, 1_795_253_040.0 + step as f64).unwrap();
    }
    let delays = DelayHistogram::from_counts(&[0, 4, 0, 2]);
    file.histogram("ps/delay", &delays, 1000, 1_795_253_041.0).unwrap();
    file.flush().unwrap();
    let Some(found) = read_with_tensorboard(dir.path()) else { return };
    let lines: Vec<_> = found.lines().collect();
    assert_eq!(lines.len(), 1001);
    assert_eq!(lines[3], "train/loss 3 1795253043.0 0.25");
    let histogram = "ps/delay 1000 1.0 3.0 6.0 10.0 [-0.5, 0.5, 1.5, 2.5, 3.5] [0.0, 0.0, 4.0, 0.0, 2.0]";
    assert_eq!(lines[1000], histogram);
}

#[test]
fn tensorboard_reads_an_exported_run() {
    let events = include_str!("samples/v1.jsonl").lines().map(|l| serde_json::from_str::<Event>(l).unwrap());
    let dir = tempfile::tempdir().unwrap();
    export(dir.path(), &RunRecord::from_events(events).unwrap()).unwrap();
    let Some(found) = read_with_tensorboard(dir.path()) else { return };
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

//! The log of a sweep, line by line: a sweep resumes from it, and its page is drawn from it.

use super::search::{Score, Search};
use paraft_fleet::failure::Failure;
use paraft_worker::exit;
use serde_json::{Value, json};
use std::{
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Write},
    path::Path,
};

/// In the sweep's folder.
pub const LOG_FILE: &str = "sweep.jsonl";

/// The folder of a trial that is trained for this many epochs, below the sweep's folder.
pub fn trial_dir(trial: usize, epochs: u64) -> String {
    format!("trial-{trial:04}/epochs-{epochs}")
}

/// The end of a trial on a rung.
#[derive(Clone, Debug, PartialEq)]
pub struct TrialEnd {
    pub trial: usize,
    pub rung: usize,
    /// The metric.
    pub value: Option<f64>,
    /// Training seconds on this rung.
    pub seconds: f64,
    /// Seconds from the decision to the first step.
    pub start_seconds: Option<f64>,
    /// The number of attempts: more than one after a kill.
    pub tries: u32,
    /// Why it has no value.
    pub why: String,
    /// The epochs after which it stopped, if before those of its rung.
    pub stopped: Option<u64>,
    /// Another job that trained on this machine at the same time.
    pub beside: Option<String>,
    /// The run's folder, below the sweep's.
    pub dir: String,
    /// When it ended, in ms of Unix time; 0 in old files.
    pub ended_ms: u64,
}

/// The content of a log.
#[derive(Debug, Default)]
pub struct LogContent {
    /// The first line: the identity of the sweep. Null: there is none yet.
    pub sweep: Value,
    /// When it began, in ms of Unix time, and its folder then, which identify it for trackers. Old
    /// files have neither.
    pub began: Option<(u64, String)>,
    /// Each start of a trial on a rung with its settings, in this order.
    pub begun: Vec<(usize, usize, Vec<String>)>,
    pub ended: Vec<TrialEnd>,
    /// Bytes of its complete lines: a torn last line counts as not written.
    whole: u64,
}

impl LogContent {
    /// Reads a log.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let cannot = |e: std::io::Error| Failure::new(exit::IO, format!("{}: {e}", path.display()));
        let mut reader = BufReader::new(File::open(path).map_err(cannot)?);
        let (mut all, mut line) = (Self::default(), String::new());
        while reader.read_line(&mut line).map_err(cannot)? > 0 && line.ends_with('\n') {
            let wrong = || {
                Failure::new(
                    exit::DATA,
                    format!("{}: `{}` is no line of a sweep", path.display(), line.trim()),
                )
            };
            let said: Value = serde_json::from_str(&line).map_err(|_| wrong())?;
            if all.whole == 0 {
                all.began = said["began_ms"].as_u64().zip(said["dir"].as_str().map(str::to_string));
                all.sweep = said.get("sweep").cloned().ok_or_else(wrong)?;
            } else if let Some(begun) = said.get("begin") {
                let (trial, rung) = of(begun).ok_or_else(wrong)?;
                let set = begun["set"].as_array().into_iter().flatten();
                all.begun.push((trial, rung, set.filter_map(|s| s.as_str().map(str::to_string)).collect()));
            } else if let Some(end) = said.get("end") {
                all.ended.push(read(end).ok_or_else(wrong)?);
            } else {
                return Err(wrong());
            }
            all.whole += line.len() as u64;
            line.clear();
        }
        Ok(all)
    }

    /// Replays it into a search.
    pub fn tell(&self, search: &mut Search, score: impl Fn(&TrialEnd) -> Score) {
        self.begun.iter().for_each(|(trial, rung, _)| search.begin(*trial, *rung));
        self.ended.iter().for_each(|end| search.ended(end.trial, end.rung, score(end)));
    }

    /// The sweep's identity for trackers, and when it began, in ms of Unix time. `dir` is its folder.
    pub fn id(&self, dir: &Path) -> (String, u64) {
        match &self.began {
            // The folder may have been renamed, and another sweep may use its old name.
            Some((began, dir)) => (format!("{dir}\n{began}\n{}", self.sweep), *began),
            None => {
                let dir = std::path::absolute(dir).unwrap_or_else(|_| dir.to_path_buf());
                (format!("{}\n{}", dir.display(), self.sweep), paraft_host::clock::unix_ms())
            }
        }
    }
}

/// A log, open for appending.
pub struct Log {
    file: File,
    /// The trials that had ended before it was opened.
    pub ended: Vec<TrialEnd>,
    /// See [`LogContent::id`].
    pub id: (String, u64),
}

impl Log {
    /// Opens or creates it. A log of another sweep is an error, since its results belong to other
    /// trials. A torn last line counts as not written.
    pub fn open(
        path: &Path,
        sweep: &Value,
        search: &mut Search,
        score: impl Fn(&TrialEnd) -> Score,
    ) -> Result<Self, Failure> {
        let cannot = |e: std::io::Error| Failure::new(exit::IO, format!("{}: {e}", path.display()));
        let mut file = OpenOptions::new().append(true).create(true).open(path).map_err(cannot)?;
        let mut said = LogContent::read(path)?;
        let dir = path.parent().unwrap_or(path);
        if said.whole > 0 && said.sweep != *sweep {
            let keys = sweep.as_object().into_iter().flatten();
            let differ: Vec<_> =
                keys.filter(|(k, v)| said.sweep[k.as_str()] != **v).map(|(k, _)| k.as_str()).collect();
            return Err(Failure::new(
                exit::CONFIG,
                format!("{} is of another sweep: {} differs", path.display(), differ.join(", ")),
            )
            .help("continue with what it was begun with, or choose another --run-dir"));
        }
        file.set_len(said.whole).map_err(cannot)?;
        if said.whole == 0 {
            let dir = std::path::absolute(dir).unwrap_or_else(|_| dir.to_path_buf()).display().to_string();
            let began = paraft_host::clock::unix_ms();
            writeln!(file, "{}", json!({ "sweep": sweep, "began_ms": began, "dir": dir })).map_err(cannot)?;
            (said.sweep, said.began) = (sweep.clone(), Some((began, dir)));
        }
        said.tell(search, score);
        Ok(Self { file, id: said.id(dir), ended: said.ended })
    }

    pub fn begin(&mut self, trial: usize, rung: usize, set: &[String]) -> Result<(), Failure> {
        self.write(&json!({ "begin": { "trial": trial, "rung": rung, "set": set } }))
    }

    pub fn end(&mut self, e: &TrialEnd) -> Result<(), Failure> {
        self.write(&json!({ "end": {
            "trial": e.trial, "rung": e.rung, "value": e.value, "seconds": e.seconds, "start_seconds": e.start_seconds,
            "tries": e.tries, "why": e.why, "stopped": e.stopped, "beside": e.beside, "dir": e.dir, "ended_ms": e.ended_ms,
        } }))?;
        self.ended.push(e.clone());
        Ok(())
    }

    fn write(&mut self, line: &Value) -> Result<(), Failure> {
        let whole = self.file.metadata().map(|m| m.len());
        let written = self.file.write_all(format!("{line}\n").as_bytes());
        written.map_err(|e| {
            // A partial line would merge with the next one.
            let _ = whole.and_then(|len| self.file.set_len(len));
            Failure::new(exit::IO, format!("the sweep's log: {e}"))
        })
    }
}

fn of(said: &Value) -> Option<(usize, usize)> {
    Some((said["trial"].as_u64()? as usize, said["rung"].as_u64()? as usize))
}

fn read(said: &Value) -> Option<TrialEnd> {
    let (trial, rung) = of(said)?;
    Some(TrialEnd {
        trial,
        rung,
        value: said["value"].as_f64(),
        seconds: said["seconds"].as_f64()?,
        start_seconds: said["start_seconds"].as_f64(),
        tries: said["tries"].as_u64()? as u32,
        why: said["why"].as_str()?.into(),
        stopped: said["stopped"].as_u64(),
        beside: said["beside"].as_str().map(str::to_string),
        dir: said["dir"].as_str()?.into(),
        ended_ms: said["ended_ms"].as_u64().unwrap_or(0),
    })
}

#[cfg(test)]
#[path = "log_tests.rs"]
mod tests;

//! The progress of a run for the user: a bar on a terminal, otherwise occasional lines.

use crate::launcher_log::LauncherLog;
use indicatif::{ProgressBar, ProgressStyle};
use paraft_record::{Event, Incarnations, Run, total};
use std::{
    collections::{BTreeMap, BTreeSet},
    io::IsTerminal,
    time::{Duration, Instant},
};

/// Lines must not fill the logs of schedulers.
const LINE_INTERVAL: Duration = Duration::from_secs(2);

/// Without training for this time, no rate is shown.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// The progress of one run.
pub struct Progress {
    bar: Option<ProgressBar>,
    mode: String,
    budget: u64,
    samples: BTreeMap<u32, (u64, f64)>,
    losses: BTreeMap<u32, f64>,
    left: BTreeSet<u32>,
    incarnations: Incarnations,
    accuracy: Option<f64>,
    /// A long evaluation: its number, and for each worker the finished and total samples.
    evaluating: (u64, BTreeMap<u32, (u64, u64)>),
    said: Instant,
    /// The time of the last training event.
    trained: Instant,
    /// Failed checkpoints by reason: each reason is printed once, and its count at the end.
    unmade: BTreeMap<String, u64>,
    leased: bool,
    quiet: bool,
    /// What is noted goes there too.
    log: LauncherLog,
}

impl Progress {
    /// For one run, with the `leased` or the static sampler. `quiet` prints nothing.
    pub fn new(run: &Run, leased: bool, quiet: bool) -> Self {
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new(run.samples_budget);
            let known = "{prefix:7} {bar:28} {percent:>3}%  {msg}";
            let template = if run.samples_budget > 0 { known } else { "{prefix:7} {pos} samples  {msg}" };
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style.progress_chars("█▉▊▋▌▍▎▏ "));
            }
            bar.set_prefix(run.mode.clone());
            bar
        });
        Self {
            bar,
            mode: run.mode.clone(),
            budget: run.samples_budget,
            samples: BTreeMap::new(),
            losses: BTreeMap::new(),
            left: BTreeSet::new(),
            incarnations: Incarnations::default(),
            accuracy: None,
            evaluating: (0, BTreeMap::new()),
            said: Instant::now(),
            trained: Instant::now(),
            unmade: BTreeMap::new(),
            leased,
            quiet,
            log: LauncherLog::default(),
        }
    }

    /// Writes its notes into this log too.
    pub(crate) fn logged(self, log: &LauncherLog) -> Self {
        Self { log: log.clone(), ..self }
    }

    /// Takes new events and updates the display.
    pub fn update(&mut self, events: &[Event]) {
        for e in events {
            match &self.incarnations.follow(e.clone()) {
                Event::Train(t) => {
                    self.left.remove(&t.worker.0); // it was restarted
                    self.trained = Instant::now();
                    self.samples.insert(t.worker.0, (t.samples, t.seconds));
                    self.losses.insert(t.worker.0, t.loss);
                }
                Event::Leave(l) if l.rank.is_none() => {
                    // Its steps count, but not its last rate and loss.
                    self.losses.remove(&l.worker.0);
                    self.left.insert(l.worker.0);
                }
                // The rule switches often, so such switches are not printed.
                Event::Mode(m) if self.mode != "auto" => {
                    self.mode.clone_from(&m.mode);
                    if let Some(bar) = &self.bar {
                        bar.set_prefix(m.mode.clone());
                    }
                }
                Event::Evaluating(e) => {
                    if self.evaluating.0 != e.number() {
                        self.evaluating = (e.number(), BTreeMap::new());
                    }
                    self.evaluating.1.insert(e.worker.0, (e.done, e.of));
                }
                Event::Eval(e) => {
                    self.accuracy = e.accuracy.or(self.accuracy);
                    if e.number() >= self.evaluating.0 {
                        self.evaluating.1.clear();
                    }
                }
                Event::Checkpoint(c) => {
                    if let Some(why) = &c.error {
                        let times = self.unmade.entry(why.clone()).or_default();
                        *times += 1;
                        if *times == 1 {
                            self.warn(&format!("no checkpoint of step {}: {why}", c.step.0));
                        }
                    }
                }
                _ => {}
            }
        }
        if self.samples.is_empty() || self.quiet {
            return;
        }
        let (done, text) = self.text(self.trained.elapsed());
        match &self.bar {
            Some(bar) => {
                bar.set_position(if self.budget > 0 { done.min(self.budget) } else { done });
                bar.set_message(text);
            }
            None if self.said.elapsed() >= LINE_INTERVAL => self.say(done, &text),
            None => {}
        }
    }

    /// Prints the last lines of a run.
    pub fn finish(&mut self) {
        for (why, times) in self.unmade.iter().filter(|(_, times)| **times > 1) {
            self.warn(&format!("{times} checkpoints in all were not made: {why}"));
        }
        let (done, mut text) = self.text(Duration::ZERO);
        if !self.left.is_empty() {
            let rest = match self.leased {
                true => "others trained the rest of their samples",
                false => "the rest of their samples was not trained",
            };
            text += &format!("  ({} lost: {rest})", self.left.len());
        }
        match &self.bar {
            Some(bar) => {
                bar.set_position(if self.budget > 0 { done.min(self.budget) } else { done });
                bar.abandon_with_message(text);
            }
            None if !self.quiet => self.say(done, &text),
            None => {}
        }
    }

    /// Notes something for the user and the log.
    pub fn note(&self, line: &str) {
        self.print(line);
        self.log.info(line);
    }

    /// Likewise, as a warning.
    pub fn warn(&self, line: &str) {
        self.print(&format!("warning: {line}"));
        self.log.warn(line);
    }

    /// Prints a line without breaking the bar.
    fn print(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.println(line),
            None => eprintln!("{line}"),
        }
    }

    /// Prints a line of progress: there is no bar.
    fn say(&mut self, done: u64, text: &str) {
        self.said = Instant::now();
        if self.budget == 0 {
            // For a user's own binary the total is unknown.
            eprintln!("{:7} {done} samples  {text}", self.mode);
            return;
        }
        let percent = 100.0 * done as f64 / self.budget as f64;
        eprintln!("{:7} {done}/{} samples {percent:3.0}%  {text}", self.mode, self.budget);
    }

    /// `still`: the time since the last training event.
    fn text(&self, still: Duration) -> (u64, String) {
        let done: u64 = self.samples.values().map(|s| s.0).sum();
        let here = |w: &u32| !self.left.contains(w);
        let rates = self.samples.iter().filter(|(w, s)| here(w) && s.1 > 0.0);
        let rate = total(rates.map(|(_, s)| s.0 as f64 / s.1));
        let loss = match self.losses.len() {
            0 => "-".to_string(),
            n => format!("{:.3}", total(self.losses.values().copied()) / n as f64),
        };
        let accuracy = self.accuracy.map(|a| format!("  acc {:.1}%", a * 100.0)).unwrap_or_default();
        let (evaluated, of) = self.evaluating.1.values().fold((0, 0), |(done, of), e| (done + e.0, of + e.1));
        let evaluating = match of {
            0 => String::new(),
            _ => format!("  evaluating {:.0}%", 100.0 * evaluated as f64 / of as f64),
        };
        let rate = match still > IDLE_TIMEOUT && of == 0 {
            true => format!("nothing trained for {:.0} s", still.as_secs_f64()),
            false => format!("{rate:.0} samples/s"),
        };
        (done, format!("loss {loss}{accuracy}  {rate}{evaluating}"))
    }
}

#[cfg(test)]
#[path = "progress_tests.rs"]
mod tests;

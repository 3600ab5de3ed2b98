//! Which of the two ways into the log moves fewer bytes: the measurement, and the decision on it. Leader-only; the
//! change itself is a replicated command, so that a new leader knows the form.
//!
//! An update entry costs the payload of its push. An image cut costs the weights and slots of every bucket that
//! changed since the last one, however often. So the more pushes a bucket gets between two cuts, the better
//! images do: with SGD from the second push on, with Adam, which keeps two slots, from the fourth.

use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeSet, VecDeque},
    time::Duration,
};
use tokio::time::Instant;

/// The way into the log that is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Form {
    /// One entry for each update.
    #[default]
    Updates,
    /// Image cuts.
    Images,
}

impl Form {
    /// The word in status and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Form::Updates => "updates",
            Form::Images => "images",
        }
    }
}

/// What one interval's pushes cost in either form, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// As update entries.
    pub updates: u64,
    /// As one image cut.
    pub images: u64,
}

/// Intervals that a decision looks back on: a second, so that a burst at an epoch's start decides nothing.
const WINDOW: usize = 10;
/// Below this many bytes of updates in the window the network does not matter, and update entries give the better record
/// and the sooner ack: a client that waits for the ack of each small push would wait for a cut each time.
const MIN_BYTES: u64 = 8 << 20;

/// The form to change to, if the measured costs speak for it: to images when updates cost half as much again, back
/// when images cost a third more than updates. In between, what is stays.
pub fn decide(now: Form, window: &[Cost]) -> Option<Form> {
    if window.len() < WINDOW {
        return None;
    }
    let updates: u64 = window.iter().map(|c| c.updates).sum();
    let images: u64 = window.iter().map(|c| c.images).sum();
    match now {
        Form::Updates if updates >= MIN_BYTES && 2 * updates > 3 * images => Some(Form::Images),
        Form::Images if updates > 0 && 3 * images > 4 * updates => Some(Form::Updates),
        _ => None,
    }
}

/// Measures the costs of both forms, interval by interval, whichever is in use.
#[derive(Debug)]
pub struct Meter {
    interval: Duration,
    began: Option<Instant>,
    open: Cost,
    changed: BTreeSet<usize>,
    closed: VecDeque<Cost>,
}

impl Meter {
    /// `interval` is the time between two cuts.
    pub fn new(interval: Duration) -> Self {
        let (open, changed, closed) = Default::default();
        Self { interval, began: None, open, changed, closed }
    }

    /// Counts a push of `payload` bytes to a bucket whose image has `image` bytes.
    pub fn push(&mut self, bucket: usize, payload: usize, image: usize, now: Instant) {
        self.advance(now);
        self.open.updates += payload as u64;
        if self.changed.insert(bucket) {
            self.open.images += image as u64;
        }
    }

    /// A cut was made: a bucket that changes after it is in the next one too.
    pub fn cut(&mut self) {
        self.changed.clear();
    }

    /// Closes the intervals that are over; the decision, where one closed.
    pub fn decide(&mut self, form: Form, now: Instant) -> Option<Form> {
        if !self.advance(now) {
            return None;
        }
        decide(form, self.closed.make_contiguous())
    }

    fn advance(&mut self, now: Instant) -> bool {
        let began = *self.began.get_or_insert(now);
        let over = (now.duration_since(began).as_nanos() / self.interval.as_nanos().max(1)) as u32;
        if over == 0 {
            return false;
        }
        for _ in 0..over.min(WINDOW as u32 + 1) {
            self.closed.push_back(std::mem::take(&mut self.open));
            self.changed.clear();
        }
        while self.closed.len() > WINDOW {
            self.closed.pop_front();
        }
        self.began = Some(began + self.interval * over);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(updates: u64, images: u64) -> Vec<Cost> {
        vec![Cost { updates, images }; WINDOW]
    }

    #[test]
    fn the_form_follows_the_bytes_and_does_not_flap() {
        const M: u64 = 1 << 20;
        for (now, updates, images, want) in [
            (Form::Updates, 2 * M, M, Some(Form::Images)),
            (Form::Updates, 3 * M / 2, M, None),
            (Form::Updates, M, 3 * M, None),
            (Form::Updates, 0, 0, None),
            (Form::Updates, 3 * M / 4, 1, None), // nothing to save
            (Form::Images, 2 * M, M, None),
            (Form::Images, M, M, None), // between the two thresholds: what is stays
            (Form::Images, 3 * M / 4, M, None),
            (Form::Images, M / 2, M, Some(Form::Updates)),
            (Form::Images, 0, 0, None),
        ] {
            assert_eq!(decide(now, &window(updates, images)), want, "{now:?} {updates} {images}");
        }
        assert_eq!(decide(Form::Updates, &window(9 * M, M)[1..]), None, "too little was seen");
    }

    #[test]
    fn a_bucket_counts_once_in_an_interval_as_an_image_and_each_time_as_an_update() {
        let ms = Duration::from_millis;
        let start = Instant::now();
        let mut m = Meter::new(ms(100));
        for i in 0..WINDOW as u64 {
            let at = start + ms(100 * i + 50);
            m.push(0, 1 << 20, 3 << 20, at);
            m.push(0, 1 << 20, 3 << 20, at);
            m.push(1, 1 << 20, 3 << 20, at);
        }
        assert_eq!(m.decide(Form::Images, start + ms(1049)), None, "the last interval is still open");
        assert_eq!(m.decide(Form::Images, start + ms(1051)), Some(Form::Updates), "3 MiB against 6");
        assert_eq!(m.closed[0], Cost { updates: 3 << 20, images: 6 << 20 });
        // A long silence leaves nothing of it.
        assert_eq!(m.decide(Form::Images, start + ms(60_000)), None);
        assert!(m.closed.iter().all(|c| *c == Cost::default()));
    }
}

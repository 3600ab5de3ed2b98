//! Writes a report of made-up runs, to look at the page without training anything:
//! `cargo run -p paraft-record --example sample_report -- /tmp/report.html [autoencoder]`

use paraft_common::{ServerId, ShardId, Step, Version, WorkerId};
use paraft_record::{Eval, Event, Run, RunRecord, Shard, Train, Worker, write_report};

const WORKERS: u32 = 4;
const EPOCHS: u64 = 8;
const EPOCH_SAMPLES: u64 = 16_000;

/// A linear congruential generator: noise that is the same each time.
struct Noise(u64);

impl Noise {
    /// Between -1 and 1, bell-shaped.
    fn next(&mut self) -> f64 {
        let mut one = || {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
        };
        (one() + one() + one()) / 3.0
    }
}

/// How a made-up mode behaves: fleet samples a second, how fast it learns, its usual and its largest delay.
struct Habit {
    mode: &'static str,
    samples_per_s: f64,
    learns: f64,
    delay: f64,
    delay_max: u64,
    wait: f64,
}

fn events(habit: &Habit, classifies: bool) -> Vec<Event> {
    let wall = 1_795_253_039.0;
    let mut noise = Noise(habit.delay_max + 1);
    let budget = EPOCHS * EPOCH_SAMPLES;
    let mut events = vec![Event::Run(Run {
        wall,
        name: format!("demo-{}", habit.mode.replace(':', "-")),
        mode: habit.mode.into(),
        model: if classifies { "mlp-784-128-10" } else { "autoencoder-784-32" }.into(),
        data: "digits".into(),
        workers: WORKERS,
        servers: 3,
        shards: 2,
        replicas: 3,
        batch: 32,
        seed: 42,
        epochs: EPOCHS,
        parameters: 101_770,
        samples_budget: budget,
        optimizer: "momentum 0.9".into(),
        lr: 0.05,
        target_accuracy: classifies.then_some(0.95),
        resumed_step: None,
        simulated: false,
        ..Run::default()
    })];
    let loss_at = |samples: f64| 0.08 + 2.2 / (1.0 + samples * habit.learns / 4000.0);
    let seconds_at = |samples: f64| samples / habit.samples_per_s;

    for worker in 0..WORKERS {
        let (mut samples, mut seconds) = (0, 0.0);
        let pace = 1.0 + 0.04 * noise.next();
        for line in 1..=budget / u64::from(WORKERS) / 320 {
            samples += 320;
            let took = seconds_at(320.0 * f64::from(WORKERS)) * pace * (1.0 + 0.3 * noise.next());
            seconds += took;
            let fleet = samples as f64 * f64::from(WORKERS);
            events.push(Event::Train(Train {
                wall: wall + seconds,
                worker: WorkerId(worker),
                step: Step(line * 10),
                epoch: fleet as u64 / EPOCH_SAMPLES,
                samples,
                seconds,
                loss: loss_at(fleet) * (1.0 + 0.25 * noise.next()),
                samples_per_s: 320.0 / took,
                wait_seconds: seconds * habit.wait,
                delay_mean: Some(habit.delay),
                ..Train::default()
            }));
        }
        let bytes = samples / 32 * 4 * 101_770;
        events.push(Event::Worker(Worker {
            wall: wall + seconds,
            worker: WorkerId(worker),
            steps: samples / 32,
            samples,
            seconds,
            wait_seconds: seconds * habit.wait,
            bytes_pushed: bytes,
            bytes_pulled: bytes + 4 * 101_770,
            cpu_seconds: seconds * (1.0 - habit.wait),
            peak_rss_bytes: 60 << 20,
        }));
    }
    for epoch in 1..=EPOCHS {
        let samples = epoch * EPOCH_SAMPLES;
        let loss = loss_at(samples as f64) * 1.1;
        events.push(Event::Eval(Eval {
            wall: wall + seconds_at(samples as f64),
            epoch,
            samples,
            seconds: seconds_at(samples as f64),
            loss,
            accuracy: classifies.then(|| 0.995 - loss * 0.22 + 0.003 * noise.next()),
            count: 2000,
            is_final: epoch == EPOCHS,
            step: None,
        }));
    }
    for shard in 0..2 {
        let weight = |d: u64| (-((d as f64 - habit.delay) / (0.6 + habit.delay * 0.5)).powi(2)).exp();
        let delay: Vec<u64> =
            (0..=habit.delay_max).map(|d| (3700.0 * weight(d)) as u64 + u64::from(d > 0)).collect();
        let pushes = delay.iter().sum();
        events.push(Event::Shard(Shard {
            wall,
            shard: ShardId(shard),
            server: ServerId(u64::from(shard)),
            version: Version(pushes),
            delay,
            pushes,
            pulls_waited: 40,
            bytes_pushed: budget / 32 * 2 * 101_770,
            bytes_pulled: budget / 32 * 2 * 101_770,
            pushes_lost: 0,
            ..Shard::default()
        }));
    }
    events
}

fn main() -> Result<(), paraft_record::RecordError> {
    let mut args = std::env::args().skip(1);
    let path = args.next().unwrap_or_else(|| "report.html".into());
    let classifies = args.next().is_none_or(|what| what != "autoencoder");
    let habits = [
        Habit { mode: "bsp", samples_per_s: 3100.0, learns: 1.0, delay: 0.0, delay_max: 0, wait: 0.31 },
        Habit { mode: "ssp:4", samples_per_s: 4400.0, learns: 0.95, delay: 2.6, delay_max: 11, wait: 0.07 },
        Habit { mode: "asp", samples_per_s: 4900.0, learns: 0.7, delay: 3.4, delay_max: 34, wait: 0.0 },
    ];
    // The autoencoder's page shows one run alone.
    let shown = if classifies { &habits[..] } else { &habits[..1] };
    let records: Vec<_> =
        shown.iter().filter_map(|h| RunRecord::from_events(events(h, classifies))).collect();
    write_report(&path, &records)?;
    println!("{path}");
    Ok(())
}

//! An actor: a reader of the job that plays CartPole with the versions it reads, and sends what it played to the learner.
//!
//! It reads a version in the background while it plays with the one that it has. Only when that is older than
//! [`Acting::max_age`] does it wait.

use crate::{
    env::{CartPole, End},
    fragment::{Answer, Fragment, Step},
    net::{self, LEN},
    rng::Rng,
    settings::Acting,
};
use paraft_worker::reader::{ReadError, Reader, ValueType, Want, WholeVersion};
use std::{
    io,
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::{runtime::Handle, task::JoinHandle};

/// How long an actor tries to reach the learner, and how long it waits for a version before it asks again.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Between two attempts to connect.
const RETRY: Duration = Duration::from_millis(100);

/// Why an actor ended early.
#[derive(Debug, thiserror::Error)]
pub enum ActorError {
    /// The job's weights are not to be read.
    #[error("a version cannot be read: {0}")]
    Read(#[from] ReadError),
    /// The learner is not reached.
    #[error("the learner at {0} is not reached: {1}. Start it, or name the address it listens at")]
    Learner(String, io::Error),
    /// The job trains something else.
    #[error("the job has other tensors than this program's policy: `{0}` is missing or has another size")]
    OtherModel(String),
    /// The task that reads ended.
    #[error("the task that reads versions ended: {0}")]
    Task(#[from] tokio::task::JoinError),
}

/// Where an actor belongs.
#[derive(Clone, Debug)]
pub struct Place {
    /// Some servers of the fleet, as host:port.
    pub servers: Vec<String>,
    /// The job's name.
    pub job: String,
    /// The learner's address, host:port.
    pub learner: String,
    /// The seed of its actions and episodes; actors of one learner need different ones.
    pub seed: u64,
}

/// What an actor did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Played {
    /// Fragments that it sent.
    pub fragments: u64,
    /// Versions that it read.
    pub versions: u64,
}

type Reading = JoinHandle<(Reader, Result<WholeVersion, ReadError>)>;

/// The policy in use, and where the next one comes from.
struct Policy {
    version: u64,
    weights: Vec<f32>,
    /// `None` while `reading` has it.
    reader: Option<Reader>,
    reading: Option<Reading>,
    read: u64,
}

impl Policy {
    async fn first(place: &Place) -> Result<Self, ActorError> {
        let mut reader = Reader::open(&place.servers, &place.job, ValueType::F32, TIMEOUT).await?;
        let version = reader.next(Want::AtLeast(0), TIMEOUT).await?;
        let weights = weights(&reader, &version)?;
        Ok(Self { version: version.step, weights, reader: Some(reader), reading: None, read: 1 })
    }

    /// Begins to read a version if the policy is old enough. Takes the version if it has come, or must come.
    /// Returns whether there will be no more.
    async fn refresh(&mut self, runtime: &Handle, updates: u64, acting: Acting) -> Result<bool, ActorError> {
        loop {
            let age = updates.saturating_sub(self.version);
            if (age >= acting.refresh || age > acting.max_age)
                && let Some(mut reader) = self.reader.take()
            {
                // The newest one: to wait for a version far ahead would delay other readers' next ones.
                let read = async move {
                    let version = reader.next(Want::AtLeast(0), TIMEOUT).await;
                    (reader, version)
                };
                self.reading = Some(runtime.spawn(read));
            }
            let must = age > acting.max_age;
            let Some(reading) = self.reading.take_if(|r| must || r.is_finished()) else { return Ok(false) };
            let (reader, version) = reading.await?;
            match version {
                Ok(version) => {
                    self.weights = weights(&reader, &version)?;
                    // A version that is read late may be newer than the learner's last answer.
                    self.version = version.step;
                    self.read += 1;
                }
                Err(ReadError::Ended { .. }) => return Ok(true),
                // The servers may elect a leader.
                Err(ReadError::Timeout(_)) => {}
                Err(error) => return Err(error.into()),
            }
            self.reader = Some(reader);
            if updates.saturating_sub(self.version) <= acting.max_age {
                return Ok(false);
            }
        }
    }
}

fn weights(reader: &Reader, version: &WholeVersion) -> Result<Vec<f32>, ActorError> {
    let mut weights = Vec::with_capacity(LEN);
    let theirs = reader.layout().tensors();
    for tensor in net::tensors() {
        let place = theirs.iter().position(|t| t.name == tensor.name && t.shape == tensor.shape);
        let bytes = place.and_then(|i| version.tensor(reader.layout(), ValueType::F32, i));
        let bytes = bytes.ok_or_else(|| ActorError::OtherModel(tensor.name.clone()))?;
        weights.extend(bytes.as_chunks().0.iter().map(|v| f32::from_le_bytes(*v)));
    }
    Ok(weights)
}

/// Plays until the learner says that training is over, the job has ended, or `stop` is set. `runtime` reads versions; it needs a
/// thread of its own.
///
/// # Errors
/// The job or the learner is not reached for 30 seconds, or the job is none of this example's.
pub fn play(
    place: &Place,
    acting: Acting,
    runtime: &Handle,
    stop: &Arc<AtomicBool>,
) -> Result<Played, ActorError> {
    let mut rng = Rng::new(place.seed, 1);
    let mut policy = runtime.block_on(Policy::first(place))?;
    let mut pole = CartPole::start(&mut rng);
    let mut played = Played::default();
    let mut learner = None;
    let mut updates = policy.version;
    while !stop.load(Relaxed) {
        if runtime.block_on(policy.refresh(runtime, updates, acting))? {
            break;
        }
        let fragment = play_fragment(&policy, &mut pole, acting.fragment as usize, &mut rng);
        let mut stream = match learner.take() {
            Some(stream) => stream,
            None => match connect(&place.learner, stop) {
                Ok(stream) => stream,
                Err(_) if stop.load(Relaxed) => break,
                Err(error) => return Err(ActorError::Learner(place.learner.clone(), error)),
            },
        };
        // A learner that was started again has lost the fragment; it takes the next one.
        if let Ok(answer) = fragment.write(&mut stream).and_then(|()| Answer::read(&mut stream)) {
            updates = answer.updates;
            played.fragments += 1;
            if answer.over {
                break;
            }
            learner = Some(stream);
        }
    }
    Ok(Played { versions: policy.read, ..played })
}

fn connect(learner: &str, stop: &AtomicBool) -> io::Result<TcpStream> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match TcpStream::connect(learner) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(error) if stop.load(Relaxed) || Instant::now() >= deadline => return Err(error),
            Err(_) => std::thread::sleep(RETRY),
        }
    }
}

fn play_fragment(policy: &Policy, pole: &mut CartPole, steps: usize, rng: &mut Rng) -> Fragment {
    let mut fragment = Fragment { version: policy.version, ..Fragment::default() };
    while fragment.steps.len() < steps {
        let observation = pole.observation();
        let (right, log_probability) = net::act(&policy.weights, observation, rng);
        let end = pole.step(right);
        let over = end == Some(End::Fell);
        fragment.steps.push(Step { observation, log_probability, right, over });
        fragment.last = pole.observation();
        if end.is_some() {
            fragment.episodes.push(pole.steps());
            *pole = CartPole::start(rng);
        }
        if end == Some(End::TimeLimit) {
            break; // the value of the last observation counts, which a fragment has only at its end
        }
    }
    fragment
}

/// Mean reward of `episodes` new episodes, with actions drawn from the policy.
pub fn evaluate(weights: &[f32], episodes: u32, seed: u64) -> f64 {
    let mut rng = Rng::new(seed, 2);
    let rewards = (0..episodes).map(|_| {
        let mut pole = CartPole::start(&mut rng);
        while pole.step(net::act(weights, pole.observation(), &mut rng).0).is_none() {}
        f64::from(pole.steps())
    });
    rewards.sum::<f64>() / f64::from(episodes.max(1))
}

#[cfg(test)]
#[path = "actor_tests.rs"]
mod tests;

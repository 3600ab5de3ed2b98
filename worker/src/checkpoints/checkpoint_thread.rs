//! The thread that writes checkpoints in order and reports each result.

use super::{
    author::{Author, Failed, InForce, SavedCheckpoint},
    control_notifier::ControlNotifier,
};
use crate::{WorkerError, recorder::wall};
use paraft_checkpoint::{Folder, Manifest, State};
use paraft_client::checkpoints::FolderContents;
use paraft_common::{
    Step,
    checkpoint::{KnownCheckpoint, MAX_KNOWN_CHECKPOINTS},
};
use paraft_record::event;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        atomic::{AtomicU64, Ordering::SeqCst},
        mpsc,
    },
    time::Instant,
};

/// A message to the thread.
pub(super) enum Order {
    /// This many epochs are done at this step.
    Epochs(Step, u64),
    /// Reply when all earlier orders are done.
    Tell(mpsc::Sender<()>),
    /// Write this step's checkpoint.
    Write(Step, InForce),
    /// Write the current state, which belongs to the worker's step.
    Save(Step, SaveTask),
    /// Write this state, of a job whose ranks hold it, with the job's founding number.
    Own(Step, Box<State>, u64),
    /// Release this step: only some shards keep an image of it.
    Release(Step),
    Loss(Step, f64),
}

/// Receives the folder of a checkpoint that it asked for.
type SaveReply = mpsc::Sender<Result<PathBuf, WorkerError>>;

/// A request to write the current state now.
pub(super) struct SaveTask {
    /// The target folder; `None`: the job's checkpoint folder.
    pub folder: Option<Folder>,
    /// As of the previous step.
    pub in_force: InForce,
    /// Receives the result.
    pub reply: SaveReply,
}

/// The thread's state.
pub(super) struct CheckpointThread {
    pub author: Author,
    pub folder: Option<Folder>,
    pub teller: ControlNotifier,
}

/// The checkpoints that this worker has written.
#[derive(Default)]
struct WrittenCheckpoints {
    /// The founding number, which identifies the job.
    job: u64,
    /// By step: the held-out loss, if known.
    losses: BTreeMap<u64, Option<f64>>,
}

impl CheckpointThread {
    /// Runs until all senders are dropped. `waiting`: number of queued checkpoints.
    pub fn work(
        self,
        orders: &mpsc::Receiver<Order>,
        tell: &mpsc::Sender<event::Checkpoint>,
        waiting: &AtomicU64,
    ) {
        let mut written = WrittenCheckpoints::default();
        let mut epochs = None;
        let done = |e| {
            let _ = tell.send(e);
            waiting.fetch_sub(1, SeqCst);
        };
        while let Ok(order) = orders.recv() {
            match order {
                Order::Tell(who) => {
                    let _ = who.send(());
                }
                Order::Epochs(step, done) => epochs = Some((step, done)),
                Order::Write(step, in_force) => {
                    let Some(folder) = &self.folder else { continue };
                    let began = Instant::now();
                    let over = epochs.filter(|(at, _)| *at == step).map(|(_, done)| done);
                    let result = self.author.write(folder, step, over, in_force);
                    done(self.note(step, began, result, None, &mut written));
                }
                Order::Own(step, state, founding) => {
                    let Some(folder) = &self.folder else { continue };
                    let began = Instant::now();
                    let result = self.author.write_own(folder, step, &state);
                    let result = result.map(|(path, bytes)| (path, bytes, founding));
                    done(self.note(step, began, result, None, &mut written));
                }
                Order::Save(step, SaveTask { folder: None, in_force, reply }) => {
                    let Some(folder) = &self.folder else { continue };
                    let began = Instant::now();
                    let result = self.author.save(folder, step, &in_force);
                    done(self.note(step, began, result, Some(reply), &mut written));
                }
                Order::Save(step, SaveTask { folder: Some(folder), in_force, reply }) => {
                    let saved = self.author.save(&folder, step, &in_force);
                    let _ = reply.send(saved.map(|(path, ..)| path).map_err(Into::into));
                    waiting.fetch_sub(1, SeqCst);
                }
                Order::Release(step) => {
                    tracing::info!(step = step.0, "no checkpoint: not every shard has an image");
                    self.author.release(step);
                }
                Order::Loss(step, loss) if written.losses.contains_key(&step.0) => {
                    let Some(folder) = &self.folder else { continue };
                    if let Err(why) = folder.note_loss(step.0, loss) {
                        tracing::warn!(step = step.0, %why, "`best` was not updated");
                    }
                    folder.prune(self.author.keep); // the former best checkpoint may be superfluous now
                    written.losses.insert(step.0, Some(loss).filter(|l| l.is_finite()));
                    self.tell(&written);
                }
                Order::Loss(..) => {}
            }
        }
    }

    /// The record's line on a checkpoint whose write began then. Tells who asked for it, and the control group.
    fn note(
        &self,
        step: Step,
        began: Instant,
        result: Result<SavedCheckpoint, Failed>,
        reply: Option<SaveReply>,
        written: &mut WrittenCheckpoints,
    ) -> event::Checkpoint {
        let mut e = event::Checkpoint {
            wall: wall(),
            worker: self.author.worker,
            step,
            seconds: began.elapsed().as_secs_f64(),
            ..Default::default()
        };
        let answer = match result {
            Ok((path, bytes, founding)) => {
                written.job = founding;
                written.losses.insert(step.0, None);
                self.tell(written);
                tracing::info!(step = step.0, path = %path.display(), seconds = e.seconds, "checkpoint");
                (e.path, e.bytes) = (path.display().to_string(), bytes);
                Ok(path)
            }
            Err(why) => {
                tracing::warn!(step = step.0, %why, "no checkpoint");
                e.error = Some(why.to_string());
                Err(why.into())
            }
        };
        if let Some(reply) = reply {
            let _ = reply.send(answer);
        }
        e
    }

    /// Reports the folder's content to the control group. Returns at once.
    fn tell(&self, written: &WrittenCheckpoints) {
        let absolute = |p: &Path| std::path::absolute(p).unwrap_or_else(|_| p.to_path_buf());
        let Some(own) = &self.folder else { return };
        let best = own.best();
        let is_best = |path: &Path| best.as_ref().filter(|(p, _)| p.file_name() == path.file_name());
        let held = |(path, manifest): (PathBuf, Option<Manifest>)| {
            let m = manifest.filter(|m| m.name == self.author.name)?;
            let versions = || m.buckets.iter().map(|b| b.version);
            let ours = written.losses.get(&m.step);
            Some(KnownCheckpoint {
                path: absolute(&path).display().to_string(),
                step: m.step,
                versions: (versions().min().unwrap_or(0), versions().max().unwrap_or(0)),
                bytes: m.files.values().map(|f| f.bytes).sum(),
                loss: ours.copied().flatten().or(is_best(&path).map(|(_, loss)| *loss)),
                written_ms: (m.written * 1e3) as u64,
                worker: ours.map(|_| self.author.worker),
                best: is_best(&path).is_some(),
            })
        };
        let all: Vec<KnownCheckpoint> = own.manifests().into_iter().filter_map(held).collect();
        let (mut held, older) = all.split_at(all.len().min(MAX_KNOWN_CHECKPOINTS));
        let best = older.iter().find(|h| h.best);
        if best.is_some() {
            held = &held[..MAX_KNOWN_CHECKPOINTS - 1];
        }
        let held = held.iter().chain(best).cloned().collect();
        let folder = absolute(own.path()).display().to_string();
        self.teller.tell(FolderContents { job: written.job, folder, held });
    }
}

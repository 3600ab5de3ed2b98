//! Tells the control group which checkpoints there are, on a thread of its own: neither training nor the next
//! checkpoint waits for it. What counts is on the disk; the control group's list is for people who ask.

use paraft_client::{
    Transport,
    checkpoints::{FolderContents, note_checkpoints},
};
use std::{
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

/// The control group is without a leader for a second or two at most; who waits for the end of the last try waits
/// no longer than this.
const TIMEOUT: Duration = Duration::from_secs(5);
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// A worker's side of it. Dropped, it waits for the last try.
pub(super) struct ControlNotifier {
    news: Option<mpsc::Sender<FolderContents>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl ControlNotifier {
    /// Starts the thread.
    pub fn start(servers: Vec<String>, transport: Transport) -> std::io::Result<Self> {
        let (news, received) = mpsc::channel();
        let work = move || work(&servers, transport, &received);
        let thread = thread::Builder::new().name("paraft-tell".into()).spawn(work)?;
        Ok(Self { news: Some(news), thread: Some(thread) })
    }

    /// Returns at once.
    pub fn tell(&self, contents: FolderContents) {
        if let Some(news) = &self.news {
            let _ = news.send(contents); // its thread ends only with us
        }
    }
}

impl Drop for ControlNotifier {
    fn drop(&mut self) {
        self.news = None;
        if let Some(t) = self.thread.take() {
            let _ = t.join();
        }
    }
}

fn work(servers: &[String], transport: Transport, news: &mpsc::Receiver<FolderContents>) {
    let mut told = None;
    while let Ok(contents) = news.recv() {
        // Each says everything, so only the last counts.
        let mut latest = news.try_iter().last().unwrap_or(contents);
        if told.as_ref() == Some(&latest) {
            continue;
        }
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(why) => {
                tracing::warn!(%why, "the control group was not told of the checkpoints: no I/O runtime");
                continue;
            }
        };
        let mut deadline = Instant::now() + TIMEOUT;
        loop {
            match runtime.block_on(note_checkpoints(servers, transport, &latest)) {
                Ok(()) => {
                    told = Some(latest);
                    break;
                }
                Err(why) if Instant::now() > deadline => {
                    let step = latest.held.iter().map(|h| h.step).max().unwrap_or(0);
                    tracing::warn!(
                        folder = %latest.folder, step, %why,
                        "the control group did not take which checkpoints there are, so `paraft status` may not show \
                         them; they are whole, training goes on, and the next one says it again"
                    );
                    break;
                }
                Err(why) => tracing::debug!(%why, "the control group is told again"),
            }
            match news.recv_timeout(RETRY_DELAY) {
                Ok(newer) => {
                    latest = newer;
                    deadline = Instant::now() + TIMEOUT;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => thread::sleep(RETRY_DELAY), // the last one gets its time all the same
            }
        }
    }
}

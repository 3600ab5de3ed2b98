//! Reports the checkpoints to the control group, on its own thread: neither training nor the next checkpoint waits
//! for it. The disk is authoritative; the control group's list serves users' queries.

use paraft_client::{
    Transport,
    checkpoints::{FolderContents, note_checkpoints},
};
use std::{
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

/// The control group is without a leader for at most a second or two. A caller that waits for the last attempt
/// waits no longer than this.
const TIMEOUT: Duration = Duration::from_secs(5);
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// A worker's handle. Dropping it waits for the last attempt.
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

    /// Sends a report. Returns at once.
    pub fn tell(&self, contents: FolderContents) {
        if let Some(news) = &self.news {
            let _ = news.send(contents); // the thread outlives this handle
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
        // Each report is complete, so only the latest matters.
        let mut latest = news.try_iter().last().unwrap_or(contents);
        if told.as_ref() == Some(&latest) {
            continue;
        }
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(why) => {
                tracing::warn!(%why, "cannot report checkpoints to the control group: no I/O runtime");
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
                        "the control group did not accept the list of checkpoints, so `paraft status` may not show \
                         them; they are complete, training continues, and the next report repeats them"
                    );
                    break;
                }
                Err(why) => tracing::debug!(%why, "a report to the control group failed; retrying"),
            }
            match news.recv_timeout(RETRY_DELAY) {
                Ok(newer) => {
                    latest = newer;
                    deadline = Instant::now() + TIMEOUT;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => thread::sleep(RETRY_DELAY), // the last report gets its full time
            }
        }
    }
}

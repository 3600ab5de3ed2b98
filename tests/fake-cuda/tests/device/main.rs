//! Our CUDA code, on the fakes: every operator against its plain version, and whatever a missing event would break.

mod flat;
mod graphs;
mod group;
mod layers;
mod local;
mod models;
mod operators;

use anyhow::Result;
use paraft_fake_cuda::Fake;
use std::sync::{Mutex, MutexGuard};

// The process has one set of devices: a test has them for itself, sound and with settings as they were.
struct Session {
    fake: &'static Fake,
    _alone: MutexGuard<'static, ()>,
}

impl Session {
    /// None: skipped, for want of a C++ compiler.
    fn begin(test: &str) -> Result<Option<Session>> {
        static ALONE: Mutex<()> = Mutex::new(());
        if paraft_fake_cuda::skipped(test) {
            return Ok(None);
        }
        let alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
        let fake = paraft_fake_cuda::install().map_err(anyhow::Error::msg)?;
        let session = Session { fake, _alone: alone };
        fake.mend();
        // For groups. It counts only before the first test initialises them.
        session.set("DEVICES", "2")?;
        session.set("MEMORY", "4000000000")?;
        session.set("BACKGROUND", "0")?;
        session.set("SCHEDULE", "random")?;
        session.set("SEED", "1")?;
        Ok(Some(session))
    }

    fn set(&self, name: &str, value: &str) -> Result<()> {
        self.fake.set(name, value).map_err(anyhow::Error::msg)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.fake.mend();
    }
}

//! The fakes themselves, through cudarc's own interface: what a GPU would do they do, what it would refuse they refuse,
//! and what only luck hides on a GPU they show.

mod gemm;
mod graphs;
mod kernels;
mod nccl;
mod refused;
mod streams;

use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::{Context, Result};
use cudarc::driver::{CudaContext, CudaFunction};
use cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};
use paraft_fake_cuda::Fake;

/// The process has one set of devices: a test has them for itself, sound and with settings as they were.
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
        let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
        let fake = paraft_fake_cuda::install().map_err(anyhow::Error::msg)?;
        fake.mend();
        // More devices than one count only before the first test initialises them.
        fake.set("DEVICES", "2").map_err(anyhow::Error::msg)?;
        for (name, value) in
            [("SEED", "1"), ("MEMORY", "1000000000"), ("BACKGROUND", "0"), ("SCHEDULE", "random")]
        {
            fake.set(name, value).map_err(anyhow::Error::msg)?;
        }
        Ok(Some(Session { fake, _alone }))
    }

    fn seed(&self, seed: u64) -> Result<()> {
        self.fake.set("SEED", &seed.to_string()).map_err(anyhow::Error::msg)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.fake.mend();
    }
}

/// A context without cudarc's own event tracking: the tests set their events themselves.
fn context() -> Result<Arc<CudaContext>> {
    let context = CudaContext::new(0)?;
    // SAFETY: these tests order their streams by their own events, or mean not to.
    unsafe { context.disable_event_tracking() };
    Ok(context)
}

const SELFTEST: &str = include_str!("../../kernels/selftest.cu");

fn function(context: &Arc<CudaContext>, name: &str) -> Result<CudaFunction> {
    let options = CompileOptions { arch: Some("sm_90"), ..Default::default() };
    let ptx = compile_ptx_with_opts(SELFTEST, options).context("compile")?;
    Ok(context.load_module(ptx)?.load_function(name)?)
}

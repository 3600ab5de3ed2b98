//! Contexts, streams and events.

use crate::{
    cuda::library::{self, Part},
    error::{DeviceError, Result},
};
use cudarc::driver::sys::{self, CUresult};
use std::{
    ffi::CStr,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// The driver's name and text of an error.
fn explain(code: CUresult) -> String {
    let text = |get: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = ptr::null();
        // SAFETY: both functions write a pointer to a constant, or fail.
        if unsafe { get(code, &mut text) } != CUresult::CUDA_SUCCESS || text.is_null() {
            return None;
        }
        // SAFETY: it points to a constant text with its end.
        Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    };
    match (text(sys::cuGetErrorName), text(sys::cuGetErrorString)) {
        (Some(name), Some(text)) => format!("{name}: {text}"),
        _ => format!("{code:?}"),
    }
}

/// Converts the driver's code to a result.
pub(crate) fn check(code: CUresult, device: &str, call: impl FnOnce() -> String) -> Result {
    if code == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(DeviceError::Call { device: device.to_string(), call: call(), error: explain(code) })
}

fn start() -> Result {
    library::find(Part::Driver).map_err(|e| DeviceError::Missing(e.to_string()))?;
    // SAFETY: may be called at any time, also twice.
    check(unsafe { sys::cuInit(0) }, "the CUDA driver", || "cuInit".into())
}

/// The number of the driver's devices. An error says that there is no driver, or why it does not start.
pub fn count() -> Result<u32> {
    start()?;
    let mut count = 0;
    // SAFETY: writes one integer.
    check(unsafe { sys::cuDeviceGetCount(&mut count) }, "the CUDA driver", || "cuDeviceGetCount".into())?;
    Ok(count.max(0) as u32)
}

/// The CUDA version of the driver, for example 13000 for 13.0.
pub fn version() -> Result<u32> {
    start()?;
    let mut version = 0;
    // SAFETY: writes one integer.
    check(unsafe { sys::cuDriverGetVersion(&mut version) }, "the CUDA driver", || {
        "cuDriverGetVersion".into()
    })?;
    Ok(version.max(0) as u32)
}

/// A device, and our context on it.
#[derive(Debug)]
pub struct Context {
    device: sys::CUdevice,
    raw: sys::CUcontext,
    /// `cuda:0 (NVIDIA H100 80GB HBM3)`
    name: String,
    model: String,
    /// Major and minor.
    compute: (u32, u32),
    total: u64,
    /// Counts allocations and deallocations.
    layout: AtomicU64,
    /// Whether a stream is being recorded.
    recording: AtomicBool,
}

// SAFETY: a context may be used from any thread that has made it current (`bind`); the rest is constant.
unsafe impl Send for Context {}
// SAFETY: likewise.
unsafe impl Sync for Context {}

impl Context {
    /// The `ordinal`-th device; the error says how many there are.
    pub fn new(ordinal: u32) -> Result<Arc<Self>> {
        let count = count()?;
        if ordinal >= count {
            let there = match count {
                0 => "the driver sees none (in a container, start it with --gpus all)".to_string(),
                n => format!("there are {n}, cuda:0 to cuda:{}", n - 1),
            };
            return Err(DeviceError::Missing(format!("there is no device cuda:{ordinal}: {there}")));
        }
        let mut name = format!("cuda:{ordinal}");
        let mut device = 0;
        // SAFETY: writes one handle.
        check(unsafe { sys::cuDeviceGet(&mut device, ordinal as i32) }, &name, || "cuDeviceGet".into())?;
        let mut text = [0; 256];
        // SAFETY: writes at most as many bytes, its end included.
        check(unsafe { sys::cuDeviceGetName(text.as_mut_ptr(), 255, device) }, &name, || {
            "cuDeviceGetName".into()
        })?;
        // SAFETY: the last byte is zero.
        let model = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned();
        name = format!("{name} ({model})");
        let attribute = |of| {
            let mut value = 0;
            // SAFETY: writes one integer.
            let code = unsafe { sys::cuDeviceGetAttribute(&mut value, of, device) };
            check(code, &name, || "cuDeviceGetAttribute".into()).map(|()| value.max(0) as u32)
        };
        use sys::CUdevice_attribute_enum as A;
        let compute = (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let mut total = 0;
        // SAFETY: writes one integer.
        check(unsafe { sys::cuDeviceTotalMem_v2(&mut total, device) }, &name, || "cuDeviceTotalMem".into())?;
        let mut raw = ptr::null_mut();
        // SAFETY: writes one handle, which is given back when this is dropped.
        check(unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) }, &name, || {
            "cuDevicePrimaryCtxRetain".into()
        })?;
        let (layout, recording) = Default::default();
        let context = Self { device, raw, name, model, compute, total: total as u64, layout, recording };
        context.bind()?;
        Ok(Arc::new(context))
    }

    /// `cuda:0 (…)`, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device's model name.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Compute capability, for example (9, 0).
    pub fn compute(&self) -> (u32, u32) {
        self.compute
    }

    /// Free and total bytes of memory.
    pub fn memory(&self) -> Result<(u64, u64)> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two integers.
        self.check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, || "cuMemGetInfo".into())?;
        Ok((free as u64, total as u64))
    }

    /// See [`crate::cuda::CudaDevice::layout`].
    pub(crate) fn layout(&self) -> u64 {
        self.layout.load(Ordering::Relaxed)
    }

    pub(crate) fn note_layout(&self) {
        self.layout.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn is_recording(&self) -> bool {
        self.recording.load(Ordering::Relaxed)
    }

    /// Refuses what a graph cannot repeat, while one is recorded.
    pub(crate) fn refuse_in_recording(&self, what: impl FnOnce() -> String) -> Result {
        match self.is_recording() {
            true => Err(DeviceError::Unsupported(format!("{} while a graph is written down", what()))),
            false => Ok(()),
        }
    }

    pub(crate) fn set_recording(&self, recording: bool) {
        self.recording.store(recording, Ordering::Relaxed);
    }

    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Makes this the thread's context. It precedes every call from a thread that may not have done it.
    pub(crate) fn bind(&self) -> Result {
        // SAFETY: the handle lives as long as `self`.
        check(unsafe { sys::cuCtxSetCurrent(self.raw) }, &self.name, || "cuCtxSetCurrent".into())
    }

    pub(crate) fn check(&self, code: CUresult, call: impl FnOnce() -> String) -> Result {
        check(code, &self.name, call)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, in `new`; everything made in it holds it by `Arc` and is gone.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// An ordered queue of work.
#[derive(Debug)]
pub struct Stream {
    raw: sys::CUstream,
    context: Arc<Context>,
}

// SAFETY: the driver takes calls for a stream from any thread.
unsafe impl Send for Stream {}
// SAFETY: likewise.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream that waits for no other by itself. If two streams have work, the one with the lower `priority` runs
    /// (0 is normal, -1 is higher).
    pub fn new(context: &Arc<Context>, priority: i32) -> Result<Arc<Self>> {
        context.bind()?;
        let mut raw = ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle, which is given back when this is dropped.
        context.check(unsafe { sys::cuStreamCreateWithPriority(&mut raw, flags, priority) }, || {
            "cuStreamCreateWithPriority".into()
        })?;
        Ok(Arc::new(Self { raw, context: context.clone() }))
    }

    /// The device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Later work on this stream waits for the event.
    pub fn wait(&self, event: &Event) -> Result {
        // SAFETY: both handles are alive; the driver keeps what it needs of the event.
        self.context
            .check(unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) }, || "cuStreamWaitEvent".into())
    }

    /// Waits on the host for all work of the stream.
    pub fn synchronize(&self) -> Result {
        self.context.bind()?;
        // SAFETY: the handle is alive.
        self.context.check(unsafe { sys::cuStreamSynchronize(self.raw) }, || "cuStreamSynchronize".into())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: created in `new`, destroyed once; work in progress continues.
        unsafe { sys::cuStreamDestroy_v2(self.raw) };
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub struct Event {
    raw: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: the driver takes calls for an event from any thread.
unsafe impl Send for Event {}
// SAFETY: likewise.
unsafe impl Sync for Event {}

impl Event {
    /// An unrecorded event: a wait for it returns at once.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        context.bind()?;
        use sys::CUevent_flags_enum as F;
        // A waiting thread sleeps, because it shares its cores with the servers.
        let flags = F::CU_EVENT_DISABLE_TIMING as u32 | F::CU_EVENT_BLOCKING_SYNC as u32;
        let mut raw = ptr::null_mut();
        // SAFETY: writes one handle, which is given back when this is dropped.
        context.check(unsafe { sys::cuEventCreate(&mut raw, flags) }, || "cuEventCreate".into())?;
        Ok(Self { raw, context: context.clone() })
    }

    /// Moves the event to the end of the stream's present work.
    pub fn record(&self, stream: &Stream) -> Result {
        // SAFETY: both handles are alive.
        self.context.check(unsafe { sys::cuEventRecord(self.raw, stream.raw) }, || "cuEventRecord".into())
    }

    /// Waits on the host.
    pub fn synchronize(&self) -> Result {
        self.context.bind()?;
        // SAFETY: the handle is alive.
        self.context.check(unsafe { sys::cuEventSynchronize(self.raw) }, || "cuEventSynchronize".into())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: created in `new`, destroyed once; the driver keeps it for pending waits.
        unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}

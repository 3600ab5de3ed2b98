//! Work of a stream that is written down once and then begun at once, again and again: CUDA graphs. To begin a kernel takes the host
//! some microseconds, longer than many kernels of a small model run.
//!
//! A graph keeps addresses: one that was written down before memory was given back or allocated since is not begun any more.

use crate::{
    cuda::{
        device::CudaDevice,
        driver::{Context, Stream},
    },
    error::{DeviceError, Result},
};
use cudarc::driver::sys;
use std::{ptr, sync::Arc};

/// Whatever is begun on the stream until [`Self::end`] is written down, and not done. If that never comes it is forgotten.
///
/// Operators make no room meanwhile: what frees or allocates memory is refused, and so are collectives, which other ranks would
/// have to write down as well.
#[derive(Debug)]
pub struct Recording {
    stream: Arc<Stream>,
    open: bool,
}

impl Recording {
    /// From now on; only this thread may use the stream.
    pub fn begin(stream: &Arc<Stream>) -> Result<Self> {
        let context = stream.context();
        context.bind()?;
        // Other threads may free what they like: it is none of the graph's.
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        context.check(unsafe { sys::cuStreamBeginCapture_v2(stream.raw(), mode) }, || {
            "cuStreamBeginCapture".into()
        })?;
        context.set_recording(true);
        Ok(Self { stream: stream.clone(), open: true })
    }

    /// What was written down; none if that was nothing.
    pub fn end(mut self) -> Result<Option<Graph>> {
        let Some(written) = CapturedGraph::of(&mut self)? else { return Ok(None) };
        let context = self.stream.context();
        let mut nodes = 0;
        // SAFETY: the graph is alive; without room for them the nodes are only counted.
        context.check(unsafe { sys::cuGraphGetNodes(written.0, ptr::null_mut(), &mut nodes) }, || {
            "cuGraphGetNodes".into()
        })?;
        if nodes == 0 {
            return Ok(None);
        }
        let mut exec = ptr::null_mut();
        // SAFETY: writes one handle, which is given back when the graph is dropped.
        let code = unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, written.0, 0) };
        context.check(code, || format!("cuGraphInstantiateWithFlags of {nodes} nodes"))?;
        Ok(Some(Graph { exec, context: context.clone(), layout: context.layout() }))
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // What was written down until an error is given back.
        let _ = CapturedGraph::of(self);
    }
}

/// A graph that cannot be begun yet.
struct CapturedGraph(sys::CUgraph);

impl CapturedGraph {
    /// Ends a recording, if it has not ended.
    fn of(recording: &mut Recording) -> Result<Option<Self>> {
        if !std::mem::take(&mut recording.open) {
            return Ok(None);
        }
        let context = recording.stream.context();
        context.set_recording(false);
        context.bind()?;
        let end = || {
            let mut graph = ptr::null_mut();
            // SAFETY: the stream is alive; writes one handle, or null where the recording was spoilt.
            let code = unsafe { sys::cuStreamEndCapture(recording.stream.raw(), &mut graph) };
            (code, (!graph.is_null()).then_some(Self(graph)))
        };
        let (code, written) = end();
        let ended = context.check(code, || "cuStreamEndCapture".into());
        if ended.is_err() {
            // Where that was refused the stream would go on doing nothing; where it was not, this is.
            let _ = end();
        }
        ended.map(|()| written)
    }
}

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        // SAFETY: made once, given back once.
        unsafe { sys::cuGraphDestroy(self.0) };
    }
}

/// Work that can be begun at once.
#[derive(Debug)]
pub struct Graph {
    exec: sys::CUgraphExec,
    context: Arc<Context>,
    /// That of the device's memory when it was written down.
    layout: u64,
}

// SAFETY: the driver takes a graph from any thread, one at a time; nothing here is shared.
unsafe impl Send for Graph {}

impl Graph {
    /// Begins it.
    ///
    /// # Errors
    /// Memory of the device was allocated or given back since it was written down ([`CudaDevice::layout`]): what it reads and
    /// writes may not be where it was.
    pub fn launch(&self, stream: &Stream) -> Result {
        if self.context.layout() != self.layout {
            return Err(DeviceError::Unsupported("a graph about memory that is not there any more".into()));
        }
        // SAFETY: both handles are alive, and so is the memory of the nodes: none was given back since.
        self.context.check(unsafe { sys::cuGraphLaunch(self.exec, stream.raw()) }, || "cuGraphLaunch".into())
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: made once, given back once.
        unsafe { sys::cuGraphExecDestroy(self.exec) };
    }
}

impl CudaDevice {
    /// Whether steps are to be written down and begun at once.
    pub fn uses_graphs(&self) -> bool {
        self.graphs
    }

    /// Changes whenever memory of the device is allocated or given back: what was written down before may be about other
    /// memory.
    pub fn layout(&self) -> u64 {
        self.context().layout()
    }

    /// What the loss of the last step is the mean of, for [`Self::repeats`].
    pub fn step_values(&self) -> usize {
        self.work.step_values
    }

    /// The step whose loss is asked for next is one over so many values, and not the one whose operators were called last.
    pub fn repeats(&mut self, step_values: usize) {
        self.work.step_values = step_values;
    }
}

/// The error of what cannot be written down.
pub(super) fn refused(what: &str) -> DeviceError {
    DeviceError::Unsupported(format!("{what} while a graph is written down"))
}

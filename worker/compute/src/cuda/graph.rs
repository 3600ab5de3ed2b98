//! Records the work of a stream as a CUDA graph and replays it. Starting a kernel takes the host some microseconds,
//! longer than many kernels of a small model run.
//!
//! A graph contains addresses: after any allocation or deallocation it is not replayed any more.

use crate::{
    cuda::driver::{Context, Stream},
    error::{DeviceError, Result},
};
use cudarc::driver::sys;
use std::{ptr, sync::Arc};

/// Records the stream's work without running it, until [`Self::end`]. If dropped before, the recording is
/// discarded.
///
/// Meanwhile operators must not allocate or free memory; that fails. Collectives fail too, because other ranks
/// would have to record them as well.
#[derive(Debug)]
pub struct Recording {
    stream: Arc<Stream>,
    open: bool,
}

impl Recording {
    /// Starts recording; only this thread may use the stream.
    pub fn begin(stream: &Arc<Stream>) -> Result<Self> {
        let context = stream.context();
        context.bind()?;
        // Other threads may free memory: it does not concern the graph.
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        context.check(unsafe { sys::cuStreamBeginCapture_v2(stream.raw(), mode) }, || {
            "cuStreamBeginCapture".into()
        })?;
        context.set_recording(true);
        Ok(Self { stream: stream.clone(), open: true })
    }

    /// The recorded graph; `None` if it is empty.
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
        // Discards the recording after an error.
        let _ = CapturedGraph::of(self);
    }
}

/// A recorded graph that is not instantiated.
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
            // If the driver refused, the stream would stay in recording mode; otherwise this call itself is
            // refused.
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

/// A graph that can be launched.
#[derive(Debug)]
pub struct Graph {
    exec: sys::CUgraphExec,
    context: Arc<Context>,
    /// The device's memory layout at the recording.
    layout: u64,
}

// SAFETY: the driver takes a graph from any thread, one at a time; nothing here is shared.
unsafe impl Send for Graph {}

impl Graph {
    /// Launches the graph.
    ///
    /// # Errors
    /// Memory of the device was allocated or freed since the recording ([`CudaDevice::layout`](super::CudaDevice::layout)): its
    /// addresses may be invalid.
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

//! Groups of GPUs, through NCCL: ranks with one GPU each average their gradients, and receive the weights from rank
//! 0.
//!
//! A group's members never change. When a rank dies, the others' collectives wait on the device until another host
//! thread aborts them. Their results are then garbage, so results are valid only after [`Nccl::check`]. A new group
//! has a new id.

use crate::{
    cuda::{
        driver::{Context, Stream},
        library::nccl::{Code, Functions, IN_PROGRESS, SUCCESS, functions},
        memory::{Buffer, Plain},
    },
    error::{DeviceError, Result},
};
use cudarc::nccl::sys;
use std::{
    ffi::{c_char, c_int, c_void},
    fmt,
    ops::Range,
    ptr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// NCCL's version, for example (2, 28, 9).
pub fn version() -> Result<(u32, u32, u32)> {
    let functions = functions()?;
    let mut version = 0;
    // SAFETY: writes one integer.
    match unsafe { (functions.get_version)(&mut version) } {
        SUCCESS => {}
        code => return Err(failed("NCCL", "ncclGetVersion", code, functions.explain(code, ptr::null_mut()))),
    }
    // Version 2.9 changed the encoding; we require a newer one.
    let version = version.max(0) as u32;
    Ok((version / 10_000, version % 10_000 / 100, version % 100))
}

/// Identifies a group to be formed. One rank sends it to all.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub [u8; 128]);

impl UniqueId {
    /// Creates an id. Needs no GPU.
    pub fn new() -> Result<Self> {
        let functions = functions()?;
        let mut id = sys::ncclUniqueId { internal: [0; 128] };
        // SAFETY: writes one id.
        match unsafe { (functions.get_unique_id)(&mut id) } {
            SUCCESS => Ok(Self(id.internal.map(|c| c as u8))),
            code => {
                let error = functions.explain(code, ptr::null_mut());
                Err(failed("NCCL", "ncclGetUniqueId", code, error))
            }
        }
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId")
    }
}

const INIT: &str = "ncclCommInitRankConfig";

/// Converts a result: a failure of the group, or of the request.
fn failed(device: &str, call: &str, code: Code, mut error: String) -> DeviceError {
    use sys::ncclResult_t as R;
    if code == R::ncclInvalidUsage as Code && call.starts_with(INIT) {
        error += "; are there two ranks on one GPU? Each rank of a group needs a GPU of its own";
    }
    const GROUP: [Code; 4] = [
        R::ncclSystemError as Code,
        R::ncclInternalError as Code,
        R::ncclRemoteError as Code,
        R::ncclTimeout as Code,
    ];
    if GROUP.contains(&code) {
        return DeviceError::Group(format!("{device}: {call}: {error}"));
    }
    DeviceError::Call { device: device.to_string(), call: call.to_string(), error }
}

#[derive(Debug)]
enum State {
    Alive(sys::ncclComm_t),
    Aborted,
    Left,
}

// SAFETY: NCCL takes calls for a communicator from any thread, one at a time; the mutex sees to that.
unsafe impl Send for State {}

/// This rank's membership in a group.
pub struct Nccl {
    functions: &'static Functions,
    context: Arc<Context>,
    rank: usize,
    size: usize,
    /// Held from the start of a call until NCCL is ready for the next one.
    turn: Mutex<()>,
    /// Held during each single NCCL call, so that `abort` can run between them.
    state: Mutex<State>,
}

impl Nccl {
    /// Forms a group of `size` ranks with a GPU each, which all call it with the same id. It waits for the last one, or until
    /// `give_up` returns true; it polls that.
    pub fn form(
        context: &Arc<Context>,
        id: &UniqueId,
        rank: usize,
        size: usize,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Arc<Self>> {
        let functions = functions()?;
        let context = context.clone();
        if rank >= size || c_int::try_from(size).is_err() {
            return Err(DeviceError::Unsupported(format!("rank {rank} of a group of {size}")));
        }
        // NCCL uses the thread's device.
        context.bind()?;
        const UNSET: c_int = c_int::MIN;
        let mut config = sys::ncclConfig_t {
            size: size_of::<sys::ncclConfig_t>(),
            magic: 0xcafe_beef,
            // Version of the struct. An older library ignores unknown fields.
            version: 23_007,
            blocking: 0,
            cgaClusterSize: UNSET,
            minCTAs: UNSET,
            maxCTAs: UNSET,
            netName: ptr::null(),
            splitShare: UNSET,
            trafficClass: UNSET,
            commName: ptr::null(),
            collnetEnable: UNSET,
            CTAPolicy: UNSET,
            shrinkShare: UNSET,
            nvlsCTAs: UNSET,
            nChannelsPerNetPeer: UNSET,
            nvlinkCentricSched: UNSET,
            graphUsageMode: UNSET,
            numRmaCtx: UNSET,
            maxP2pPeers: UNSET,
        };
        let id = sys::ncclUniqueId { internal: id.0.map(|b| b as c_char) };
        let call = format!("{INIT} as rank {rank} of {size}");
        let mut comm = ptr::null_mut();
        // SAFETY: writes one handle, which is given back by `abort` or `leave`; the configuration is copied.
        let code = unsafe { (functions.init)(&mut comm, size as c_int, id, rank as c_int, &mut config) };
        if comm.is_null() {
            return Err(failed(context.name(), &call, code, functions.explain(code, comm)));
        }
        let state = Mutex::new(State::Alive(comm));
        let this = Self { functions, context, rank, size, turn: Mutex::default(), state };
        this.wait_ready(&call, code, give_up)?;
        Ok(Arc::new(this))
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Starts to replace a part of each rank's values by the mean over the ranks.
    pub(crate) fn all_reduce_mean(
        &self,
        values: &Buffer<f32>,
        part: Range<usize>,
        stream: &Stream,
    ) -> Result {
        let kind = (sys::ncclDataType_t::ncclFloat32, sys::ncclRedOp_t::ncclAvg);
        self.all_reduce(values, part, kind, stream)
    }

    /// Starts to replace a part of each rank's values by the sum over the ranks.
    pub(crate) fn all_reduce_sum(&self, values: &Buffer<f64>, part: Range<usize>, stream: &Stream) -> Result {
        let kind = (sys::ncclDataType_t::ncclFloat64, sys::ncclRedOp_t::ncclSum);
        self.all_reduce(values, part, kind, stream)
    }

    /// Likewise for counts.
    pub(crate) fn all_reduce_count(
        &self,
        values: &Buffer<u64>,
        part: Range<usize>,
        stream: &Stream,
    ) -> Result {
        let kind = (sys::ncclDataType_t::ncclUint64, sys::ncclRedOp_t::ncclSum);
        self.all_reduce(values, part, kind, stream)
    }

    fn all_reduce<T: Plain>(
        &self,
        values: &Buffer<T>,
        part: Range<usize>,
        (kind, op): (sys::ncclDataType_t, sys::ncclRedOp_t),
        stream: &Stream,
    ) -> Result {
        let (n, at) = (part.len(), place(values, &part));
        self.begin("ncclAllReduce", n, |f, comm| {
            // SAFETY: so many values of this type are there, in place; handle and stream are alive.
            unsafe { (f.all_reduce)(at, at, n, kind, op, comm, stream.raw().cast()) }
        })
    }

    /// Starts to copy a part of rank 0's values to all ranks.
    pub(crate) fn broadcast(&self, values: &Buffer<f32>, part: Range<usize>, stream: &Stream) -> Result {
        let (n, at) = (part.len(), place(values, &part));
        self.begin("ncclBroadcast", n, |f, comm| {
            // SAFETY: so many values of this type are there, in place; handle and stream are alive.
            unsafe {
                (f.broadcast)(at, at, n, sys::ncclDataType_t::ncclFloat32, 0, comm, stream.raw().cast())
            }
        })
    }

    /// Callable from any thread, any number of times. Work in progress on the device ends, with garbage, and every
    /// later call fails. The other ranks must abort too.
    pub fn abort(&self) {
        let mut state = self.state();
        let State::Alive(comm) = *state else { return };
        let _ = self.context.bind();
        // SAFETY: created in `form`, and destroyed once: the state no longer holds it.
        unsafe { (self.functions.abort)(comm) };
        *state = State::Aborted;
    }

    /// The orderly end: waits until all work is done on all ranks, or until `give_up`, which aborts. Every later
    /// call fails.
    pub fn leave(&self, give_up: &dyn Fn() -> bool) -> Result {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let code = self.call("ncclCommFinalize", |f, comm| {
            // SAFETY: the handle is alive.
            unsafe { (f.finalize)(comm) }
        })?;
        self.wait_ready("ncclCommFinalize", code, give_up)?;
        let mut state = self.state();
        if let State::Alive(comm) = *state {
            // SAFETY: made in `form`, and given back once.
            unsafe { (self.functions.destroy)(comm) };
            *state = State::Left;
        }
        Ok(())
    }

    /// Whether it was left in order.
    pub fn has_left(&self) -> bool {
        matches!(*self.state(), State::Left)
    }

    /// Fails if the group was aborted, or if NCCL reports an error. Call it after waiting for a result that
    /// includes a collective, and before using that result: if an abort has cut the collective short, this fails.
    pub fn check(&self) -> Result {
        match self.async_error()? {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(self.failed("a collective", code)),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, call: &str, code: Code) -> DeviceError {
        let comm = match *self.state() {
            State::Alive(comm) => comm,
            _ => ptr::null_mut(),
        };
        failed(self.context.name(), call, code, self.functions.explain(code, comm))
    }

    /// One call with the communicator.
    fn call(&self, call: &str, f: impl FnOnce(&Functions, sys::ncclComm_t) -> Code) -> Result<Code> {
        let state = self.state();
        let why = match *state {
            State::Alive(comm) => {
                self.context.bind()?;
                return Ok(f(self.functions, comm));
            }
            State::Aborted => "it was aborted",
            State::Left => "this rank has left",
        };
        let (device, rank, size) = (self.context.name(), self.rank, self.size);
        Err(DeviceError::Group(format!("{device}: {call} as rank {rank} of {size}: {why}")))
    }

    fn async_error(&self) -> Result<Code> {
        let mut found = SUCCESS;
        let code = self.call("ncclCommGetAsyncError", |f, comm| {
            // SAFETY: writes one result.
            unsafe { (f.async_error)(comm, &mut found) }
        })?;
        Ok(if code == SUCCESS { found } else { code })
    }

    /// Starts a collective of `n` values. When this returns, it is on the stream.
    fn begin(&self, call: &str, n: usize, f: impl FnOnce(&Functions, sys::ncclComm_t) -> Code) -> Result {
        if n == 0 {
            return Ok(());
        }
        self.context.refuse_in_recording(|| call.into())?;
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let code = self.call(call, f)?;
        if code == SUCCESS {
            return Ok(());
        }
        self.wait_ready(&format!("{call} of {n} values"), code, &|| false)
    }

    /// Waits until NCCL has completed a call that it reported as in progress.
    fn wait_ready(&self, call: &str, mut code: Code, give_up: &dyn Fn() -> bool) -> Result {
        let begun = Instant::now();
        loop {
            match code {
                SUCCESS => return Ok(()),
                IN_PROGRESS => {}
                code => return Err(self.failed(call, code)),
            }
            if give_up() {
                self.abort();
                let (device, rank, size) = (self.context.name(), self.rank, self.size);
                let text =
                    format!("{device}: {call}: rank {rank} of {size} has stopped waiting for the others");
                return Err(DeviceError::Group(text));
            }
            // A launch takes some microseconds, forming a group takes seconds.
            if begun.elapsed() < Duration::from_micros(500) {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(500));
            }
            code = self.async_error()?;
        }
    }
}

/// The address of a part of a buffer.
fn place<T: Plain>(values: &Buffer<T>, part: &Range<usize>) -> *mut c_void {
    assert!(part.start <= part.end && part.end <= values.len(), "{part:?} of {} values", values.len());
    values.at(part.start) as *mut c_void
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nccl(rank {} of {} on {}, {:?})", self.rank, self.size, self.context.name(), self.state())
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        // Not `leave`, which waits for ranks that may be gone.
        self.abort();
    }
}

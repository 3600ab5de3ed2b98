//! NCCL's functions.
//!
//! cudarc's loader does not search `libnccl.so.2`, the only name in NVIDIA's wheels, and panics without it. So the
//! library is opened here, and only the types are cudarc's.

use crate::{
    cuda::library::{self, Part},
    error::{DeviceError, Result},
};
use cudarc::nccl::sys;
use libloading::Library;
use std::{
    ffi::{CStr, c_char, c_int, c_void},
    sync::OnceLock,
};

/// The library's result code: newer versions may have codes that cudarc's enum lacks.
pub(in crate::cuda) type Code = u32;
pub(in crate::cuda) const SUCCESS: Code = sys::ncclResult_t::ncclSuccess as Code;
pub(in crate::cuda) const IN_PROGRESS: Code = sys::ncclResult_t::ncclInProgress as Code;

macro_rules! functions {
    ($($field:ident = $name:literal: fn($($arg:ty),*) -> $result:ty;)*) => {
        /// The functions that we call.
        pub(in crate::cuda) struct Functions {
            $(pub(in crate::cuda) $field: unsafe extern "C" fn($($arg),*) -> $result,)*
        }

        impl Functions {
            /// Their names.
            const NAMES: &[&str] = &[$($name),*];

            fn of(library: &Library) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: the types are those of nccl.h, which has not changed them since it has the functions.
                unsafe { Ok(Self { $($field: *library.get($name.as_bytes())?,)* }) }
            }
        }
    };
}

functions! {
    get_version = "ncclGetVersion": fn(*mut c_int) -> Code;
    get_unique_id = "ncclGetUniqueId": fn(*mut sys::ncclUniqueId) -> Code;
    init = "ncclCommInitRankConfig":
        fn(*mut sys::ncclComm_t, c_int, sys::ncclUniqueId, c_int, *mut sys::ncclConfig_t) -> Code;
    async_error = "ncclCommGetAsyncError": fn(sys::ncclComm_t, *mut Code) -> Code;
    all_reduce = "ncclAllReduce":
        fn(*const c_void, *mut c_void, usize, sys::ncclDataType_t, sys::ncclRedOp_t, sys::ncclComm_t, *mut c_void) -> Code;
    broadcast = "ncclBroadcast":
        fn(*const c_void, *mut c_void, usize, sys::ncclDataType_t, c_int, sys::ncclComm_t, *mut c_void) -> Code;
    finalize = "ncclCommFinalize": fn(sys::ncclComm_t) -> Code;
    destroy = "ncclCommDestroy": fn(sys::ncclComm_t) -> Code;
    abort = "ncclCommAbort": fn(sys::ncclComm_t) -> Code;
    error_string = "ncclGetErrorString": fn(Code) -> *const c_char;
    last_error = "ncclGetLastError": fn(sys::ncclComm_t) -> *const c_char;
}

/// For [`library`].
pub(super) const FUNCTIONS: &[&str] = Functions::NAMES;

/// The functions of this machine's library.
pub(in crate::cuda) fn functions() -> Result<&'static Functions> {
    static LOADED: OnceLock<std::result::Result<Functions, String>> = OnceLock::new();
    let load = || {
        let found = library::find(Part::Nccl)?;
        // SAFETY: it was opened by this name before, and has been kept open.
        let library = unsafe { Library::new(&found.file) }.map_err(|e| e.to_string())?;
        let functions = Functions::of(&library).map_err(|e| e.to_string())?;
        std::mem::forget(library);
        Ok(functions)
    };
    LOADED.get_or_init(load).as_ref().map_err(|e| DeviceError::Missing(e.clone()))
}

impl Functions {
    /// NCCL's name for a result, and its text of the last error.
    pub(in crate::cuda) fn explain(&self, code: Code, comm: sys::ncclComm_t) -> String {
        let text = |at: *const c_char| {
            if at.is_null() {
                return String::new();
            }
            // SAFETY: both functions give texts with their end.
            unsafe { CStr::from_ptr(at) }.to_string_lossy().trim().to_string()
        };
        // SAFETY: takes any number.
        let name = text(unsafe { (self.error_string)(code) });
        // SAFETY: the communicator is alive, or null, which stands for none.
        let last = text(unsafe { (self.last_error)(comm) });
        if last.is_empty() { format!("{name} ({code})") } else { format!("{name} ({code}): {last}") }
    }
}

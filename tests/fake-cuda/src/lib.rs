//! Fakes of NVIDIA's libraries, for machines without a GPU: `libcuda`, NVRTC, cuBLAS, cuBLASLt and NCCL with their
//! real C interfaces, behind which our kernels run on the CPU (`shim/emu.h`) and streams run late and in a seeded
//! random order that respects nothing but stream order and events (`fake/engine.h`). A missing event, barrier or wait,
//! which a GPU forgives most of the time, makes a test fail.
//!
//! - A test that uses the CUDA code in its own process calls [`install`] first: the libraries are loaded under the names
//!   by which cudarc asks for them, so that its `dlopen` finds these.
//! - A child process is given [`library_dir`] in `LD_LIBRARY_PATH`.
//! - [`launch`] runs one kernel by itself, for tests of its numerics.
//!
//! Settings are variables `PARAFT_FAKE_CUDA_<NAME>`, read at the first call, and [`Fake::set`]:
//!
//! | name | meaning | default |
//! |---|---|---|
//! | `SEED` | of the order of operations and threads | 1 |
//! | `DEVICES` | number of devices; before `cuInit` | 1 |
//! | `MEMORY` | bytes of each device | 8 GiB |
//! | `FAIL` | `function[:kernel]:n:code`, by commas: its n-th call returns this code; 700, 719 and their like stay | none |
//! | `DRIVER_VERSION` | as of `cuDriverGetVersion` | 13000 |
//! | `COMPUTE` | compute capability | 9.0 |
//! | `SCHEDULE` | of the threads of a block: `ascending`, `descending`, `random` | random |
//! | `BACKGROUND` | 0: operations run only inside of calls | 1 |
//! | `VERBOSE` | 1: each call on standard error | 0 |
//!
//! `PARAFT_FAKE_CUDA_KERNEL_SECONDS` (120) ends a kernel that does not end; `PARAFT_REQUIRE_FAKE_CUDA=1` turns the skip of
//! [`skipped`] into a failure. Built with `PARAFT_FAKE_CUDA_SANITIZE=1` the library has AddressSanitizer in it, whose
//! runtime must then be loaded first (`LD_PRELOAD=libasan.so`).

mod emulate;

pub use emulate::{Arg, Element, KernelInfo, Schedule, kernels, launch};

use std::ffi::{CStr, CString, c_char, c_int, c_long};
use std::path::PathBuf;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// Whether the libraries were built. The error says why they were not: no C++ compiler, most of the time.
pub fn available() -> Result<(), String> {
    match env!("PARAFT_FAKE_CUDA_MISSING") {
        "" => Ok(()),
        reason => Err(reason.to_string()),
    }
}

/// Whether AddressSanitizer is in the libraries: it ends the process at the first wrong access of a kernel.
pub fn sanitized() -> bool {
    env!("PARAFT_FAKE_CUDA_SANITIZED") == "1"
}

/// The folder of the libraries, for `LD_LIBRARY_PATH` of a child process.
///
/// # Errors
/// Why they were not built.
pub fn library_dir() -> Result<PathBuf, String> {
    available()?;
    Ok(PathBuf::from(env!("PARAFT_FAKE_CUDA_DIR")))
}

/// Says on standard error that the test `name` is skipped, and returns true, where the libraries were not built.
///
/// # Panics
/// Instead of that if `PARAFT_REQUIRE_FAKE_CUDA` is 1.
pub fn skipped(name: &str) -> bool {
    let Err(reason) = available() else { return false };
    let required = std::env::var("PARAFT_REQUIRE_FAKE_CUDA").is_ok_and(|v| v == "1");
    assert!(!required, "{name} cannot run: {reason}");
    eprintln!("SKIPPED {name}: {reason}");
    true
}

/// The libraries, loaded into this process, and what tests may ask of them.
pub struct Fake {
    all: Library,
    /// Loaded under NVIDIA's names, kept so that later requests for these names find them.
    _named: Vec<Library>,
    /// Of `emu_launch`; see `emulate`.
    pub(crate) api: emulate::Api,
}

/// Loads the libraries into this process, before the first use of cudarc. Later calls return the same.
///
/// # Errors
/// Why they were not built, or cannot be loaded.
pub fn install() -> Result<&'static Fake, String> {
    static LOADED: OnceLock<Result<Fake, String>> = OnceLock::new();
    LOADED.get_or_init(load).as_ref().map_err(String::clone)
}

fn load() -> Result<Fake, String> {
    let folder = library_dir()?;
    let open = |name: &str| {
        // SAFETY: the library's constructors register kernels and touch nothing of the program.
        unsafe { Library::open(Some(folder.join(name)), RTLD_NOW | RTLD_GLOBAL) }
            .map_err(|e| format!("{name}: {e}"))
    };
    let all = open("libparaft_fake_cuda.so")?;
    let names = ["libcuda.so", "libnvrtc.so", "libcublas.so", "libcublasLt.so", "libnccl.so"];
    let _named = names.into_iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let api = emulate::Api::of(&all)?;
    Ok(Fake { all, _named, api })
}

impl Fake {
    /// Sets what the variable `PARAFT_FAKE_CUDA_<name>` sets. `SEED` restarts the random sequence.
    ///
    /// # Errors
    /// There is no such setting, or it cannot have this value.
    pub fn set(&self, name: &str, value: &str) -> Result<(), String> {
        let (n, v) = (c_string(name)?, c_string(value)?);
        // SAFETY: the signature is that of fake_cuda_set in engine.cpp; both strings live through the call.
        let refused = unsafe {
            self.symbol::<unsafe extern "C" fn(*const c_char, *const c_char) -> c_int>(c"fake_cuda_set")?(
                n.as_ptr(),
                v.as_ptr(),
            )
        };
        if refused == 0 { Ok(()) } else { Err(format!("{name}={value} is not understood")) }
    }

    /// How often a function was called; of `"cuLaunchKernel NAME"` how often that kernel was launched.
    pub fn calls(&self, function: &str) -> usize {
        let Ok(name) = c_string(function) else { return 0 };
        // SAFETY: the signature is that of fake_cuda_calls in engine.cpp.
        let count = unsafe {
            self.symbol::<unsafe extern "C" fn(*const c_char) -> c_long>(c"fake_cuda_calls")
                .map(|f| f(name.as_ptr()))
        };
        count.unwrap_or(0) as usize
    }

    /// Bytes that are allocated on a device.
    pub fn used(&self, device: usize) -> usize {
        // SAFETY: the signature is that of fake_cuda_used in engine.cpp.
        unsafe {
            self.symbol::<unsafe extern "C" fn(c_int) -> usize>(c"fake_cuda_used").map(|f| f(device as c_int))
        }
        .unwrap_or(0)
    }

    /// Operations that were submitted to streams and have not run to their end.
    pub fn unfinished(&self) -> usize {
        // SAFETY: the signature is that of fake_cuda_unfinished in engine.cpp.
        unsafe { self.symbol::<unsafe extern "C" fn() -> usize>(c"fake_cuda_unfinished").map(|f| f()) }
            .unwrap_or(0)
    }

    /// What the last error of a device was about: the kernel, its launch, its block and threads. Empty: none.
    pub fn last_error(&self) -> String {
        let mut text = vec![0u8; 2048];
        // SAFETY: the signature is that of fake_cuda_last_error in engine.cpp, which writes at most the given length.
        let asked = unsafe {
            self.symbol::<unsafe extern "C" fn(*mut c_char, usize) -> usize>(c"fake_cuda_last_error")
                .map(|f| f(text.as_mut_ptr().cast(), text.len()))
        };
        if asked.is_err() {
            return String::new();
        }
        CStr::from_bytes_until_nul(&text).map(|t| t.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Mends all devices and forgets the injected faults, so that the next test of the process begins with sound ones.
    pub fn mend(&self) {
        // SAFETY: the signature is that of fake_cuda_mend in engine.cpp.
        let _ = unsafe { self.symbol::<unsafe extern "C" fn()>(c"fake_cuda_mend").map(|f| f()) };
    }

    /// # Safety
    /// `T` must be the function's type.
    unsafe fn symbol<T: Copy>(&self, name: &CStr) -> Result<T, String> {
        // SAFETY: the caller vouches for the type.
        unsafe { self.all.get::<T>(name.to_bytes_with_nul()) }.map(|s| *s).map_err(|e| e.to_string())
    }
}

fn c_string(text: &str) -> Result<CString, String> {
    CString::new(text).map_err(|e| e.to_string())
}

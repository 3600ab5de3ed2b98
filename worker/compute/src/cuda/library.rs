//! The CUDA libraries of this machine.
//!
//! The dynamic linker searches a library in its usual places. Before that, all CUDA libraries in the folders of the
//! environment variable `PARAFT_CUDA_LIBS` (separated by colons) are opened by full path, so that Python's wheels
//! work without `LD_LIBRARY_PATH`.

pub(super) mod nccl;

use libloading::Library;
use std::{
    path::{Path, PathBuf},
    sync::OnceLock,
};

/// Folders with CUDA's libraries.
pub const FOLDERS: &str = "PARAFT_CUDA_LIBS";

/// One of CUDA's libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The driver's own.
    Driver,
    /// The compiler of kernels.
    Nvrtc,
    /// Matrix products.
    Cublas,
    /// Matrix products with what follows them.
    CublasLt,
    /// Collectives of a group of GPUs.
    Nccl,
}

impl Part {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Driver, Self::Nvrtc, Self::Cublas, Self::CublasLt, Self::Nccl];

    /// Libraries without which a single GPU cannot be used.
    pub const NEEDED: [Self; 3] = [Self::Driver, Self::Nvrtc, Self::Cublas];

    /// NVIDIA's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Driver => "CUDA driver",
            Self::Nvrtc => "NVRTC",
            Self::Cublas => "cuBLAS",
            Self::CublasLt => "cuBLASLt",
            Self::Nccl => "NCCL",
        }
    }

    /// What a machine cannot do without it.
    pub fn without(self) -> &'static str {
        match self {
            Self::Driver => "no GPU can be used; workers compute on the CPU",
            Self::Nvrtc => "kernels cannot be compiled, unless all are in the cache from an earlier run",
            Self::Cublas => "no model can be trained on the GPU: its matrix products are cuBLAS's",
            Self::CublasLt => {
                "biases and activations are applied by kernels of their own, which takes longer"
            }
            Self::Nccl => "groups of GPUs (train.group_size) cannot reduce",
        }
    }

    /// How to install it.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Driver => {
                "install NVIDIA's driver, 525 or newer, or in a container start it with --gpus all"
            }
            Self::Nvrtc => {
                "install the CUDA toolkit 12 or 13, or `pip install nvidia-cuda-nvrtc` and name its lib folder in \
                 PARAFT_CUDA_LIBS"
            }
            Self::Cublas | Self::CublasLt => {
                "install the CUDA toolkit 12 or 13, or `pip install nvidia-cublas` and name its lib folder in \
                 PARAFT_CUDA_LIBS"
            }
            Self::Nccl => {
                "install NCCL 2.18 or newer, or `pip install nvidia-nccl-cu13` and name its lib folder in PARAFT_CUDA_LIBS"
            }
        }
    }

    /// Its file names, in the order in which cudarc tries them. (cudarc does not try NCCL's second name.)
    fn files(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &["libcuda.so", "libcuda.so.1"],
            Self::Nvrtc => &["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"],
            Self::Cublas => &["libcublas.so", "libcublas.so.13", "libcublas.so.12"],
            Self::CublasLt => &["libcublasLt.so", "libcublasLt.so.13", "libcublasLt.so.12"],
            Self::Nccl => &["libnccl.so", "libnccl.so.2"],
        }
    }

    /// The functions that we call.
    fn functions(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &[
                "cuInit",
                "cuDriverGetVersion",
                "cuDeviceGetCount",
                "cuDeviceGet",
                "cuDeviceGetName",
                "cuDeviceTotalMem_v2",
                "cuDeviceGetAttribute",
                "cuDevicePrimaryCtxRetain",
                "cuDevicePrimaryCtxRelease_v2",
                "cuCtxSetCurrent",
                "cuMemGetInfo_v2",
                "cuMemAlloc_v2",
                "cuMemFree_v2",
                "cuMemHostAlloc",
                "cuMemFreeHost",
                "cuMemcpyHtoDAsync_v2",
                "cuMemcpyDtoHAsync_v2",
                "cuMemcpyDtoDAsync_v2",
                "cuMemsetD8Async",
                "cuStreamCreateWithPriority",
                "cuStreamDestroy_v2",
                "cuStreamSynchronize",
                "cuStreamWaitEvent",
                "cuEventCreate",
                "cuEventDestroy_v2",
                "cuEventRecord",
                "cuEventSynchronize",
                "cuModuleLoadData",
                "cuModuleUnload",
                "cuModuleGetFunction",
                "cuFuncSetAttribute",
                "cuLaunchKernel",
                "cuGetErrorName",
                "cuGetErrorString",
            ],
            Self::Nvrtc => &[
                "nvrtcVersion",
                "nvrtcCreateProgram",
                "nvrtcCompileProgram",
                "nvrtcGetProgramLogSize",
                "nvrtcGetProgramLog",
                "nvrtcGetCUBINSize",
                "nvrtcGetCUBIN",
                "nvrtcDestroyProgram",
                "nvrtcGetErrorString",
            ],
            Self::Cublas => &[
                "cublasCreate_v2",
                "cublasDestroy_v2",
                "cublasSetStream_v2",
                "cublasSetWorkspace_v2",
                "cublasGetVersion_v2",
                "cublasGemmEx",
            ],
            Self::CublasLt => &[
                "cublasLtCreate",
                "cublasLtDestroy",
                "cublasLtMatmul",
                "cublasLtMatmulAlgoGetHeuristic",
                "cublasLtMatmulDescCreate",
                "cublasLtMatmulDescDestroy",
                "cublasLtMatmulDescSetAttribute",
                "cublasLtMatmulPreferenceCreate",
                "cublasLtMatmulPreferenceDestroy",
                "cublasLtMatmulPreferenceSetAttribute",
                "cublasLtMatrixLayoutCreate",
                "cublasLtMatrixLayoutDestroy",
            ],
            Self::Nccl => nccl::FUNCTIONS,
        }
    }
}

/// A library that exists on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundLibrary {
    /// Its file name.
    pub file: String,
}

/// Searches a library and the functions that we call. The error says what is missing and how to fix it. The result
/// is cached per library and process.
pub fn find(part: Part) -> Result<&'static FoundLibrary, &'static str> {
    static LIBRARIES: [OnceLock<Result<FoundLibrary, String>>; Part::ALL.len()] =
        [const { OnceLock::new() }; Part::ALL.len()];
    let look = || {
        static PRELOADED: OnceLock<()> = OnceLock::new();
        PRELOADED.get_or_init(preload);
        search(part)
    };
    LIBRARIES[part as usize].get_or_init(look).as_ref().map_err(String::as_str)
}

/// Whether the driver supports CUDA graphs. Without them all work is started piece by piece.
pub fn has_graphs() -> bool {
    const FUNCTIONS: [&str; 7] = [
        "cuStreamBeginCapture_v2",
        "cuStreamEndCapture",
        "cuGraphGetNodes",
        "cuGraphInstantiateWithFlags",
        "cuGraphLaunch",
        "cuGraphExecDestroy",
        "cuGraphDestroy",
    ];
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| {
        let Ok(found) = find(Part::Driver) else { return false };
        // SAFETY: it was opened by this name before, and has been kept open.
        let Ok(library) = (unsafe { Library::new(&found.file) }) else { return false };
        // SAFETY: the symbols are looked up, and never called through this type.
        let has = |f: &&str| unsafe { library.get::<*const ()>(f.as_bytes()) }.is_ok();
        FUNCTIONS.iter().all(has)
    })
}

fn search(part: Part) -> Result<FoundLibrary, String> {
    for file in part.files() {
        // SAFETY: opening one of CUDA's libraries runs its initialisers, which is what it is opened for.
        let Ok(library) = (unsafe { Library::new(*file) }) else { continue };
        for function in part.functions() {
            // SAFETY: the symbol is looked up, and never called through this type.
            if unsafe { library.get::<*const ()>(function.as_bytes()) }.is_err() {
                return Err(format!(
                    "{} ({file}) has no {function}: it is too old; {}",
                    part.name(),
                    part.remedy()
                ));
            }
        }
        // Keep the library open: its callers (mostly cudarc) open it again by the same name.
        std::mem::forget(library);
        return Ok(FoundLibrary { file: (*file).to_string() });
    }
    Err(format!("{} is not found ({}); {}", part.name(), part.files().join(", "), part.remedy()))
}

/// Opens the libraries of the folders, in the order of their dependencies.
fn preload() {
    const ORDER: [&str; 6] =
        ["libcuda.so", "libnvrtc-builtins.so", "libnvrtc.so", "libcublasLt.so", "libcublas.so", "libnccl.so"];
    let Some(folders) = std::env::var_os(FOLDERS) else { return };
    let folders: Vec<PathBuf> = std::env::split_paths(&folders).collect();
    for prefix in ORDER {
        for path in folders.iter().flat_map(|f| named(f, prefix)) {
            // SAFETY: as in `search`; the folder is the user's word for where CUDA's libraries are.
            match unsafe { Library::new(&path) } {
                Ok(library) => std::mem::forget(library),
                Err(error) => tracing::warn!(path = %path.display(), %error, "cannot open a CUDA library"),
            }
        }
    }
}

/// Files `prefix` and `prefix.*` of a folder.
fn named(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let fits =
        |name: &str| name.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    let mut found: Vec<PathBuf> =
        entries.filter(|e| e.file_name().to_str().is_some_and(fits)).map(|e| e.path()).collect();
    found.sort();
    found
}

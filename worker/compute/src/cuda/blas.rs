//! Matrix products by cuBLAS, for row-major matrices.

use crate::{
    cuda::{
        device::{Element, Precision},
        driver::Stream,
        library::{self, Part},
        memory::Buffer,
    },
    error::{DeviceError, Result},
};
use cudarc::cublas::sys::{self, cublasStatus_t};
use std::ptr;

/// Bytes of cuBLAS's workspace; NVIDIA's recommendation for its newest devices.
pub(super) const WORKSPACE: usize = 32 << 20;

/// A matrix: its address, whether the product uses its transpose, and the distance of its rows in values.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    pub at: u64,
    pub transposed: bool,
    pub cols: usize,
}

impl Element {
    fn data(self) -> sys::cudaDataType_t {
        match self {
            Self::F32 => sys::cudaDataType_t::CUDA_R_32F,
            Self::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
            Self::F16 => sys::cudaDataType_t::CUDA_R_16F,
        }
    }
}

/// cuBLAS on one stream.
#[derive(Debug)]
pub struct Blas {
    handle: sys::cublasHandle_t,
    compute: sys::cublasComputeType_t,
    /// The workspace of cuBLAS, so that it allocates nothing in a step.
    workspace: Buffer<u8>,
    device: String,
}

// SAFETY: any thread may use a handle, one at a time; `&mut self` ensures that.
unsafe impl Send for Blas {}

impl Blas {
    pub fn new(stream: &Stream, precision: Precision) -> Result<Self> {
        library::find(Part::Cublas).map_err(|e| DeviceError::Missing(e.to_string()))?;
        let context = stream.context();
        context.bind()?;
        let device = context.name().to_string();
        let workspace = Buffer::new(context, WORKSPACE, "cuBLAS's workspace")?;
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle, which is given back when this is dropped.
        check(unsafe { sys::cublasCreate_v2(&mut handle) }, &device, || "cublasCreate".into())?;
        use sys::cublasComputeType_t as C;
        let compute = match precision {
            Precision::Tf32 => C::CUBLAS_COMPUTE_32F_FAST_TF32,
            Precision::F32 | Precision::Bf16 | Precision::F16 => C::CUBLAS_COMPUTE_32F,
        };
        let this = Self { handle, compute, workspace, device };
        // SAFETY: handle and stream are alive; the stream outlives the handle, both being `CudaDevice`'s.
        check(unsafe { sys::cublasSetStream_v2(handle, stream.raw().cast()) }, &this.device, || {
            "cublasSetStream".into()
        })?;
        // SAFETY: so many bytes were just allocated, and live as long as the handle.
        let code = unsafe { sys::cublasSetWorkspace_v2(handle, this.workspace.at(0) as *mut _, WORKSPACE) };
        check(code, &this.device, || "cublasSetWorkspace".into())?;
        Ok(this)
    }

    /// Address of the workspace, for any product on the stream.
    pub fn workspace(&self) -> u64 {
        self.workspace.at(0)
    }

    /// `c = a · b + keep · c` for `a` of `[m, k]`, `b` of `[k, n]` and `c` of `[m, n]`; sums in f32.
    pub fn product(
        &mut self,
        [m, k, n]: [usize; 3],
        element: Element,
        a: Operand,
        b: Operand,
        (c, result): (Operand, Element),
        keep: f32,
    ) -> Result {
        if m == 0 || n == 0 {
            return Ok(());
        }
        // cuBLAS is column-major: a row-major matrix is the transpose there. cᵀ = bᵀ · aᵀ.
        let op = |o: Operand| {
            if o.transposed {
                sys::cublasOperation_t::CUBLAS_OP_T
            } else {
                sys::cublasOperation_t::CUBLAS_OP_N
            }
        };
        let one = 1.0f32;
        // SAFETY: the three matrices lie in buffers that the caller has checked to be long enough for these dimensions;
        // the factors are read during the call, in the handle's default mode.
        let code = unsafe {
            sys::cublasGemmEx(
                self.handle,
                op(b),
                op(a),
                n as i32,
                m as i32,
                k as i32,
                ptr::from_ref(&one).cast(),
                b.at as *const _,
                element.data(),
                b.cols as i32,
                a.at as *const _,
                element.data(),
                a.cols as i32,
                ptr::from_ref(&keep).cast(),
                c.at as *mut _,
                result.data(),
                c.cols as i32,
                self.compute,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DFALT,
            )
        };
        check(code, &self.device, || {
            format!("cublasGemmEx of [{m}, {k}] and [{k}, {n}] in {element:?} into {result:?}")
        })
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe { sys::cublasDestroy_v2(self.handle) };
    }
}

fn check(code: cublasStatus_t, device: &str, call: impl FnOnce() -> String) -> Result {
    if code == cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    Err(DeviceError::Call { device: device.to_string(), call: call(), error: format!("{code:?}") })
}

//! Products with epilogues by cuBLASLt: a linear layer's bias and activation are applied before the sums are
//! written, and not by a further kernel.
//!
//! Shapes that cuBLASLt does not support, or may compute differently from our kernels, use the separate kernels.

use crate::{
    cuda::{
        blas::WORKSPACE,
        device::{Element, Precision},
        driver::Stream,
        library::{self, Part},
    },
    error::{DeviceError, Result},
    shape::{Activation, LinearShape},
};
use cudarc::cublas::sys::cublasOperation_t;
use cudarc::cublaslt::sys::{self, cublasLtEpilogue_t as Epilogue, cublasStatus_t};
use std::{collections::HashMap, ffi::c_void, ptr};

/// The operands of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    pub x: u64,
    pub weight: u64,
    /// In the result's type.
    pub bias: u64,
    pub y: u64,
    /// Destination of a GELU's argument.
    pub before: u64,
}

/// Identifies a plan. The algorithms require an alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    shape: [usize; 3],
    activation: Activation,
    alignments: [u32; 3],
}

/// cuBLASLt on one stream.
#[derive(Debug)]
pub struct Lt {
    handle: sys::cublasLtHandle_t,
    device: String,
    precision: Precision,
    /// cuBLAS's workspace, on the same stream: one product uses it at a time.
    workspace: u64,
    /// `None`: there is no algorithm.
    plans: HashMap<Key, Option<Plan>>,
}

// SAFETY: any thread may use a handle, one at a time; `&mut self` ensures that.
unsafe impl Send for Lt {}

impl Lt {
    /// Complements cuBLAS. `None` if the library is missing, or unsuitable for this precision.
    pub fn new(stream: &Stream, precision: Precision, workspace: u64) -> Result<Option<Self>> {
        if precision == Precision::F32 || library::find(Part::CublasLt).is_err() {
            return Ok(None);
        }
        let context = stream.context();
        context.bind()?;
        let device = context.name().to_string();
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle, which is given back when this is dropped.
        check(unsafe { sys::cublasLtCreate(&mut handle) }, &device, || "cublasLtCreate".into())?;
        Ok(Some(Self { handle, device, precision, workspace, plans: HashMap::new() }))
    }

    /// `y = act(x · weightᵀ + bias)`. Returns false if it does not support that; then it has started nothing.
    pub fn linear(
        &mut self,
        stream: &Stream,
        shape: LinearShape,
        activation: Activation,
        at: Linear,
    ) -> Result<bool> {
        let LinearShape { n, inputs, outputs } = shape;
        // Its ReLU may turn a NaN into 0. In f16 that would hide an overflow.
        let hides = activation == Activation::Relu && self.precision == Precision::F16;
        // It reads a bias, and writes a GELU's argument, as vectors.
        let apart = !at.bias.is_multiple_of(16)
            || (activation == Activation::Gelu
                && (!at.before.is_multiple_of(16) || !outputs.is_multiple_of(8)));
        if hides || apart || n == 0 || inputs == 0 || outputs == 0 {
            return Ok(false);
        }
        let alignment = |address: u64| 1u32 << address.trailing_zeros().min(8);
        let key = Key {
            shape: [n, inputs, outputs],
            activation,
            alignments: [at.weight, at.x, at.y].map(alignment),
        };
        let plan = match self.plans.entry(key) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(new) => {
                let plan = Plan::new(self.handle, self.precision, &key).inspect_err(|code| {
                    tracing::debug!(?key, ?code, "cuBLASLt has no algorithm for this layer");
                });
                new.insert(plan.ok())
            }
        };
        let Some(plan) = plan else { return Ok(false) };
        let call =
            || format!("cublasLtMatmul of [{n}, {inputs}] and [{inputs}, {outputs}] with {activation:?}");
        use sys::cublasLtMatmulDescAttributes_t as A;
        let code = plan
            .set(A::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &at.bias)
            .and_then(|()| match activation {
                Activation::Gelu => plan.set(A::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &at.before),
                _ => Ok(()),
            })
            .err();
        check(code.unwrap_or(cublasStatus_t::CUBLAS_STATUS_SUCCESS), &self.device, call)?;
        let (one, zero) = (1.0f32, 0.0f32);
        // SAFETY: the operands lie in buffers that the caller has checked to be long enough for these dimensions,
        // and stay until the stream is done; the factors are read during the call; the workspace has as many bytes
        // as the plan may use.
        let code = unsafe {
            sys::cublasLtMatmul(
                self.handle,
                plan.desc,
                ptr::from_ref(&one).cast(),
                at.weight as *const c_void,
                plan.layouts[0],
                at.x as *const c_void,
                plan.layouts[1],
                ptr::from_ref(&zero).cast(),
                at.y as *const c_void,
                plan.layouts[2],
                at.y as *mut c_void,
                plan.layouts[2],
                &plan.algorithm,
                self.workspace as *mut c_void,
                plan.workspace,
                stream.raw().cast(),
            )
        };
        check(code, &self.device, call)?;
        Ok(true)
    }
}

impl Drop for Lt {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe { sys::cublasLtDestroy(self.handle) };
    }
}

/// The algorithm for a product, determined once.
#[derive(Debug)]
struct Plan {
    desc: sys::cublasLtMatmulDesc_t,
    /// Layouts of weight, input and result.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
    workspace: usize,
}

fn done(code: cublasStatus_t) -> std::result::Result<(), cublasStatus_t> {
    if code == cublasStatus_t::CUBLAS_STATUS_SUCCESS { Ok(()) } else { Err(code) }
}

impl Plan {
    /// Asks cuBLASLt for an algorithm. cuBLASLt is column-major: a row-major matrix is the transpose there, and yᵀ
    /// = weight · xᵀ, with one bias value per row.
    fn new(
        handle: sys::cublasLtHandle_t,
        precision: Precision,
        key: &Key,
    ) -> std::result::Result<Self, cublasStatus_t> {
        use sys::{cublasComputeType_t as C, cublasLtMatmulDescAttributes_t as A, cudaDataType_t as T};
        let compute = match precision {
            Precision::Tf32 => C::CUBLAS_COMPUTE_32F_FAST_TF32,
            _ => C::CUBLAS_COMPUTE_32F,
        };
        let element = match precision.element() {
            Element::F32 => T::CUDA_R_32F,
            Element::Bf16 => T::CUDA_R_16BF,
            Element::F16 => T::CUDA_R_16F,
        };
        // SAFETY: numbers, of which all patterns are valid.
        let algorithm = unsafe { std::mem::zeroed() };
        let mut plan = Self { desc: ptr::null_mut(), layouts: [ptr::null_mut(); 3], algorithm, workspace: 0 };
        // SAFETY: writes one handle, which is given back with the plan.
        done(unsafe { sys::cublasLtMatmulDescCreate(&mut plan.desc, compute, T::CUDA_R_32F) })?;
        let [n, inputs, outputs] = key.shape;
        let (transposed, plain) = (cublasOperation_t::CUBLAS_OP_T, cublasOperation_t::CUBLAS_OP_N);
        plan.set(A::CUBLASLT_MATMUL_DESC_TRANSA, &(transposed as i32))?;
        plan.set(A::CUBLASLT_MATMUL_DESC_TRANSB, &(plain as i32))?;
        let epilogue = match key.activation {
            Activation::None => Epilogue::CUBLASLT_EPILOGUE_BIAS,
            Activation::Relu => Epilogue::CUBLASLT_EPILOGUE_RELU_BIAS,
            Activation::Gelu => Epilogue::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
        };
        plan.set(A::CUBLASLT_MATMUL_DESC_EPILOGUE, &(epilogue as u32))?;
        if key.activation == Activation::Gelu {
            plan.set(A::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &(outputs as i64))?;
        }
        let sizes = [(inputs, outputs), (inputs, n), (outputs, n)];
        for (layout, (rows, cols)) in plan.layouts.iter_mut().zip(sizes) {
            // SAFETY: writes one handle, which is given back with the plan.
            done(unsafe {
                sys::cublasLtMatrixLayoutCreate(layout, element, rows as u64, cols as u64, rows as i64)
            })?;
        }
        let mut preference = Preference(ptr::null_mut());
        // SAFETY: writes one handle, which is given back when this ends.
        done(unsafe { sys::cublasLtMatmulPreferenceCreate(&mut preference.0) })?;
        use sys::cublasLtMatmulPreferenceAttributes_t as P;
        preference.set(P::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &(WORKSPACE as u64))?;
        let [weight, x, y] = key.alignments;
        preference.set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &weight)?;
        preference.set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &x)?;
        preference.set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &y)?;
        preference.set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &y)?;
        // SAFETY: as above.
        let mut found: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let mut count = 0;
        let [a, b, d] = plan.layouts;
        // SAFETY: all handles are alive; writes one result and one number.
        done(unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                plan.desc,
                a,
                b,
                d,
                d,
                preference.0,
                1,
                &mut found,
                &mut count,
            )
        })?;
        if count < 1 || found.workspaceSize > WORKSPACE {
            return Err(cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED);
        }
        done(found.state)?;
        (plan.algorithm, plan.workspace) = (found.algo, found.workspaceSize);
        Ok(plan)
    }

    fn set<T: Copy>(
        &self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> std::result::Result<(), cublasStatus_t> {
        // SAFETY: the handle is alive; so many bytes are copied, and a size that is not the attribute's is refused.
        done(unsafe {
            sys::cublasLtMatmulDescSetAttribute(
                self.desc,
                attribute,
                ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        })
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        for layout in self.layouts.into_iter().filter(|l| !l.is_null()) {
            // SAFETY: made once, given back once.
            unsafe { sys::cublasLtMatrixLayoutDestroy(layout) };
        }
        if !self.desc.is_null() {
            // SAFETY: likewise.
            unsafe { sys::cublasLtMatmulDescDestroy(self.desc) };
        }
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn set<T: Copy>(
        &self,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> std::result::Result<(), cublasStatus_t> {
        // SAFETY: as `Plan::set`.
        done(unsafe {
            sys::cublasLtMatmulPreferenceSetAttribute(
                self.0,
                attribute,
                ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        })
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made once, given back once.
            unsafe { sys::cublasLtMatmulPreferenceDestroy(self.0) };
        }
    }
}

fn check(code: cublasStatus_t, device: &str, call: impl FnOnce() -> String) -> Result {
    done(code).map_err(|code| DeviceError::Call {
        device: device.to_string(),
        call: call(),
        error: format!("{code:?}"),
    })
}

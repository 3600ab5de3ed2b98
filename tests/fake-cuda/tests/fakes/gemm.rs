use std::ffi::c_void;
use std::sync::Arc;

use anyhow::Result;
use cudarc::cublas::sys as blas;
use cudarc::cublas::{CudaBlas, sys::cublasOperation_t as Op};
use cudarc::cublaslt::{result as lt, sys as ltsys};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr};
use half::{bf16, f16};

use crate::{Session, context};

/// Numbers of -1..1 that are exact in bf16, so that only sums round.
fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state % 129) as f32 / 64.0 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

struct Case {
    m: usize,
    n: usize,
    k: usize,
    ta: bool,
    tb: bool,
}

impl Case {
    fn ld(&self) -> (usize, usize, usize) {
        // Wider than the matrices: the columns do not touch.
        let pad = 3;
        (
            if self.ta { self.k } else { self.m } + pad,
            if self.tb { self.n } else { self.k } + pad,
            self.m + pad,
        )
    }
    fn lengths(&self) -> (usize, usize, usize) {
        let (a, b, c) = self.ld();
        // Nothing is allocated for zero elements: of k 0 the buffers have one column.
        let k = self.k.max(1);
        (a * if self.ta { self.m } else { k }, b * if self.tb { k } else { self.n }, c * self.n)
    }
    /// op(A) * op(B) in f64, at (row i, column j).
    fn product(&self, a: &[f32], b: &[f32], i: usize, j: usize) -> f64 {
        let (lda, ldb, _) = self.ld();
        let x = |p: usize| if self.ta { a[p + i * lda] } else { a[i + p * lda] };
        let y = |p: usize| if self.tb { b[j + p * ldb] } else { b[p + j * ldb] };
        (0..self.k).map(|p| f64::from(x(p)) * f64::from(y(p))).sum()
    }
}

fn op(transposed: bool) -> Op {
    if transposed { Op::CUBLAS_OP_T } else { Op::CUBLAS_OP_N }
}

fn cases() -> Vec<Case> {
    let sizes = [(1, 1, 1), (5, 7, 3), (33, 4, 65), (64, 31, 17), (3, 70, 0)];
    let mut all = Vec::new();
    for (m, n, k) in sizes {
        for transposes in 0..4 {
            all.push(Case { m, n, k, ta: transposes & 1 > 0, tb: transposes & 2 > 0 });
        }
    }
    all
}

trait Type: DeviceRepr + Copy {
    const CODE: blas::cudaDataType;
    fn of(v: f32) -> Self;
    fn back(self) -> f32;
}
impl Type for f32 {
    const CODE: blas::cudaDataType = blas::cudaDataType::CUDA_R_32F;
    fn of(v: f32) -> Self {
        v
    }
    fn back(self) -> f32 {
        self
    }
}
// cudarc without its `half` feature moves them as their bits.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Bf16(u16);
// SAFETY: a u16.
unsafe impl DeviceRepr for Bf16 {}
impl Type for Bf16 {
    const CODE: blas::cudaDataType = blas::cudaDataType::CUDA_R_16BF;
    fn of(v: f32) -> Self {
        Bf16(bf16::from_f32(v).to_bits())
    }
    fn back(self) -> f32 {
        bf16::from_bits(self.0).to_f32()
    }
}
#[derive(Clone, Copy)]
#[repr(transparent)]
struct F16(u16);
// SAFETY: a u16.
unsafe impl DeviceRepr for F16 {}
impl Type for F16 {
    const CODE: blas::cudaDataType = blas::cudaDataType::CUDA_R_16F;
    fn of(v: f32) -> Self {
        F16(f16::from_f32(v).to_bits())
    }
    fn back(self) -> f32 {
        f16::from_bits(self.0).to_f32()
    }
}

fn to_device<T: Type>(stream: &Arc<CudaStream>, v: &[f32]) -> Result<CudaSlice<T>> {
    Ok(stream.clone_htod(&v.iter().map(|v| T::of(*v)).collect::<Vec<_>>())?)
}

fn check<T: Type>(stream: &Arc<CudaStream>, handle: &CudaBlas, case: &Case, batch: usize) -> Result<()> {
    let (lda, ldb, ldc) = case.ld();
    let (na, nb, nc) = case.lengths();
    let (a, b) = (numbers(na * batch, 1), numbers(nb * batch, 2));
    let c = numbers(nc * batch, 3);
    let (da, db) = (to_device::<T>(stream, &a)?, to_device::<T>(stream, &b)?);
    for beta in [0f32, -0.5] {
        // With beta 0 what C holds must not be read.
        let before = if beta == 0.0 { vec![f32::NAN; nc * batch] } else { c.clone() };
        let mut dc = to_device::<T>(stream, &before)?;
        let alpha = 2f32;
        let (pa, _a) = da.device_ptr(stream);
        let (pb, _b) = db.device_ptr(stream);
        let (pc, _c) = dc.device_ptr_mut(stream);
        // SAFETY: shapes and leading dimensions are those of the buffers.
        unsafe {
            cudarc::cublas::result::gemm_strided_batched_ex(
                *handle.handle(),
                op(case.ta),
                op(case.tb),
                case.m as i32,
                case.n as i32,
                case.k as i32,
                (&raw const alpha).cast(),
                pa as *const c_void,
                T::CODE,
                lda as i32,
                na as i64,
                pb as *const c_void,
                T::CODE,
                ldb as i32,
                nb as i64,
                (&raw const beta).cast(),
                pc as *mut c_void,
                T::CODE,
                ldc as i32,
                nc as i64,
                batch as i32,
                blas::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                blas::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )?;
        }
        drop(_c);
        let got = stream.clone_dtoh(&dc)?;
        for (index, at) in (0..batch).flat_map(|s| (0..nc).map(move |at| (s, at))) {
            let (i, j) = (at % ldc, at / ldc);
            let value = got[index * nc + at].back();
            if i >= case.m {
                let old = T::of(before[index * nc + at]).back();
                assert!(value == old || (value.is_nan() && old.is_nan()), "between the columns");
                continue;
            }
            let product = case.product(&a[index * na..], &b[index * nb..], i, j);
            let expected = f64::from(alpha) * product
                + if beta == 0.0 { 0.0 } else { f64::from(beta) * f64::from(before[index * nc + at]) };
            let error = (f64::from(value) - expected).abs();
            let places = if size_of::<T>() == 4 { 2e-6 } else { 8e-3 };
            let Case { m, n, k, ta, tb } = case;
            assert!(
                error <= places * (1.0 + expected.abs()),
                "{m} {n} {k} {ta} {tb} {i} {j}: {value} {expected}"
            );
        }
    }
    Ok(())
}

#[test]
fn products_are_right_for_odd_sizes_all_transposes_and_types() -> Result<()> {
    let Some(_session) = Session::begin("products")? else { return Ok(()) };
    let context = context()?;
    let stream = context.new_stream()?;
    let handle = CudaBlas::new(stream.clone())?;
    for case in cases() {
        check::<f32>(&stream, &handle, &case, 1)?;
        check::<f32>(&stream, &handle, &case, 3)?;
        check::<Bf16>(&stream, &handle, &case, 2)?;
        check::<F16>(&stream, &handle, &case, 2)?;
    }
    Ok(())
}

#[test]
fn a_large_product_is_right_in_spots() -> Result<()> {
    let Some(_session) = Session::begin("a large product")? else { return Ok(()) };
    let context = context()?;
    let stream = context.new_stream()?;
    let handle = CudaBlas::new(stream.clone())?;
    let case = Case { m: 512, n: 512, k: 512, ta: false, tb: true };
    check_spots(&stream, &handle, &case)
}

/// 512 elements of a product, f32.
fn check_spots(stream: &Arc<CudaStream>, handle: &CudaBlas, case: &Case) -> Result<()> {
    let (lda, ldb, ldc) = case.ld();
    let (na, nb, nc) = case.lengths();
    let (a, b) = (numbers(na, 7), numbers(nb, 8));
    let (da, db) = (stream.clone_htod(&a)?, stream.clone_htod(&b)?);
    let mut dc = stream.alloc_zeros::<f32>(nc)?;
    let (alpha, beta) = (1f32, 0f32);
    let (pa, pb, pc) = (da.device_ptr(stream).0, db.device_ptr(stream).0, dc.device_ptr_mut(stream).0);
    let [m, n, k] = [case.m, case.n, case.k].map(|d| d as i32);
    let (ta, tb) = (op(case.ta), op(case.tb));
    // SAFETY: shapes and leading dimensions are those of the buffers.
    unsafe {
        cudarc::cublas::result::sgemm(
            *handle.handle(),
            ta,
            tb,
            m,
            n,
            k,
            &alpha,
            pa as _,
            lda as i32,
            pb as _,
            ldb as i32,
            &beta,
            pc as _,
            ldc as i32,
        )?;
    }
    let got = stream.clone_dtoh(&dc)?;
    for i in 0..512 {
        let (row, column) = (i * 37 % case.m, i * 101 % case.n);
        let (value, expected) = (f64::from(got[row + column * ldc]), case.product(&a, &b, row, column));
        assert!((value - expected).abs() < 1e-4, "{row} {column}: {value} {expected}");
    }
    Ok(())
}

/// A product with an epilogue, f32, by cuBLASLt.
struct Lt {
    handle: ltsys::cublasLtHandle_t,
    desc: ltsys::cublasLtMatmulDesc_t,
}

impl Lt {
    fn new() -> Result<Lt> {
        let compute = ltsys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        Ok(Lt {
            handle: lt::create_handle()?,
            desc: lt::create_matmul_desc(compute, ltsys::cudaDataType_t::CUDA_R_32F)?,
        })
    }

    fn set<T>(&self, attribute: ltsys::cublasLtMatmulDescAttributes_t, value: T) -> Result<()> {
        // SAFETY: the attribute's type is that of the value, by the callers below.
        Ok(unsafe {
            lt::set_matmul_desc_attribute(self.desc, attribute, (&raw const value).cast(), size_of::<T>())
        }?)
    }

    /// d = a[m, k] * b[k, n], column-major and dense.
    fn run(&self, stream: &Arc<CudaStream>, sizes: [usize; 3], a: u64, b: u64, d: u64) -> Result<()> {
        let [m, n, k] = sizes;
        let layout = |rows, columns| {
            lt::create_matrix_layout(
                ltsys::cudaDataType_t::CUDA_R_32F,
                rows as u64,
                columns as u64,
                rows as i64,
            )
        };
        let (la, lb, ld) = (layout(m, k)?, layout(k, n)?, layout(m, n)?);
        let preference = lt::create_matmul_pref()?;
        let (alpha, beta) = (1f32, 0f32);
        // SAFETY: layouts and pointers are of the buffers.
        unsafe {
            let found = lt::get_matmul_algo_heuristic(self.handle, self.desc, la, lb, ld, ld, preference)?;
            lt::matmul(
                self.handle,
                self.desc,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                a as *const c_void,
                la,
                b as *const c_void,
                lb,
                d as *const c_void,
                ld,
                d as *mut c_void,
                ld,
                &raw const found.algo,
                std::ptr::null_mut(),
                0,
                stream.cu_stream().cast(),
            )?;
            lt::destroy_matmul_pref(preference)?;
            for layout in [la, lb, ld] {
                lt::destroy_matrix_layout(layout)?;
            }
        }
        Ok(())
    }
}

impl Drop for Lt {
    fn drop(&mut self) {
        // SAFETY: made in `new`, used by nobody afterwards.
        let _ = unsafe { (lt::destroy_matmul_desc(self.desc), lt::destroy_handle(self.handle)) };
    }
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

#[test]
fn epilogues_are_what_the_documentation_says() -> Result<()> {
    use ltsys::cublasLtEpilogue_t as E;
    use ltsys::cublasLtMatmulDescAttributes_t as At;
    let Some(_session) = Session::begin("epilogues")? else { return Ok(()) };
    let context = context()?;
    let stream = context.new_stream()?;
    let (m, n, k) = (24, 5, 7);
    let (a, b, bias) = (numbers(m * k, 4), numbers(k * n, 5), numbers(m, 6));
    let plain: Vec<f64> = (0..m * n)
        .map(|at| (0..k).map(|p| f64::from(a[at % m + p * m]) * f64::from(b[p + at / m * k])).sum())
        .collect();
    let (da, db) = (stream.clone_htod(&a)?, stream.clone_htod(&b)?);
    let run =
        |epilogue: E, bias: &mut CudaSlice<f32>, aux: &mut CudaSlice<u8>, aux_ld: i64| -> Result<Vec<f32>> {
            let lt = Lt::new()?;
            lt.set(At::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)?;
            lt.set(At::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.device_ptr_mut(&stream).0)?;
            lt.set(At::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux.device_ptr_mut(&stream).0)?;
            lt.set(At::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, aux_ld)?;
            let mut d = stream.alloc_zeros::<f32>(m * n)?;
            let out = d.device_ptr_mut(&stream).0;
            lt.run(&stream, [m, n, k], da.device_ptr(&stream).0, db.device_ptr(&stream).0, out)?;
            Ok(stream.clone_dtoh(&d)?)
        };
    let close = |got: &[f32], expected: &dyn Fn(usize) -> f64, what: &str| {
        for (i, v) in got.iter().enumerate() {
            assert!((f64::from(*v) - expected(i)).abs() < 1e-5, "{what} {i}: {v} {}", expected(i));
        }
    };
    let with_bias = |i: usize| plain[i] + f64::from(bias[i % m]);
    let mut dbias = stream.clone_htod(&bias)?;
    let mut mask = stream.alloc_zeros::<u8>(128 / 8 * n)?;
    let mut before = stream.alloc_zeros::<u8>(m * n * 4)?;

    close(&run(E::CUBLASLT_EPILOGUE_DEFAULT, &mut dbias, &mut mask, 128)?, &|i| plain[i], "default");
    close(&run(E::CUBLASLT_EPILOGUE_RELU, &mut dbias, &mut mask, 128)?, &|i| plain[i].max(0.0), "relu");
    close(&run(E::CUBLASLT_EPILOGUE_BIAS, &mut dbias, &mut mask, 128)?, &with_bias, "bias");
    close(&run(E::CUBLASLT_EPILOGUE_GELU_BIAS, &mut dbias, &mut mask, 128)?, &|i| gelu(with_bias(i)), "gelu");
    let got = run(E::CUBLASLT_EPILOGUE_RELU_AUX_BIAS, &mut dbias, &mut mask, 128)?;
    close(&got, &|i| with_bias(i).max(0.0), "relu with its mask");
    let bits = stream.clone_dtoh(&mask)?;
    let on = |i: usize| bits[i / m * 16 + i % m / 8] >> (i % m % 8) & 1 == 1;
    assert!((0..m * n).all(|i| on(i) == (with_bias(i) > 0.0)), "the mask");
    run(E::CUBLASLT_EPILOGUE_GELU_AUX_BIAS, &mut dbias, &mut before, m as i64)?;
    let saved: Vec<f32> =
        stream.clone_dtoh(&before)?.as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b)).collect();
    close(&saved, &with_bias, "what was before GELU");

    // Backward: the same mask and the same saved values, and the gradient of the bias.
    let mut gradient = stream.alloc_zeros::<f32>(m)?;
    let drelu = |i: usize| if with_bias(i) > 0.0 { plain[i] } else { 0.0 };
    let sum = |f: &dyn Fn(usize) -> f64, row: usize| (0..n).map(|j| f(j * m + row)).sum::<f64>();
    close(&run(E::CUBLASLT_EPILOGUE_DRELU_BGRAD, &mut gradient, &mut mask, 128)?, &drelu, "drelu");
    close(&stream.clone_dtoh(&gradient)?, &|row| sum(&drelu, row), "its bias");
    let slope = |x: f64| (gelu(x + 1e-6) - gelu(x - 1e-6)) / 2e-6;
    let dgelu = |i: usize| plain[i] * slope(with_bias(i));
    close(&run(E::CUBLASLT_EPILOGUE_DGELU_BGRAD, &mut gradient, &mut before, m as i64)?, &dgelu, "dgelu");
    close(&stream.clone_dtoh(&gradient)?, &|row| sum(&dgelu, row), "its bias");
    run(E::CUBLASLT_EPILOGUE_BGRADA, &mut gradient, &mut mask, 128)?;
    let rows_of_a = |i: usize| (0..k).map(|p| f64::from(a[i + p * m])).sum::<f64>();
    close(&stream.clone_dtoh(&gradient)?, &rows_of_a, "the sum of A");
    let mut of_b = stream.alloc_zeros::<f32>(n)?;
    run(E::CUBLASLT_EPILOGUE_BGRADB, &mut of_b, &mut mask, 128)?;
    let columns_of_b = |j: usize| (0..k).map(|p| f64::from(b[p + j * k])).sum::<f64>();
    close(&stream.clone_dtoh(&of_b)?, &columns_of_b, "the sum of B");

    assert!(
        run(E::CUBLASLT_EPILOGUE_RELU_AUX, &mut dbias, &mut mask, 120).is_err(),
        "a mask of 120 bits a column"
    );
    Ok(())
}

//! The speed of memory-bound kernels, relative to a copy: for `paraft bench gpu`.

use super::{device::CudaDevice, flat::Gradient, launch::Arg, memory::Buffer};
use crate::{
    device::{Buffers, Linears, Losses, RowNorms},
    error::Result,
    shape::{Activation, NormAt, NormShape},
};
use std::time::Instant;

/// One kernel's bytes and time.
#[derive(Clone, Debug, PartialEq)]
pub struct Rate {
    /// Which operator.
    pub what: &'static str,
    /// Bytes that it must at least read and write, each once.
    pub bytes: u64,
    /// Seconds per call.
    pub seconds: f64,
}

/// Runs each memory-bound operator over `rows` rows of 1024 values, `repeats` times per measurement. The first
/// result is the copy's.
pub fn memory_bound(device: &mut CudaDevice, rows: usize, repeats: u32) -> Result<Vec<Rate>> {
    const COLS: usize = 1024;
    let (n, shape) = (rows * COLS, NormShape { rows, cols: COLS });
    let element = device.element_bytes();
    let noise: Vec<f32> = (0..n).map(|i| (i % 251) as f32 / 125.0 - 1.0).collect();
    let (mut a, mut b, mut c) = Default::default();
    device.load_values(&noise, &mut a)?;
    device.load_values(&noise, &mut b)?;
    let labels: Vec<u32> = (0..rows).map(|i| (i % COLS) as u32).collect();
    let mut ids = Default::default();
    device.load_ids(&labels, &mut ids)?;
    let held = device.hold(&vec![1.0; 2 * COLS])?;
    let at = NormAt { gamma: 0 };
    let mut stats = Default::default();
    let mut gradient = Gradient::new(device, n)?;
    device.fill(&gradient, 0.5)?;
    let mut grads = Gradient::new(device, 2 * COLS)?;
    let context = device.context().clone();
    let (from, to) = (Buffer::<f32>::new(&context, n, "a copy")?, Buffer::<f32>::new(&context, n, "a copy")?);
    from.clear(device.stream(), 0..n)?;

    let mut rates = Vec::new();
    let mut time = |device: &mut CudaDevice,
                    what: &'static str,
                    bytes: usize,
                    run: &mut dyn FnMut(&mut CudaDevice) -> Result|
     -> Result {
        run(device)?; // compiles and allocates
        device.stream().synchronize()?;
        let began = Instant::now();
        for _ in 0..repeats {
            run(device)?;
        }
        device.stream().synchronize()?;
        let seconds = began.elapsed().as_secs_f64() / f64::from(repeats.max(1));
        rates.push(Rate { what, bytes: bytes as u64, seconds });
        Ok(())
    };
    time(device, "copy", 8 * n, &mut |d| to.copy_from(d.stream(), &from, 0..n))?;
    time(device, "add", 3 * element * n, &mut |d| d.add(&a, &b, &mut c))?;
    time(device, "GELU backward", 3 * element * n, &mut |d| {
        d.activation_backward(Activation::Gelu, &a, &mut b)
    })?;
    time(device, "LayerNorm", 2 * element * n, &mut |d| {
        d.norm(shape, &a, None, held.params(), at, &mut c, &mut stats)
    })?;
    time(device, "LayerNorm backward", 5 * element * n, &mut |d| {
        d.norm_backward(shape, &b, &a, &stats, held.params(), at, None, &mut c, &mut grads)
    })?;
    time(device, "softmax and cross-entropy", 2 * element * n, &mut |d| {
        d.softmax_cross_entropy(rows, COLS, &mut c, &ids)
    })?;
    time(device, "unscale", 8 * n, &mut |d| d.unscale(&mut gradient, n, 1.0).map(|_| ()))?;
    for (what, kernel, bytes) in
        [("encode bf16", "encode_bf16", 6 * n), ("encode int8", "encode_int8", 5 * n + n / 256)]
    {
        time(device, what, bytes, &mut |d| d.encode(kernel, &gradient, Arg::At(to.at(0))))?;
    }
    Ok(rates)
}

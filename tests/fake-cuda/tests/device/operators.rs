//! The parity suite of `paraft doctor --selftest`, and errors that say what they are about.

use crate::Session;
use anyhow::{Result, ensure};
use paraft_compute::{
    DeviceError,
    cuda::{CudaDevice, CudaOptions, Precision},
    device::{Buffers, Linears},
    parity,
    shape::{Activation, LinearAt, LinearShape},
};

fn device(precision: Precision) -> Result<CudaDevice> {
    Ok(CudaDevice::new(CudaOptions { ordinal: 0, precision, ..CudaOptions::default() })?)
}

/// With the epilogues of cuBLASLt, where the precision has any, and without.
fn every_operator(session: &Session, precision: Precision, seeds: std::ops::Range<u64>) -> Result<()> {
    for (seed, apart) in seeds.flat_map(|seed| [(seed, false), (seed, true)]) {
        session.set("SEED", &seed.to_string())?;
        let before = session.fake.calls("cublasLtMatmul");
        let mut device = CudaDevice::new(CudaOptions { precision, apart, ..CudaOptions::default() })?;
        let cases = parity::operators(&mut device, Some(precision), seed)?;
        ensure!(cases.len() > 150, "{} cases", cases.len());
        let wrong: Vec<_> = cases.iter().filter(|c| !c.holds()).collect();
        ensure!(wrong.is_empty(), "{precision:?}, seed {seed}, apart: {apart}: {wrong:#?}");
        let fused = session.fake.calls("cublasLtMatmul") - before;
        let wanted = !apart && precision != Precision::F32;
        ensure!((fused > 0) == wanted, "{precision:?}, apart: {apart}: {fused} by cuBLASLt");
    }
    Ok(())
}

/// A layer of 8 outputs, whose bias lies where it may, in each way; with the calls to cuBLASLt and to our kernel.
#[test]
fn bias_and_activation_are_one_call_with_cublaslt() -> Result<()> {
    let name = "bias_and_activation_are_one_call_with_cublaslt";
    let Some(session) = Session::begin(name)? else { return Ok(()) };
    let suffix = |p| {
        if p == Precision::Bf16 {
            "bf16"
        } else if p == Precision::F16 {
            "f16"
        } else {
            "f32"
        }
    };
    let layer = |precision, activation, bias: usize, outputs: usize| -> Result<(usize, usize, usize)> {
        let of = |name: &str| session.fake.calls(name);
        let kernel = format!("cuLaunchKernel bias_act_{}", suffix(precision));
        let counts = || [of("cublasLtMatmul"), of(&kernel), of("cublasLtMatmulAlgoGetHeuristic")];
        let mut device = device(precision)?;
        let params: Vec<f32> = (0..256).map(|i| (i % 7) as f32 - 3.0).collect();
        let held = device.hold(&params)?;
        let inputs: Vec<f32> = (0..48).map(|i| (i % 5) as f32 - 2.0).collect();
        let (mut x, mut y, mut before) = Default::default();
        device.load_values(&inputs, &mut x)?;
        let shape = LinearShape { n: 3, inputs: 16, outputs };
        let begun = counts();
        for _ in 0..2 {
            // Small whole numbers, which are exact in every precision; a GELU's argument is compared.
            let at = LinearAt { weight: 0, bias: Some(bias) };
            device.linear(shape, &x, held.params(), at, activation, &mut y, Some(&mut before))?;
            let got = device.read(if activation == Activation::Gelu { &before } else { &y })?;
            for (place, got) in got.iter().enumerate() {
                let (row, col) = (place / outputs, place % outputs);
                let product: f32 = (0..16).map(|i| inputs[row * 16 + i] * params[col * 16 + i]).sum();
                let sum = product + params[bias + col];
                let want = if activation == Activation::Relu { sum.max(0.0) } else { sum };
                ensure!(*got == want, "{precision:?}, {activation:?}: {got} for {want} at {place}");
            }
        }
        let now = counts();
        Ok((now[0] - begun[0], now[1] - begun[1], now[2] - begun[2]))
    };
    let (none, relu, gelu) = (Activation::None, Activation::Relu, Activation::Gelu);
    for precision in [Precision::Tf32, Precision::Bf16] {
        for activation in [none, relu, gelu] {
            ensure!(layer(precision, activation, 128, 8)? == (2, 0, 1), "{precision:?}, {activation:?}");
        }
        // An odd place; a row that is no whole number of vectors.
        ensure!(layer(precision, relu, 129, 8)? == (0, 2, 0), "{precision:?}: a bias at an odd place");
        ensure!(layer(precision, gelu, 128, 7)? == (0, 2, 0), "{precision:?}: seven outputs");
        ensure!(layer(precision, relu, 128, 7)? == (2, 0, 1), "{precision:?}: seven outputs");
        // No algorithm for the shape, asked for once.
        session.set("FAIL", "cublasLtMatmulAlgoGetHeuristic:1:15")?;
        ensure!(layer(precision, relu, 128, 8)? == (0, 2, 1), "{precision:?}: not supported");
        session.fake.mend();
    }
    ensure!(layer(Precision::F32, relu, 128, 8)? == (0, 2, 0), "f32 is ours");
    // What overflows has to show.
    ensure!(layer(Precision::F16, relu, 128, 8)? == (0, 2, 0), "a ReLU in f16 is ours");
    ensure!(layer(Precision::F16, gelu, 128, 8)? == (2, 0, 1), "a GELU in f16");

    session.set("FAIL", "cublasLtMatmul:1:13")?;
    let error = layer(Precision::Bf16, relu, 128, 8).expect_err("it is refused").to_string();
    for part in
        ["cuda:0", "cublasLtMatmul of [3, 16] and [16, 8] with Relu", "CUBLAS_STATUS_EXECUTION_FAILED"]
    {
        ensure!(error.contains(part), "{part} is missing in: {error}");
    }
    Ok(())
}

#[test]
fn every_operator_is_the_plain_one_in_f32() -> Result<()> {
    let Some(session) = Session::begin("every_operator_is_the_plain_one_in_f32")? else { return Ok(()) };
    every_operator(&session, Precision::F32, 1..3)
}

#[test]
fn every_operator_is_the_plain_one_in_bf16() -> Result<()> {
    let Some(session) = Session::begin("every_operator_is_the_plain_one_in_bf16")? else { return Ok(()) };
    every_operator(&session, Precision::Bf16, 1..2)
}

#[test]
fn every_operator_is_the_plain_one_in_f16_and_tf32() -> Result<()> {
    let Some(session) = Session::begin("every_operator_is_the_plain_one_in_f16_and_tf32")? else {
        return Ok(());
    };
    every_operator(&session, Precision::F16, 1..2)?;
    every_operator(&session, Precision::Tf32, 1..2)
}

/// A linear layer of 4 samples on a device, as far as it comes.
fn small_step(device: &mut CudaDevice) -> Result<Vec<f32>, DeviceError> {
    let held = device.hold(&[0.5; 12])?;
    let (mut x, mut y) = (Default::default(), Default::default());
    device.load_values(&[1.0; 16], &mut x)?;
    let shape = LinearShape { n: 4, inputs: 4, outputs: 2 };
    let at = LinearAt { weight: 0, bias: Some(8) };
    device.linear(shape, &x, held.params(), at, Activation::Relu, &mut y, None)?;
    device.read(&y)
}

#[test]
fn an_error_names_the_kernel_its_sizes_and_its_launch() -> Result<()> {
    let Some(session) = Session::begin("an_error_names_the_kernel_its_sizes_and_its_launch")? else {
        return Ok(());
    };
    let mut sound = device(Precision::F32)?;
    assert_eq!(small_step(&mut sound)?, [2.5; 8]);
    drop(sound);
    session.set("FAIL", "cuLaunchKernel:bias_act_f32:1:701")?;
    let error = small_step(&mut device(Precision::F32)?).expect_err("a launch was refused").to_string();
    for part in [
        "cuda:0",
        "bias_act_f32",
        "grid 1x1x1",
        "block 256",
        "rows 4",
        "cols 2",
        "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
    ] {
        ensure!(error.contains(part), "{part} is missing in: {error}");
    }
    Ok(())
}

#[test]
fn memory_that_does_not_suffice_is_an_error_with_the_sizes() -> Result<()> {
    let Some(session) = Session::begin("memory_that_does_not_suffice_is_an_error_with_the_sizes")? else {
        return Ok(());
    };
    session.set("MEMORY", "40000000")?;
    let mut device = device(Precision::F32)?;
    let used = session.fake.used(0);
    let error = device.hold(&vec![0.0; 8_000_000]).expect_err("32 MB more than once").to_string();
    for part in ["cuda:0", "out of memory", "32000000 bytes", "the parameters", "of 40000000 bytes"] {
        ensure!(error.contains(part), "{part} is missing in: {error}");
    }
    // Nothing is left behind, and the device works on.
    assert_eq!(session.fake.used(0), used);
    assert_eq!(small_step(&mut device)?, [2.5; 8]);
    Ok(())
}

#[test]
fn a_device_that_is_not_there_is_refused() -> Result<()> {
    let Some(_session) = Session::begin("a_device_that_is_not_there_is_refused")? else { return Ok(()) };
    let options = CudaOptions { ordinal: 7, precision: Precision::F32, ..CudaOptions::default() };
    let error = CudaDevice::new(options).expect_err("there is one").to_string();
    ensure!(error.contains("cuda:7") && error.contains("cuda:0"), "{error}");
    Ok(())
}

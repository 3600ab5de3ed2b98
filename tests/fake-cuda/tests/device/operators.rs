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

fn every_operator(session: &Session, precision: Precision, seeds: std::ops::Range<u64>) -> Result<()> {
    for seed in seeds {
        session.set("SEED", &seed.to_string())?;
        let cases = parity::operators(&mut device(precision)?, Some(precision), seed)?;
        ensure!(cases.len() > 150, "{} cases", cases.len());
        let wrong: Vec<_> = cases.iter().filter(|c| !c.holds()).collect();
        ensure!(wrong.is_empty(), "{precision:?}, seed {seed}: {wrong:#?}");
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

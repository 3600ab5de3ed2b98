//! The ways of weights and gradients, with nobody waiting between: what orders them is their events alone.

use crate::Session;
use anyhow::{Result, ensure};
use paraft_compute::{
    cuda::{CudaDevice, CudaOptions, Gradient, Inbox, Outbox, Precision, Wire},
    device::{Buffers, Linears},
    shape::{Activation, LinearAt, LinearShape},
};

const LEN: usize = 64;

/// Weights land again and again, in part, and after each swap the device must see what the host has.
#[test]
fn every_swap_shows_what_has_landed_so_far() -> Result<()> {
    let Some(session) = Session::begin("every_swap_shows_what_has_landed_so_far")? else { return Ok(()) };
    for seed in 1..9 {
        session.set("SEED", &seed.to_string())?;
        for precision in [Precision::F32, Precision::Bf16] {
            let mut device =
                CudaDevice::new(CudaOptions { ordinal: 0, precision, ..CudaOptions::default() })?;
            let mut inbox = Inbox::new(&device, LEN)?;
            // x · weightᵀ of [1, 1] and [LEN, 1]: the weights themselves.
            let (shape, at) =
                (LinearShape { n: 1, inputs: 1, outputs: LEN }, LinearAt { weight: 0, bias: None });
            let mut one = Default::default();
            device.load_values(&[1.0], &mut one)?;
            let (mut seen, mut want) = (Vec::new(), Vec::new());
            for step in 0..6u64 {
                let host = inbox.host_mut()?;
                let mut ranges = Vec::new();
                for part in 0..4 {
                    // Not every part each time, but everything at first.
                    if step == 0 || !(part + step + seed).is_multiple_of(3) {
                        let range = part as usize * 16..(part as usize + 1) * 16;
                        host[range.clone()].fill((step * 4 + part) as f32);
                        ranges.push(range);
                    }
                }
                want.push(host.to_vec());
                for range in ranges {
                    inbox.landed(&device, range, None)?;
                }
                let params = inbox.swap(&device)?;
                let mut y = Default::default();
                device.linear(shape, &one, params, at, Activation::None, &mut y, None)?;
                seen.push(y);
            }
            for (step, (y, want)) in seen.iter().zip(&want).enumerate() {
                let got = device.read(y)?;
                ensure!(&got == want, "seed {seed}, {precision:?}, step {step}: {got:?} instead of {want:?}");
            }
        }
    }
    Ok(())
}

/// Whoever writes the host's copy waits for what is still copied from it.
#[test]
fn what_has_landed_may_be_written_over_before_the_swap() -> Result<()> {
    let Some(session) = Session::begin("what_has_landed_may_be_written_over_before_the_swap")? else {
        return Ok(());
    };
    for seed in 1..9 {
        session.set("SEED", &seed.to_string())?;
        let device = CudaDevice::new(CudaOptions { ordinal: 0, ..CudaOptions::default() })?;
        let mut inbox = Inbox::new(&device, LEN)?;
        inbox.host_mut()?.fill(1.0);
        inbox.landed(&device, 0..LEN, None)?;
        inbox.host_mut()?.fill(2.0);
        inbox.swap(&device)?;
        let got = inbox.fetch(&device)?;
        ensure!(got.iter().all(|v| *v == 1.0), "seed {seed}: {got:?}");
    }
    Ok(())
}

/// A gradient is sent while the next one is computed over it.
#[test]
fn a_gradient_is_not_written_over_before_it_is_sent() -> Result<()> {
    let Some(session) = Session::begin("a_gradient_is_not_written_over_before_it_is_sent")? else {
        return Ok(());
    };
    for seed in 1..9 {
        session.set("SEED", &seed.to_string())?;
        for wire in [Wire::F32, Wire::Bf16] {
            let mut device = CudaDevice::new(CudaOptions {
                ordinal: 0,
                precision: Precision::F32,
                ..CudaOptions::default()
            })?;
            let mut outbox = Outbox::new(&device)?;
            let gradient = Gradient::new(&device, LEN)?;
            let mut parcels = Vec::new();
            for step in 0..6 {
                outbox.begin(device.stream())?;
                device.fill(&gradient, step as f32)?;
                let stream = device.stream().clone();
                outbox.mark(&stream)?;
                for from in [32, 0] {
                    parcels.push((step, outbox.send(&gradient, from..from + 32, wire)?));
                }
            }
            for (step, parcel) in parcels {
                let bytes = parcel.wait()?;
                // The upper half of an f32 is a bf16.
                let want = (step as f32).to_le_bytes();
                let want = if wire == Wire::F32 { &want[..] } else { &want[2..] };
                let same = bytes.as_ref().chunks(want.len()).all(|v| v == want);
                ensure!(same, "seed {seed}, {wire:?}: step {step} was sent as {:?}", bytes.as_ref());
            }
        }
    }
    Ok(())
}

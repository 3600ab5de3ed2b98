use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Result;
use cudarc::driver::{CudaContext, CudaStream, DevicePtr, LaunchConfig, PushKernelArg, result, sys};

use crate::{Session, context, function};

const N: usize = 500;

/// Scales four buckets on one stream and copies each on another, with or without the event between them; how many
/// elements arrive wrong.
fn wrong_elements(context: &Arc<CudaContext>, with_event: bool) -> Result<usize> {
    let compute = context.new_stream()?;
    let copy = context.new_stream()?;
    let scale = function(context, "selftest_scale")?;
    let x = compute.clone_htod(&vec![2f32; N])?;
    // SAFETY: written by the kernels before they are read, which is what this test is about.
    let mut y = (0..4).map(|_| unsafe { compute.alloc::<f32>(N) }).collect::<Result<Vec<_>, _>>()?;
    // SAFETY: pinned memory may begin as anything.
    let mut host =
        (0..4).map(|_| unsafe { context.alloc_pinned::<f32>(N) }).collect::<Result<Vec<_>, _>>()?;
    for (y, host) in y.iter_mut().zip(&mut host) {
        let (factor, n) = (3f32, N as i64);
        let mut launch = compute.launch_builder(&scale);
        launch.arg(&mut *y).arg(&x).arg(&factor).arg(&n);
        // SAFETY: the arguments are those of selftest_scale.
        unsafe { launch.launch(LaunchConfig::for_num_elems(N as u32)) }?;
        if with_event {
            copy.wait(&compute.record_event(None)?)?;
        }
        copy.memcpy_dtoh(y, host)?;
    }
    copy.synchronize()?;
    let mut wrong = 0;
    for host in &host {
        wrong += host.as_slice()?.iter().filter(|v| **v != 6.0).count();
    }
    compute.synchronize()?;
    Ok(wrong)
}

#[test]
fn only_a_missing_event_gives_wrong_results_for_some_seeds() -> Result<()> {
    let Some(session) = Session::begin("a missing event")? else { return Ok(()) };
    let context = context()?;
    let mut seen = 0;
    for seed in 1..=12 {
        session.seed(seed)?;
        assert_eq!(wrong_elements(&context, true)?, 0, "seed {seed}");
        session.seed(seed)?;
        seen += usize::from(wrong_elements(&context, false)? > 0);
    }
    assert!(seen >= 3, "{seen} of 12 seeds show it");
    Ok(())
}

#[test]
fn a_seed_gives_the_same_order_again() -> Result<()> {
    let Some(session) = Session::begin("seeds")? else { return Ok(()) };
    let context = context()?;
    let once = |seed| -> Result<Vec<usize>> {
        session.seed(seed)?;
        (0..4).map(|_| wrong_elements(&context, false)).collect()
    };
    for seed in 1..6 {
        assert_eq!(once(seed)?, once(seed)?);
    }
    Ok(())
}

#[test]
fn pinned_sources_are_read_at_the_copy_pageable_at_the_call() -> Result<()> {
    let Some(session) = Session::begin("sources of copies")? else { return Ok(()) };
    let context = context()?;
    let stream = context.new_stream()?;
    let mut early = 0;
    for seed in 0..8 {
        session.seed(seed)?;
        let mut pageable = vec![1u8; 64];
        let a = stream.clone_htod(&pageable)?;
        pageable.fill(9);
        assert_eq!(stream.clone_dtoh(&a)?, vec![1; 64]);

        // SAFETY: pinned memory may begin as anything.
        let mut pinned = unsafe { context.alloc_pinned::<u8>(64) }?;
        pinned.as_mut_slice()?.fill(1);
        // SAFETY: bytes need no constructor.
        let mut b = unsafe { stream.alloc::<u8>(64) }?;
        stream.memcpy_htod(&pinned, &mut b)?;
        // Too early, on purpose: nobody waited for the copy.
        pinned.as_mut_slice()?.fill(9);
        early += usize::from(stream.clone_dtoh(&b)? == vec![9; 64]);
    }
    assert!(early > 0, "the copy never ran late");
    Ok(())
}

#[test]
fn the_null_stream_waits_for_blocking_streams_and_they_for_it() -> Result<()> {
    let Some(session) = Session::begin("the null stream")? else { return Ok(()) };
    let context = context()?;
    let null = context.default_stream();
    context.bind_to_thread()?;
    for seed in 0..10 {
        session.seed(seed)?;
        let blocking = result::stream::create(result::stream::StreamKind::Default)?;
        // SAFETY: allocated here, used below, freed at the end.
        unsafe {
            let at = result::malloc_sync(64)?;
            result::memset_d8_async(at, 1, 64, blocking)?;
            result::memset_d8_async(at, 2, 64, null.cu_stream())?;
            result::memset_d8_async(at, 3, 64, blocking)?;
            let mut host = [0u8; 64];
            result::memcpy_dtoh_async(&mut host, at, null.cu_stream())?;
            assert_eq!(host, [3; 64], "seed {seed}");
            result::stream::destroy(blocking)?;
            result::free_sync(at)?;
        }
    }
    Ok(())
}

#[test]
fn queries_finish_operations_and_host_functions_run_in_order() -> Result<()> {
    let Some(session) = Session::begin("queries")? else { return Ok(()) };
    let context = context()?;
    let stream = context.new_stream()?;
    let ran = Arc::new(AtomicUsize::new(0));
    for i in 0..5 {
        let ran = ran.clone();
        // SAFETY: the function calls no CUDA.
        unsafe { launch_host(&stream, move || assert_eq!(ran.fetch_add(1, Ordering::SeqCst), i))? };
    }
    let event = stream.record_event(None)?;
    assert!(session.fake.unfinished() > 0, "nothing is left for later");
    let mut asked = 0;
    while !event.is_complete() {
        asked += 1;
        assert!(asked < 100, "a loop of queries does not end");
    }
    assert_eq!(ran.load(Ordering::SeqCst), 5);
    Ok(())
}

/// # Safety
/// `f` must not call CUDA.
unsafe fn launch_host(stream: &Arc<CudaStream>, f: impl FnOnce() + Send + 'static) -> Result<()> {
    unsafe extern "C" fn call(data: *mut std::ffi::c_void) {
        // SAFETY: the box made below, which is given here once.
        unsafe { Box::from_raw(data.cast::<Box<dyn FnOnce() + Send>>())() }
    }
    let boxed: Box<Box<dyn FnOnce() + Send>> = Box::new(Box::new(f));
    // SAFETY: `call` takes the box back.
    unsafe { sys::cuLaunchHostFunc(stream.cu_stream(), Some(call), Box::into_raw(boxed).cast()) }.result()?;
    Ok(())
}

#[test]
fn operations_end_although_nobody_asks() -> Result<()> {
    let Some(session) = Session::begin("the background")? else { return Ok(()) };
    session.fake.set("BACKGROUND", "1").map_err(anyhow::Error::msg)?;
    let context = context()?;
    let stream = context.new_stream()?;
    let (sender, receiver) = std::sync::mpsc::channel();
    // SAFETY: the function calls no CUDA.
    unsafe { launch_host(&stream, move || sender.send(7).expect("somebody waits"))? };
    assert_eq!(receiver.recv()?, 7);
    Ok(())
}

#[test]
fn fresh_memory_is_nan_and_valid_in_its_streams_order_only() -> Result<()> {
    let Some(_session) = Session::begin("fresh memory")? else { return Ok(()) };
    let context = context()?;
    let stream = context.new_stream()?;
    // SAFETY: what it holds is asked for below.
    let fresh = unsafe { stream.alloc::<f32>(100) }?;
    assert!(stream.clone_dtoh(&fresh)?.iter().all(|v| v.is_nan()));
    let (address, guard) = fresh.device_ptr(&stream);
    assert_eq!(address % 256, 0);
    drop(guard);
    // SAFETY: allocated, read and freed here.
    unsafe {
        let at = result::malloc_sync(40)?;
        let mut host = [0u8; 40];
        result::memcpy_dtoh_sync(&mut host, at)?;
        assert_eq!(host, [0xff; 40]);
        result::free_sync(at)?;
    }
    Ok(())
}

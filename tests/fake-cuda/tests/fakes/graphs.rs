use anyhow::Result;
use cudarc::driver::sys::{
    CUgraphInstantiate_flags_enum as Instantiate, CUresult, CUstreamCaptureMode as Mode,
};
use cudarc::driver::{CudaSlice, LaunchConfig, PushKernelArg, result};

use crate::{Session, context, function};

/// Captures a scaling on one stream and a copy on another; `joined` by events, as it must be, or the copy on a stream of
/// its own accord. How many elements are wrong after each of three launches.
fn replay(session: &Session, with_event: bool) -> Result<Vec<usize>> {
    const N: usize = 300;
    let context = context()?;
    let (compute, copy) = (context.new_stream()?, context.new_stream()?);
    let scale = function(&context, "selftest_scale")?;
    let mut x = compute.clone_htod(&[1f32; N])?;
    let mut y = compute.alloc_zeros::<f32>(N)?;
    // SAFETY: pinned memory may begin as anything.
    let mut host = unsafe { context.alloc_pinned::<f32>(N) }?;
    compute.synchronize()?;
    compute.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let begin = compute.record_event(None)?;
    copy.wait(&begin)?;
    let (a, n) = (2f32, N as i64);
    let mut launch = compute.launch_builder(&scale);
    launch.arg(&mut y).arg(&x).arg(&a).arg(&n);
    // SAFETY: the arguments are those of selftest_scale.
    unsafe { launch.launch(LaunchConfig::for_num_elems(N as u32)) }?;
    if with_event {
        copy.wait(&compute.record_event(None)?)?;
    }
    copy.memcpy_dtoh(&y, &mut host)?;
    compute.wait(&copy.record_event(None)?)?;
    let graph = compute.end_capture(Instantiate::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)?;
    let graph = graph.ok_or_else(|| anyhow::anyhow!("nothing was captured"))?;
    let launches = session.fake.calls("cuLaunchKernel selftest_scale");
    let mut wrong = Vec::new();
    for round in 1..=3u8 {
        compute.memcpy_htod(&[f32::from(round); N], &mut x)?;
        graph.launch()?;
        compute.synchronize()?;
        let expected = 2.0 * f32::from(round);
        wrong.push(host.as_slice()?.iter().filter(|v| **v != expected).count());
    }
    assert_eq!(session.fake.calls("cuLaunchKernel selftest_scale"), launches, "a graph calls nothing again");
    Ok(wrong)
}

#[test]
fn a_graph_runs_in_any_order_that_its_edges_allow() -> Result<()> {
    let Some(session) = Session::begin("graphs")? else { return Ok(()) };
    let mut seen = 0;
    for seed in 0..10 {
        session.seed(seed)?;
        assert_eq!(replay(&session, true)?, [0, 0, 0], "seed {seed}");
        session.seed(seed)?;
        seen += usize::from(replay(&session, false)?.iter().any(|w| *w > 0));
    }
    assert!(seen >= 3, "{seen} of 10 seeds show the missing edge");
    Ok(())
}

#[test]
fn what_may_not_be_captured_spoils_the_capture() -> Result<()> {
    let Some(_session) = Session::begin("forbidden in captures")? else { return Ok(()) };
    let context = context()?;
    let stream = context.new_stream()?;
    let x = stream.clone_htod(&[1u8; 8])?;
    let mut host = [0u8; 8];
    stream.synchronize()?;
    stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
    let waited = stream.synchronize().err().map(|e| e.0);
    assert_eq!(waited, Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
    let ended =
        stream.end_capture(Instantiate::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH).err().map(|e| e.0);
    assert_eq!(ended, Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));

    stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
    let pageable = stream.memcpy_dtoh(&x, &mut host).err().map(|e| e.0);
    assert_eq!(pageable, Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
    // SAFETY: a stream of ours that captures.
    assert!(unsafe { result::stream::end_capture(stream.cu_stream()) }.is_err());

    // A stream that joins and is left behind.
    let side = context.new_stream()?;
    let mut y = stream.alloc_zeros::<u8>(8)?;
    stream.synchronize()?;
    stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
    side.wait(&stream.record_event(None)?)?;
    side.memset_zeros(&mut y)?;
    // SAFETY: a stream of ours that captures.
    let unjoined = unsafe { result::stream::end_capture(stream.cu_stream()) }.err().map(|e| e.0);
    assert_eq!(unjoined, Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED));
    side.synchronize()?;
    Ok(())
}

#[test]
fn launches_of_one_graph_on_two_streams_come_one_after_another() -> Result<()> {
    let Some(session) = Session::begin("one graph, two streams")? else { return Ok(()) };
    let context = context()?;
    let scale = function(&context, "selftest_scale")?;
    for seed in 0..8 {
        session.seed(seed)?;
        let (one, other) = (context.new_stream()?, context.new_stream()?);
        let mut x = one.clone_htod(&[1f32; 4])?;
        let mut y = one.alloc_zeros::<f32>(4)?;
        one.synchronize()?;
        one.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        let times = |to: &mut CudaSlice<f32>, from: &CudaSlice<f32>, a: f32| {
            let n = 4i64;
            let mut launch = one.launch_builder(&scale);
            launch.arg(to).arg(from).arg(&a).arg(&n);
            // SAFETY: the arguments are those of selftest_scale.
            unsafe { launch.launch(LaunchConfig::for_num_elems(4)) }.map(|_| ())
        };
        times(&mut y, &x, 2.0)?;
        times(&mut x, &y, 3.0)?;
        // SAFETY: made, launched and destroyed here.
        unsafe {
            let graph = result::stream::end_capture(one.cu_stream())?;
            let flags = Instantiate::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            let exec = result::graph::instantiate(graph, flags)?;
            result::graph::launch(exec, one.cu_stream())?;
            result::graph::launch(exec, other.cu_stream())?;
            one.synchronize()?;
            other.synchronize()?;
            result::graph::exec_destroy(exec)?;
            result::graph::destroy(graph)?;
        }
        assert_eq!(one.clone_dtoh(&x)?, [36.0; 4], "seed {seed}");
    }
    Ok(())
}

use anyhow::Result;
use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, DriverError, LaunchConfig, PushKernelArg, result, sys};
use cudarc::nvrtc::{CompileOptions, Ptx, compile_ptx_with_opts};

use crate::{SELFTEST, Session, context, function};

fn code<T>(result: Result<T, DriverError>) -> CUresult {
    match result {
        Ok(_) => CUresult::CUDA_SUCCESS,
        Err(e) => e.0,
    }
}

fn config(grid: u32, block: u32, shared: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (grid, 1, 1), block_dim: (block, 1, 1), shared_mem_bytes: shared }
}

#[test]
fn launches_beyond_the_limits_are_refused() -> Result<()> {
    let Some(_session) = Session::begin("limits of launches")? else { return Ok(()) };
    let context = context()?;
    let stream = context.new_stream()?;
    let reverse = function(&context, "selftest_reverse")?;
    let bounded = function(&context, "selftest_bounded")?;
    let mut x = stream.clone_htod(&(0..50u8).map(f32::from).collect::<Vec<_>>())?;
    let mut launch = |config| {
        let n = 50i32;
        let mut launch = stream.launch_builder(&reverse);
        launch.arg(&mut x).arg(&n);
        // SAFETY: the arguments are those of selftest_reverse.
        code(unsafe { launch.launch(config) })
    };
    assert_eq!(launch(config(1, 1025, 200)), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(launch(config(0, 32, 200)), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(launch(config(1, 32, 50_000)), CUresult::CUDA_ERROR_INVALID_VALUE);
    let mut tall = config(1, 32, 200);
    tall.grid_dim.1 = 65_536;
    assert_eq!(launch(tall), CUresult::CUDA_ERROR_INVALID_VALUE);
    let more = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    assert_eq!(code(reverse.set_attribute(more, 228 << 10)), CUresult::CUDA_ERROR_INVALID_VALUE);
    reverse.set_attribute(more, 50_000)?;
    assert_eq!(launch(config(1, 32, 50_000)), CUresult::CUDA_SUCCESS);
    assert_eq!(stream.clone_dtoh(&x)?[0], 49.0);

    let mut out = stream.alloc_zeros::<i32>(65)?;
    let mut launch = stream.launch_builder(&bounded);
    launch.arg(&mut out);
    // SAFETY: the arguments are those of selftest_bounded.
    let refused = code(unsafe { launch.launch(config(1, 65, 0)) });
    assert_eq!(refused, CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
    Ok(())
}

#[test]
fn modules_of_others_and_for_others_are_refused() -> Result<()> {
    let Some(session) = Session::begin("modules")? else { return Ok(()) };
    let context = context()?;
    let foreign = context.load_module(Ptx::from_src(".version 8.0\n.target sm_80\n"));
    assert_eq!(code(foreign), CUresult::CUDA_ERROR_INVALID_IMAGE);
    let compiled =
        |arch| compile_ptx_with_opts(SELFTEST, CompileOptions { arch: Some(arch), ..Default::default() });
    assert_eq!(code(context.load_module(compiled("sm_100")?)), CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
    let module = context.load_module(compiled("compute_80")?)?;
    assert_eq!(code(module.load_function("selftest_nothing")), CUresult::CUDA_ERROR_NOT_FOUND);
    assert!(compiled("sm_91").is_err(), "there is no such architecture");
    let broken = format!("{}\n", "#error on purpose");
    let error = compile_ptx_with_opts(broken, CompileOptions::default()).err().map(|e| format!("{e:?}"));
    assert!(error.is_some_and(|e| e.contains("on purpose")), "the log is lost");
    let lonely = compile_ptx_with_opts("#include \"nowhere.cuh\"\n", CompileOptions::default());
    assert!(format!("{lonely:?}").contains("nowhere.cuh"));
    drop(session);
    Ok(())
}

#[test]
fn copies_out_of_bounds_are_refused_and_memory_has_an_end() -> Result<()> {
    let Some(session) = Session::begin("bounds")? else { return Ok(()) };
    session.fake.set("MEMORY", "1000000").map_err(anyhow::Error::msg)?;
    let context = context()?;
    context.bind_to_thread()?;
    let stream = context.new_stream()?;
    let a = stream.alloc_zeros::<u8>(100)?;
    let s = stream.cu_stream();
    let (at, _guard) = cudarc::driver::DevicePtr::device_ptr(&a, &stream);
    let mut host = [0u8; 101];
    // SAFETY: what is out of bounds is refused, which is what this test asks for.
    unsafe {
        assert_eq!(code(result::memcpy_htod_async(at, &host, s)), CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(code(result::memcpy_dtoh_async(&mut host, at, s)), CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(code(result::memset_d8_async(at + 50, 0, 51, s)), CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(code(result::memcpy_dtoh_async(&mut host[..100], at, s)), CUresult::CUDA_SUCCESS);
    }
    let before = session.fake.used(0);
    // SAFETY: not used.
    let large = unsafe { stream.alloc::<u8>(1_000_000) };
    assert_eq!(code(large), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    assert_eq!(session.fake.used(0), before);
    // Freed in stream order, and counted again once it has run.
    for _ in 0..5 {
        // SAFETY: not used.
        drop(unsafe { stream.alloc::<u8>(600_000) }?);
    }
    Ok(())
}

#[test]
fn a_kernel_with_a_bad_pointer_breaks_the_device() -> Result<()> {
    let Some(session) = Session::begin("wild pointers")? else { return Ok(()) };
    let context = context()?;
    let stream = context.new_stream()?;
    let overrun = function(&context, "selftest_overrun")?;
    let mut y = stream.alloc_zeros::<f32>(64)?;
    let run = |n: i32, y: u64| -> Result<CUresult> {
        let mut launch = stream.launch_builder(&overrun);
        launch.arg(&y).arg(&n);
        // SAFETY: out of bounds on purpose; the guards of the fake's memory are wider than that.
        unsafe { launch.launch(config(1, 32, 0)) }?;
        Ok(code(stream.synchronize()))
    };
    let at = cudarc::driver::DevicePtrMut::device_ptr_mut(&mut y, &stream).0;
    assert_eq!(run(64, at)?, CUresult::CUDA_SUCCESS);
    assert_eq!(run(65, at)?, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert!(
        session.fake.last_error().contains("selftest_overrun wrote after"),
        "{}",
        session.fake.last_error()
    );
    assert_eq!(code(stream.synchronize()), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, "it stays");
    session.fake.mend();

    let host = [0f32; 64];
    assert_eq!(run(1, host.as_ptr() as u64)?, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert!(session.fake.last_error().contains("no memory of a device"), "{}", session.fake.last_error());
    session.fake.mend();

    drop(y);
    stream.synchronize()?;
    assert_eq!(run(1, at)?, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert!(session.fake.last_error().contains("freed"), "{}", session.fake.last_error());
    Ok(())
}

#[test]
fn a_kernel_that_fails_is_told_by_the_next_wait_and_stays() -> Result<()> {
    let Some(session) = Session::begin("failing kernels")? else { return Ok(()) };
    let context = context()?;
    let stream = context.new_stream()?;
    let divergent = function(&context, "selftest_divergent")?;
    let mut out = stream.alloc_zeros::<i32>(64)?;
    let mut launch = stream.launch_builder(&divergent);
    launch.arg(&mut out);
    // SAFETY: the arguments are those of selftest_divergent.
    unsafe { launch.launch(config(1, 64, 0)) }?;
    assert_eq!(code(stream.synchronize()), CUresult::CUDA_ERROR_LAUNCH_FAILED);
    assert!(session.fake.last_error().contains("selftest_divergent"), "{}", session.fake.last_error());
    assert_eq!(code(stream.alloc_zeros::<u8>(4)), CUresult::CUDA_ERROR_LAUNCH_FAILED);
    session.fake.mend();
    Ok(())
}

#[test]
fn a_fault_comes_at_its_call_of_its_kernel() -> Result<()> {
    let Some(session) = Session::begin("faults")? else { return Ok(()) };
    session
        .fake
        .set("FAIL", "cuLaunchKernel:selftest_scale:2:700,cuMemHostAlloc:1:2")
        .map_err(anyhow::Error::msg)?;
    assert!(session.fake.set("FAIL", "cuLaunchKernel:x").is_err());
    session
        .fake
        .set("FAIL", "cuLaunchKernel:selftest_scale:2:700,cuMemHostAlloc:1:2")
        .map_err(anyhow::Error::msg)?;
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    // SAFETY: not used.
    let pinned = unsafe { context.alloc_pinned::<u8>(8) };
    assert_eq!(code(pinned), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    let scale = function(&context, "selftest_scale")?;
    let x = stream.clone_htod(&[1f32; 8])?;
    let mut y = stream.alloc_zeros::<f32>(8)?;
    let mut codes = Vec::new();
    for _ in 0..3 {
        let (a, n) = (2f32, 8i64);
        let mut launch = stream.launch_builder(&scale);
        launch.arg(&mut y).arg(&x).arg(&a).arg(&n);
        // SAFETY: the arguments are those of selftest_scale.
        codes.push(code(unsafe { launch.launch(LaunchConfig::for_num_elems(8)) }));
    }
    let lost = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
    assert_eq!(codes, [CUresult::CUDA_SUCCESS, lost, lost]);
    session.fake.mend();
    Ok(())
}

use paraft_fake_cuda::{Arg, Schedule, launch};

fn on<'a>(args: Vec<Arg<'a>>, kernel: &str, blocks: u32, threads: u32) -> Result<(), String> {
    launch(kernel, [blocks, 1, 1], [threads, 1, 1], 0, args, Schedule::Random(3))
}

fn sums(barriers: i32, schedule: Schedule) -> Vec<i32> {
    let mut x: Vec<i32> = (0..64 * 5).collect();
    let mut out = vec![-1; 5];
    let args = vec![Arg::slice(&mut x), Arg::slice(&mut out), Arg::I32(barriers)];
    launch("selftest_sum", [5, 1, 1], [64, 1, 1], 0, args, schedule).expect("runs");
    out
}

#[test]
fn a_kernel_without_a_barrier_sums_wrongly_on_some_schedule() {
    if paraft_fake_cuda::skipped("missing barriers") {
        return;
    }
    let right: Vec<i32> = (0..5).map(|b| (b * 64..(b + 1) * 64).sum()).collect();
    for schedule in Schedule::ALL {
        assert_eq!(sums(3, schedule), right, "{schedule:?}");
    }
    for missing in [1, 2] {
        let wrong = Schedule::ALL.iter().filter(|s| sums(missing, **s) != right).count();
        assert!(wrong > 0, "without barrier {missing}");
    }
}

#[test]
fn what_a_kernel_does_wrong_is_told_with_its_name() {
    if paraft_fake_cuda::skipped("wrong kernels") {
        return;
    }
    let mut out = vec![0i32; 64];
    let refused = |kernel: &str, threads: u32, out: &mut Vec<i32>| {
        on(vec![Arg::slice(out)], kernel, 1, threads).expect_err("an error")
    };
    let text = refused("selftest_divergent", 64, &mut out);
    assert!(text.contains("selftest_divergent") && text.contains("barrier divergence"), "{text}");
    assert!(text.contains("63 threads") && text.contains("1 have gone"), "{text}");
    let text = refused("selftest_two_barriers", 64, &mut out);
    assert!(text.contains("of lines"), "{text}");
    let text = refused("selftest_bounded", 65, &mut out);
    assert!(text.contains("__launch_bounds__"), "{text}");
    assert!(on(vec![Arg::slice(&mut out)], "selftest_bounded", 1, 64).is_ok());
    let text = refused("selftest_unheard_of", 64, &mut out);
    assert!(text.contains("selftest_unheard_of"), "{text}");
    let text = refused("selftest_sum", 64, &mut out);
    assert!(text.contains("takes"), "{text}");
}

#[test]
fn writes_beyond_a_buffer_and_beyond_shared_memory_are_told() {
    if paraft_fake_cuda::skipped("overruns") {
        return;
    }
    let mut y = vec![0f32; 10];
    assert_eq!(on(vec![Arg::slice(&mut y), Arg::I32(10)], "selftest_overrun", 1, 32), Ok(()));
    assert_eq!(y, vec![1.0; 10]);
    let text = on(vec![Arg::slice(&mut y), Arg::I32(11)], "selftest_overrun", 1, 32).expect_err("an overrun");
    assert!(text.contains("selftest_overrun") && text.contains("byte 40"), "{text}");

    let mut x: Vec<f32> = (0..33u8).map(f32::from).collect();
    let reverse = |x: &mut Vec<f32>, shared| {
        launch(
            "selftest_reverse",
            [1, 1, 1],
            [32, 1, 1],
            shared,
            vec![Arg::slice(x), Arg::I32(33)],
            Schedule::Descending,
        )
    };
    assert_eq!(reverse(&mut x, 33 * 4), Ok(()));
    assert_eq!(x[0], 32.0);
    if paraft_fake_cuda::sanitized() {
        return;
    }
    let text = reverse(&mut x, 32 * 4).expect_err("an overrun");
    assert!(text.contains("dynamic shared memory"), "{text}");
}

#[test]
fn what_was_never_written_is_nan_and_not_zero() {
    if paraft_fake_cuda::skipped("poison") {
        return;
    }
    // Twice: the second block would see what the first one left.
    for _ in 0..2 {
        let mut out = vec![0f32; 64];
        assert_eq!(on(vec![Arg::slice(&mut out)], "selftest_uninitialised", 2, 64), Ok(()));
        assert!(out[..32].iter().all(|v| *v == 1.0) && out[32..].iter().all(|v| v.is_nan()), "{out:?}");
    }
    let mut lanes = vec![0i32; 32];
    assert_eq!(on(vec![Arg::slice(&mut lanes), Arg::I32(4)], "selftest_shuffle", 1, 20), Ok(()));
    assert_eq!(lanes[0], 40);
    assert_eq!(lanes[15], 190);
    assert_eq!(lanes[16..20], [-1; 4], "of lanes that are not there");
}

#[test]
fn every_kernel_of_the_worker_is_there() {
    if paraft_fake_cuda::skipped("the list of kernels") {
        return;
    }
    let kernels = paraft_fake_cuda::kernels().expect("loads");
    let ours = kernels.iter().filter(|k| !k.name.starts_with("selftest_")).count();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../worker/compute/kernels");
    let files = std::fs::read_dir(folder)
        .map_or(0, |d| d.flatten().filter(|f| f.path().extension().is_some_and(|e| e == "cu")).count());
    assert!(ours >= files, "{ours} kernels of {files} files");
}

/// In a process of its own, where the time that a kernel may take is short.
#[test]
#[ignore = "started by the next test"]
fn endless() {
    let mut never = vec![0i32; 1];
    let text = on(vec![Arg::slice(&mut never)], "selftest_endless", 1, 64).expect_err("an error");
    assert!(text.contains("selftest_endless") && text.contains("did not end within 0.2 s"), "{text}");
    // The next one runs on sound stacks.
    assert_eq!(
        sums(3, Schedule::Random(1)),
        (0..5).map(|b| (b * 64..(b + 1) * 64).sum()).collect::<Vec<i32>>()
    );
}

#[test]
fn a_kernel_that_does_not_end_is_an_error_with_its_name() {
    if paraft_fake_cuda::skipped("an endless kernel") {
        return;
    }
    let mut command = std::process::Command::new(std::env::current_exe().expect("we run"));
    command.args(["kernels::endless", "--exact", "--ignored"]).env("PARAFT_FAKE_CUDA_KERNEL_SECONDS", "0.2");
    let out = command.output().expect("starts");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
}

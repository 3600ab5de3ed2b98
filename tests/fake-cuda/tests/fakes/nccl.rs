use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use cudarc::nccl::result as nccl;
use cudarc::nccl::sys::{self, ncclDataType_t as Type, ncclRedOp_t as Op, ncclResult_t as Code};
use half::{bf16, f16};

use crate::Session;

/// A rank with its stream.
struct Rank {
    comm: sys::ncclComm_t,
    stream: Arc<CudaStream>,
    rank: usize,
}

fn ok(code: Code) -> Result<()> {
    if code == Code::ncclSuccess || code == Code::ncclInProgress { Ok(()) } else { bail!("{code:?}") }
}

fn context_of(device: usize) -> Result<Arc<CudaContext>> {
    let context = CudaContext::new(device)?;
    // SAFETY: one stream each.
    unsafe { context.disable_event_tracking() };
    Ok(context)
}

fn id() -> Result<sys::ncclUniqueId> {
    nccl::get_uniqueid().map_err(|e| anyhow::anyhow!("{:?}", e.0))
}

impl Rank {
    fn init(device: usize, id: sys::ncclUniqueId, rank: usize, blocking: bool) -> Result<Rank> {
        let context = context_of(device)?;
        context.bind_to_thread()?;
        // SAFETY: zeroes are a value of this struct of numbers and pointers.
        let mut config: sys::ncclConfig_t = unsafe { std::mem::zeroed() };
        config.size = size_of::<sys::ncclConfig_t>();
        config.magic = 0xcafe_beef;
        config.version = 23007;
        config.blocking = i32::from(blocking);
        let mut comm = std::ptr::null_mut();
        // SAFETY: `config` lives through the call and is filled as NCCL asks.
        ok(unsafe { sys::ncclCommInitRankConfig(&mut comm, 2, id, rank as i32, &mut config) })?;
        let made = Rank { comm, stream: context.new_stream()?, rank };
        while made.state()? == Code::ncclInProgress {
            std::thread::yield_now();
        }
        ensure!(made.state()? == Code::ncclSuccess, "{:?}", made.state()?);
        Ok(made)
    }

    fn state(&self) -> Result<Code> {
        let mut code = Code::ncclSuccess;
        // SAFETY: a communicator that was neither destroyed nor aborted.
        ok(unsafe { sys::ncclCommGetAsyncError(self.comm, &mut code) })?;
        Ok(code)
    }

    /// A communicator that does not block may be used again when it is no longer in progress.
    fn begun(&self, code: Code) -> Result<()> {
        ok(code)?;
        while self.state()? == Code::ncclInProgress {
            std::thread::yield_now();
        }
        Ok(())
    }

    fn all_reduce<T>(&self, x: &mut CudaSlice<T>, kind: Type, op: Op) -> Result<()> {
        let n = x.len();
        let at = x.device_ptr_mut(&self.stream).0;
        // SAFETY: the buffer has `n` elements of this type and outlives the stream's work.
        self.begun(unsafe {
            sys::ncclAllReduce(at as _, at as _, n, kind, op, self.comm, self.stream.cu_stream().cast())
        })
    }

    fn destroy(self) -> Result<()> {
        self.stream.synchronize()?;
        // SAFETY: the last use.
        ok(unsafe { sys::ncclCommDestroy(self.comm) })
    }
}

/// All collectives as this rank of two; every rank runs the same.
fn collectives(r: &Rank) -> Result<()> {
    const N: usize = 1001;
    let (s, me) = (&r.stream, r.rank);
    let raw = s.cu_stream().cast();
    let values = |rank: usize| (0..2 * N).map(move |i| (i % 97) as f32 + 0.5 * rank as f32);
    let both: Vec<(f32, f32)> = values(0).zip(values(1)).collect();

    for (op, f) in [
        (Op::ncclSum, (|a, b| a + b) as fn(f32, f32) -> f32),
        (Op::ncclAvg, |a, b| (a + b) / 2.0),
        (Op::ncclMax, f32::max),
        (Op::ncclMin, f32::min),
    ] {
        let mut x = s.clone_htod(&values(me).collect::<Vec<_>>())?;
        r.all_reduce(&mut x, Type::ncclFloat32, op)?;
        let expected: Vec<f32> = both.iter().map(|(a, b)| f(*a, *b)).collect();
        assert_eq!(s.clone_dtoh(&x)?, expected, "{op:?}");
    }
    let exact: Vec<f32> = both.iter().map(|(a, b)| a + b).collect();
    let mut x = s.clone_htod(&values(me).map(|v| bf16::from_f32(v).to_bits()).collect::<Vec<u16>>())?;
    r.all_reduce(&mut x, Type::ncclBfloat16, Op::ncclSum)?;
    let rounded =
        |a: f32, b: f32| bf16::from_f32(bf16::from_f32(a).to_f32() + bf16::from_f32(b).to_f32()).to_bits();
    assert_eq!(s.clone_dtoh(&x)?, both.iter().map(|(a, b)| rounded(*a, *b)).collect::<Vec<_>>());
    let mut x = s.clone_htod(&values(me).map(|v| f16::from_f32(v).to_bits()).collect::<Vec<u16>>())?;
    r.all_reduce(&mut x, Type::ncclFloat16, Op::ncclSum)?;
    assert_eq!(s.clone_dtoh(&x)?, exact.iter().map(|v| f16::from_f32(*v).to_bits()).collect::<Vec<_>>());
    let mut x = s.clone_htod(&values(me).map(f64::from).collect::<Vec<f64>>())?;
    r.all_reduce(&mut x, Type::ncclFloat64, Op::ncclSum)?;
    assert_eq!(s.clone_dtoh(&x)?, exact.iter().map(|v| f64::from(*v)).collect::<Vec<_>>());
    let mut x = s.clone_htod(&[i64::MAX - 1, me as i64])?;
    r.all_reduce(&mut x, Type::ncclInt64, Op::ncclMax)?;
    assert_eq!(s.clone_dtoh(&x)?, [i64::MAX - 1, 1]);

    let x = s.clone_htod(&values(me).collect::<Vec<_>>())?;
    let mut half = s.alloc_zeros::<f32>(N)?;
    let (from, to) = (x.device_ptr(s).0, half.device_ptr_mut(s).0);
    // SAFETY: `x` has two parts of N, `half` has one.
    r.begun(unsafe {
        sys::ncclReduceScatter(from as _, to as _, N, Type::ncclFloat32, Op::ncclSum, r.comm, raw)
    })?;
    assert_eq!(s.clone_dtoh(&half)?, exact[me * N..(me + 1) * N]);
    let mut whole = s.alloc_zeros::<f32>(2 * N)?;
    let (from, to) = (half.device_ptr(s).0, whole.device_ptr_mut(s).0);
    // SAFETY: as above, the other way round.
    r.begun(unsafe { sys::ncclAllGather(from as _, to as _, N, Type::ncclFloat32, r.comm, raw) })?;
    assert_eq!(s.clone_dtoh(&whole)?, exact);

    let mut x = s.clone_htod(&vec![me as u8 + 5; 10])?;
    let at = x.device_ptr_mut(s).0;
    // SAFETY: ten bytes.
    r.begun(unsafe { sys::ncclBroadcast(at as _, at as _, 10, Type::ncclUint8, 1, r.comm, raw) })?;
    assert_eq!(s.clone_dtoh(&x)?, [6; 10]);
    let mut x = s.clone_htod(&[me as i32 + 1; 4])?;
    let at = x.device_ptr_mut(s).0;
    // SAFETY: four numbers.
    r.begun(unsafe { sys::ncclReduce(at as _, at as _, 4, Type::ncclInt32, Op::ncclSum, 0, r.comm, raw) })?;
    assert_eq!(s.clone_dtoh(&x)?, if me == 0 { [3; 4] } else { [2; 4] });

    let x = s.clone_htod(&[10 + me as i32])?;
    let mut y = s.alloc_zeros::<i32>(1)?;
    let (from, to) = (x.device_ptr(s).0, y.device_ptr_mut(s).0);
    // SAFETY: one number each.
    unsafe {
        ok(sys::ncclGroupStart())?;
        ok(sys::ncclSend(from as _, 1, Type::ncclInt32, 1 - me as i32, r.comm, raw))?;
        ok(sys::ncclRecv(to as _, 1, Type::ncclInt32, 1 - me as i32, r.comm, raw))?;
        r.begun(sys::ncclGroupEnd())?;
    }
    assert_eq!(s.clone_dtoh(&y)?, [11 - me as i32]);
    Ok(())
}

const ID: &str = "PARAFT_TEST_NCCL_ID";
const STAYS: &str = "PARAFT_TEST_NCCL_STAYS";

/// Rank 1 of the tests below, in a process of its own.
#[test]
#[ignore = "started by the other tests"]
fn rank_one() -> Result<()> {
    let hex = std::env::var(ID).context("started by another test")?;
    // cudarc finds the libraries by LD_LIBRARY_PATH here: nothing is installed.
    let mut id = id()?;
    for (to, byte) in id.internal.iter_mut().zip(hex.as_bytes().chunks(2)) {
        *to = u8::from_str_radix(std::str::from_utf8(byte)?, 16)? as std::ffi::c_char;
    }
    let rank = Rank::init(1, id, 1, true)?;
    if std::env::var_os(STAYS).is_some() {
        println!("\nready");
        loop {
            std::thread::park();
        }
    }
    collectives(&rank)?;
    rank.destroy()
}

fn start_rank_one(id: &sys::ncclUniqueId, stays: bool) -> Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["nccl::rank_one", "--exact", "--ignored", "--nocapture"]);
    let hex: String = id.internal.iter().map(|b| format!("{:02x}", *b as u8)).collect();
    command.env(ID, hex).env("PARAFT_FAKE_CUDA_DEVICES", "2").env("PARAFT_FAKE_CUDA_SEED", "9");
    command.env("LD_LIBRARY_PATH", paraft_fake_cuda::library_dir().map_err(anyhow::Error::msg)?);
    if stays {
        command.env(STAYS, "1").stdout(Stdio::piped());
    }
    Ok(command.spawn()?)
}

#[test]
fn two_processes_agree_on_every_collective() -> Result<()> {
    let Some(session) = Session::begin("collectives")? else { return Ok(()) };
    session.fake.set("BACKGROUND", "1").map_err(anyhow::Error::msg)?;
    let id = id()?;
    let mut child = start_rank_one(&id, false)?;
    let watch = std::thread::spawn(move || {
        let ended = child.wait().expect("a child of ours");
        if !ended.success() {
            // Without it this rank would wait for ever, as it should.
            eprintln!("rank 1: {ended}");
            std::process::exit(101);
        }
    });
    let rank = Rank::init(0, id, 0, false)?;
    collectives(&rank)?;
    rank.destroy()?;
    watch.join().expect("no panic");
    Ok(())
}

#[test]
fn a_killed_rank_leaves_the_others_waiting_until_they_abort() -> Result<()> {
    let Some(_session) = Session::begin("a killed rank")? else { return Ok(()) };
    let id = id()?;
    let mut child = start_rank_one(&id, true)?;
    let rank = Rank::init(0, id, 0, false)?;
    let lines = BufReader::new(child.stdout.take().context("piped")?).lines();
    ensure!(lines.map_while(Result::ok).any(|l| l == "ready"), "rank 1 is not there");
    let mut x = rank.stream.clone_htod(&[1f32; 8])?;
    rank.all_reduce(&mut x, Type::ncclFloat32, Op::ncclSum)?;
    let event = rank.stream.record_event(None)?;
    assert!((0..200).all(|_| !event.is_complete()), "nobody else has asked for it");
    assert_ne!(rank.state()?, Code::ncclRemoteError);
    child.kill()?;
    child.wait()?;
    while rank.state()? != Code::ncclRemoteError {
        std::thread::yield_now();
    }
    assert!((0..200).all(|_| !event.is_complete()), "it still hangs");
    let mut y = rank.stream.alloc_zeros::<f32>(8)?;
    assert!(rank.all_reduce(&mut y, Type::ncclFloat32, Op::ncclSum).is_err(), "a new one is refused");
    // SAFETY: the last use.
    ok(unsafe { sys::ncclCommAbort(rank.comm) })?;
    rank.stream.synchronize()?;
    assert!(
        rank.stream.clone_dtoh(&x)?.iter().all(|v| v.is_nan()),
        "what was cut short is not taken for a result"
    );
    Ok(())
}

#[test]
fn two_ranks_on_one_device_are_refused_and_so_is_disagreement() -> Result<()> {
    let Some(session) = Session::begin("wrong use")? else { return Ok(()) };
    session.fake.set("BACKGROUND", "1").map_err(anyhow::Error::msg)?;
    let pair = |devices: [usize; 2]| -> Result<Vec<Result<Rank>>> {
        let id = id()?;
        let ranks = [0, 1]
            .map(|rank| std::thread::spawn(move || Rank::init(devices[rank], id, rank, true).map(Send)));
        Ok(ranks.into_iter().map(|t| t.join().expect("no panic").map(|r| r.0)).collect())
    };
    for refused in pair([0, 0])? {
        assert!(refused.is_err_and(|e| e.to_string().contains("ncclInvalidUsage")));
    }
    let ranks = pair([0, 1])?.into_iter().collect::<Result<Vec<_>>>()?;
    let mut buffers = Vec::new();
    for (rank, n) in ranks.iter().zip([4, 5]) {
        let mut x = rank.stream.alloc_zeros::<f32>(n)?;
        rank.all_reduce(&mut x, Type::ncclFloat32, Op::ncclSum)?;
        buffers.push(x);
    }
    for rank in &ranks {
        while rank.state()? != Code::ncclInvalidUsage {
            rank.stream.context().bind_to_thread()?;
            std::thread::yield_now();
        }
    }
    for rank in ranks {
        // SAFETY: the last use.
        ok(unsafe { sys::ncclCommAbort(rank.comm) })?;
        rank.stream.synchronize()?;
    }
    Ok(())
}

/// A rank may be used by any one thread at a time.
struct Send(Rank);
// SAFETY: as NCCL allows.
unsafe impl std::marker::Send for Send {}

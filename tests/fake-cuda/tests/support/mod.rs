//! What the tests of the kernels share: launches under every schedule, storage types, fresh inputs,
//! tolerances.
#![allow(dead_code, reason = "each test file uses its part")]

pub mod storage;

use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::{Once, OnceLock};
#[allow(unused_imports, reason = "each test file uses its part")]
pub use storage::{Storage, Tf32, Type, bf16, f16};

#[repr(C)]
struct Dim {
    x: u32,
    y: u32,
    z: u32,
}

type EmuLaunch =
    unsafe extern "C" fn(*const c_char, Dim, Dim, usize, *mut *mut c_void, c_int, u64) -> *const c_char;
type EmuArgs = unsafe extern "C" fn(*const c_char, *mut usize, c_int) -> c_int;

fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let folder = paraft_fake_cuda::library_dir().expect("skipped() was asked");
        // SAFETY: its constructors register kernels and touch nothing of ours.
        unsafe { Library::new(folder.join("libparaft_fake_cuda.so")) }.expect("the library loads")
    })
}

/// Whether this test cannot run here, which is then said.
pub fn skipped() -> bool {
    paraft_fake_cuda::skipped(std::thread::current().name().unwrap_or("a test of kernels"))
}

/// The order in which the threads of a block run.
#[derive(Clone, Copy, Debug)]
pub struct Schedule(pub i32, pub u64);

/// An argument's bytes as the kernel takes them.
pub struct Arg {
    bytes: [u8; 8],
    size: usize,
}

/// What can be given to a kernel.
pub trait IntoArg {
    /// As it is given.
    fn arg(self) -> Arg;
}

macro_rules! scalar {
    ($($t:ty),*) => {$(
        impl IntoArg for $t {
            fn arg(self) -> Arg {
                let mut bytes = [0; 8];
                let value = self.to_ne_bytes();
                bytes[..value.len()].copy_from_slice(&value);
                Arg { bytes, size: value.len() }
            }
        }
    )*};
}
scalar!(i32, u32, i64, u64, f32, f64);

impl<T> IntoArg for &[T] {
    fn arg(self) -> Arg {
        (self.as_ptr() as u64).arg()
    }
}
impl<T> IntoArg for &mut [T] {
    fn arg(self) -> Arg {
        (self.as_mut_ptr() as u64).arg()
    }
}
impl<T> IntoArg for &Vec<T> {
    fn arg(self) -> Arg {
        self.as_slice().arg()
    }
}
impl<T> IntoArg for &mut Vec<T> {
    fn arg(self) -> Arg {
        self.as_mut_slice().arg()
    }
}

/// A null pointer.
pub struct Null;
impl IntoArg for Null {
    fn arg(self) -> Arg {
        0u64.arg()
    }
}
impl<T: IntoArg> IntoArg for Option<T> {
    fn arg(self) -> Arg {
        self.map_or(0u64.arg(), IntoArg::arg)
    }
}

/// `args![a, b, c]`: the arguments of a launch.
#[macro_export]
macro_rules! args {
    ($($a:expr),* $(,)?) => { &[$($crate::support::IntoArg::arg($a)),*] };
}

/// Runs a kernel to its end; fails the test where it fails.
pub fn launch(
    s: Schedule,
    kernel: &str,
    grid: (usize, usize, usize),
    block: usize,
    shared: usize,
    args: &[Arg],
) {
    let name = CString::new(kernel).expect("no nul");
    // SAFETY: the signatures are those of emu.h; the arguments' number and sizes are the kernel's; that
    // pointers have the memory which the kernel uses is the test's to see to, under AddressSanitizer too.
    let text = unsafe {
        let sizes_of = library().get::<EmuArgs>(b"emu_kernel_args").expect("emu_kernel_args");
        let mut sizes = [0usize; 64];
        let count = sizes_of(name.as_ptr(), sizes.as_mut_ptr(), 64);
        let given: Vec<usize> = args.iter().map(|a| a.size).collect();
        assert!(count >= 0, "no kernel is called {kernel}");
        assert_eq!(given, sizes[..count as usize], "{kernel}: sizes of the arguments");
        let run = library().get::<EmuLaunch>(b"emu_launch").expect("emu_launch");
        let mut pointers: Vec<*mut c_void> = args.iter().map(|a| a.bytes.as_ptr() as *mut c_void).collect();
        let grid = Dim { x: grid.0 as u32, y: grid.1 as u32, z: grid.2 as u32 };
        let block = Dim { x: block as u32, y: 1, z: 1 };
        let error = run(name.as_ptr(), grid, block, shared, pointers.as_mut_ptr(), s.0, s.1);
        (!error.is_null()).then(|| CStr::from_ptr(error).to_string_lossy().into_owned())
    };
    assert_eq!(text, None, "{kernel}");
}

/// The README's geometry of a flat kernel.
pub fn flat(n: usize) -> ((usize, usize, usize), usize) {
    ((n.div_ceil(2048).clamp(1, 1 << 20), 1, 1), 256)
}

pub fn launch_flat(s: Schedule, kernel: &str, n: usize, args: &[Arg]) {
    let (grid, block) = flat(n);
    launch(s, kernel, grid, block, 0, args);
}

/// The README's RED(n).
pub fn red(n: usize) -> usize {
    n.div_ceil(8192).clamp(1, 1024)
}

/// The README's CHUNK(rows).
pub fn chunk(rows: usize) -> usize {
    rows.div_ceil(512).max(64)
}

/// All that a body computed, for comparison bit by bit.
#[derive(Default)]
pub struct Outputs(pub Vec<Vec<f64>>);

impl Outputs {
    pub fn add<T: Storage>(&mut self, values: &[T]) {
        self.0.push(values.iter().map(|v| v.wide()).collect());
    }
}

macro_rules! outputs {
    ($($v:expr),* $(,)?) => {{
        #[allow(unused_mut)]
        let mut o = $crate::support::Outputs::default();
        $( o.add(&$v[..]); )*
        o
    }};
}
pub(crate) use outputs;

/// Runs the body under every schedule, demands the same bits, and returns what was computed.
pub fn in_every_schedule(what: &str, body: impl Fn(Schedule) -> Outputs) -> Vec<Vec<f64>> {
    let first = body(Schedule(0, 0)).0;
    for s in [Schedule(1, 0), Schedule(2, seed())] {
        let other = body(s).0;
        assert_eq!(first.len(), other.len());
        for (o, (a, b)) in first.iter().zip(&other).enumerate() {
            let differ = a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits());
            if let Some(i) = differ {
                panic!("{what}: output {o} at {i} is {} in ascending order and {} in {s:?}", a[i], b[i]);
            }
        }
    }
    first
}

/// Of this run: from PARAFT_TEST_SEED, or fresh.
pub fn seed() -> u64 {
    static SEED: OnceLock<u64> = OnceLock::new();
    static SAID: Once = Once::new();
    let seed = *SEED.get_or_init(|| match std::env::var("PARAFT_TEST_SEED") {
        Ok(text) => text.parse().expect("PARAFT_TEST_SEED is a number"),
        Err(_) => std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(1, |d| d.as_nanos() as u64),
    });
    SAID.call_once(|| println!("PARAFT_TEST_SEED={seed}"));
    seed
}

/// SplitMix64.
pub struct Random(u64);

impl Random {
    pub fn new(stream: u64) -> Self {
        Self(seed() ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// From -1 to 1.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Values of about this size.
    pub fn values<T: Storage>(&mut self, n: usize, size: f32) -> Vec<T> {
        (0..n).map(|_| T::narrow(self.unit() * size)).collect()
    }
}

/// What nobody wrote.
pub fn poisoned<T: Storage>(n: usize) -> Vec<T> {
    vec![T::narrow(f32::NAN); n]
}

pub fn wide<T: Storage>(values: &[T]) -> Vec<f64> {
    values.iter().map(|v| v.wide()).collect()
}

/// `|got - want| <= absolute + relative * |want|`, or both NaN.
#[track_caller]
pub fn close(what: &str, got: &[f64], want: &[f64], relative: f64, absolute: f64) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let near = (g - w).abs() <= absolute + relative * w.abs();
        assert!(
            near || g == w || (g.is_nan() && w.is_nan()),
            "{what} at {i}: {g}, not {w} (seed {})",
            seed()
        );
    }
}

//! Single launches of kernels on the CPU, for tests of their numerics.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use libloading::os::unix::Library;

use crate::install;

/// The order in which the threads of a block run between two barriers, and the blocks of a grid. A right kernel gives the
/// same bits under all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// By number.
    Ascending,
    /// By number, the last first.
    Descending,
    /// A new order at each barrier, from this seed.
    Random(u64),
}

impl Schedule {
    /// One of each kind.
    pub const ALL: [Schedule; 3] = [Schedule::Ascending, Schedule::Descending, Schedule::Random(0x5eed)];
}

/// Types of elements in a kernel's buffers.
pub trait Element: Copy + sealed::Plain {}
mod sealed {
    /// Any bits are a value.
    pub trait Plain {}
}
macro_rules! elements {
    ($($t:ty),*) => { $(impl sealed::Plain for $t {} impl Element for $t {})* };
}
elements!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

/// An argument of a kernel, in the order of its signature.
pub enum Arg<'a> {
    /// A buffer. It is copied to guarded memory of exactly its length, and back after the launch.
    Buffer(&'a mut [u8]),
    /// A null pointer.
    Null,
    /// `int`.
    I32(i32),
    /// `unsigned`.
    U32(u32),
    /// `long long`.
    I64(i64),
    /// `unsigned long long`.
    U64(u64),
    /// `float`.
    F32(f32),
    /// `double`.
    F64(f64),
}

impl<'a> Arg<'a> {
    /// A buffer of elements that the kernel reads or writes.
    pub fn slice<T: Element>(values: &'a mut [T]) -> Self {
        let bytes = std::mem::size_of_val(values);
        // SAFETY: any bits are a value of an Element, and the slice is borrowed for as long as the bytes are.
        Arg::Buffer(unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), bytes) })
    }

    fn scalar(&self) -> Vec<u8> {
        match self {
            Arg::Buffer(_) => Vec::new(),
            Arg::Null => vec![0; 8],
            Arg::I32(v) => v.to_ne_bytes().to_vec(),
            Arg::U32(v) => v.to_ne_bytes().to_vec(),
            Arg::I64(v) => v.to_ne_bytes().to_vec(),
            Arg::U64(v) => v.to_ne_bytes().to_vec(),
            Arg::F32(v) => v.to_ne_bytes().to_vec(),
            Arg::F64(v) => v.to_ne_bytes().to_vec(),
        }
    }

    fn is_pointer(&self) -> bool {
        matches!(self, Arg::Buffer(_) | Arg::Null)
    }
}

impl From<i32> for Arg<'_> {
    fn from(v: i32) -> Self {
        Arg::I32(v)
    }
}
impl From<u32> for Arg<'_> {
    fn from(v: u32) -> Self {
        Arg::U32(v)
    }
}
impl From<i64> for Arg<'_> {
    fn from(v: i64) -> Self {
        Arg::I64(v)
    }
}
impl From<f32> for Arg<'_> {
    fn from(v: f32) -> Self {
        Arg::F32(v)
    }
}
impl<'a, T: Element> From<&'a mut [T]> for Arg<'a> {
    fn from(v: &'a mut [T]) -> Self {
        Arg::slice(v)
    }
}
impl<'a, T: Element> From<&'a mut Vec<T>> for Arg<'a> {
    fn from(v: &'a mut Vec<T>) -> Self {
        Arg::slice(v)
    }
}

/// What a kernel takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// As in `extern "C"`.
    pub name: String,
    /// Of each argument its size in bytes and whether it is a pointer.
    pub arguments: Vec<(usize, bool)>,
    /// The most threads of a block: its `__launch_bounds__`, else 1024.
    pub max_threads: usize,
}

#[repr(C)]
struct Dim {
    x: u32,
    y: u32,
    z: u32,
}

type LaunchFn =
    unsafe extern "C" fn(*const c_char, Dim, Dim, usize, *mut *mut c_void, c_int, u64) -> *const c_char;

/// The functions of emu.h.
pub(crate) struct Api {
    launch: LaunchFn,
    name: unsafe extern "C" fn(c_int) -> *const c_char,
    args: unsafe extern "C" fn(*const c_char, *mut usize, c_int) -> c_int,
    is_pointer: unsafe extern "C" fn(*const c_char, c_int) -> c_int,
    max_threads: unsafe extern "C" fn(*const c_char) -> c_int,
}

impl Api {
    pub(crate) fn of(library: &Library) -> Result<Api, String> {
        let text = |e: libloading::Error| e.to_string();
        // SAFETY: the types are those of the declarations in shim/emu.h.
        unsafe {
            Ok(Api {
                launch: *library.get(b"emu_launch\0").map_err(text)?,
                name: *library.get(b"emu_kernel_name\0").map_err(text)?,
                args: *library.get(b"emu_kernel_args\0").map_err(text)?,
                is_pointer: *library.get(b"emu_kernel_arg_is_pointer\0").map_err(text)?,
                max_threads: *library.get(b"emu_kernel_max_threads\0").map_err(text)?,
            })
        }
    }

    fn info(&self, name: &CStr) -> Option<KernelInfo> {
        let mut sizes = [0usize; 64];
        // SAFETY: the name ends with NUL and `sizes` has the room that is said.
        let count = unsafe { (self.args)(name.as_ptr(), sizes.as_mut_ptr(), sizes.len() as c_int) };
        let count = usize::try_from(count).ok()?;
        // SAFETY: as above.
        let pointer = |i: usize| unsafe { (self.is_pointer)(name.as_ptr(), i as c_int) } != 0;
        // SAFETY: as above.
        let max_threads = unsafe { (self.max_threads)(name.as_ptr()) };
        Some(KernelInfo {
            name: name.to_string_lossy().into_owned(),
            arguments: sizes[..count].iter().enumerate().map(|(i, &size)| (size, pointer(i))).collect(),
            max_threads: max_threads.max(0) as usize,
        })
    }
}

/// All kernels that were compiled: those of `worker/compute/kernels` and the ones for our own tests (`selftest_...`).
///
/// # Errors
/// Why the library is not there.
pub fn kernels() -> Result<Vec<KernelInfo>, String> {
    let api = &install()?.api;
    let name = |i| {
        // SAFETY: the function returns null past the last kernel, else a string that lives as long as the library.
        let text = unsafe { (api.name)(i) };
        // SAFETY: as above.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
    };
    Ok((0..).map_while(name).filter_map(|n| api.info(n)).collect())
}

/// Guards on both sides of each buffer, in bytes: a kernel that writes there is reported.
const GUARD: usize = 4096;
/// NaN in f32, bf16 and f16: a read beyond a buffer returns it.
const GUARD_WORD: u16 = 0xfff5;

/// A buffer between its guards.
struct Guarded {
    /// In units whose alignment is that of any vector load.
    memory: Vec<Aligned>,
    length: usize,
}
#[repr(C, align(256))]
#[derive(Clone, Copy)]
struct Aligned([u8; 256]);

impl Guarded {
    fn new(bytes: &[u8]) -> Self {
        let mut unit = Aligned([0; 256]);
        unit.0.as_chunks_mut::<2>().0.iter_mut().for_each(|w| *w = GUARD_WORD.to_ne_bytes());
        let units = (2 * GUARD + bytes.len()).div_ceil(256);
        let mut guarded = Guarded { memory: vec![unit; units], length: bytes.len() };
        guarded.all()[GUARD..GUARD + bytes.len()].copy_from_slice(bytes);
        guarded
    }

    fn all(&mut self) -> &mut [u8] {
        self.memory.as_flattened_bytes()
    }

    /// Where the guards were changed, in bytes from the buffer's begin.
    fn broken(&mut self) -> Option<isize> {
        let length = self.length;
        let expected = GUARD_WORD.to_ne_bytes();
        let changed = self.all().iter().enumerate().find(|(i, b)| {
            let outside = *i < GUARD || *i >= GUARD + length;
            outside && **b != expected[i % 2]
        });
        changed.map(|(i, _)| i as isize - GUARD as isize)
    }
}

trait FlattenedBytes {
    fn as_flattened_bytes(&mut self) -> &mut [u8];
}
impl FlattenedBytes for Vec<Aligned> {
    fn as_flattened_bytes(&mut self) -> &mut [u8] {
        // SAFETY: `Aligned` is 256 bytes without padding.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr().cast(), self.len() * 256) }
    }
}

/// Runs a kernel of this name on the CPU, to its end. `shared` is its dynamic shared memory in bytes. One launch runs at a
/// time in a process.
///
/// # Errors
/// There is no such kernel; the arguments differ from its own in number, size or kind; the launch is beyond what a
/// device takes; what a kernel does wrong (`shim/emu.h` has the list), and writes outside of a buffer. The text names
/// the kernel.
pub fn launch(
    kernel: &str,
    grid: [u32; 3],
    block: [u32; 3],
    shared: usize,
    mut args: Vec<Arg<'_>>,
    schedule: Schedule,
) -> Result<(), String> {
    let api = &install()?.api;
    let name = CString::new(kernel).map_err(|e| e.to_string())?;
    let info = api.info(&name).ok_or_else(|| format!("no kernel is called {kernel}"))?;
    let mut buffers: Vec<Option<Guarded>> = Vec::new();
    for arg in &args {
        buffers.push(if let Arg::Buffer(bytes) = arg { Some(Guarded::new(bytes)) } else { None });
    }
    let mut values: Vec<Vec<u8>> = Vec::new();
    for (arg, buffer) in args.iter().zip(&mut buffers) {
        values.push(match buffer {
            Some(b) => (b.all()[GUARD..].as_mut_ptr() as usize).to_ne_bytes().to_vec(),
            None => arg.scalar(),
        });
    }
    let given: Vec<_> = values.iter().zip(&args).map(|(v, a)| (v.len(), a.is_pointer())).collect();
    if given != info.arguments {
        return Err(format!("{kernel} takes {:?} (size, pointer), it was given {given:?}", info.arguments));
    }
    let mut pointers: Vec<*mut c_void> = values.iter_mut().map(|v| v.as_mut_ptr().cast()).collect();
    pointers.push(std::ptr::null_mut());
    let (order, seed) = match schedule {
        Schedule::Ascending => (0, 0),
        Schedule::Descending => (1, 0),
        Schedule::Random(seed) => (2, seed),
    };
    let dim = |d: [u32; 3]| Dim { x: d[0], y: d[1], z: d[2] };
    // SAFETY: number, sizes and kinds of the arguments are the kernel's; buffers outlive the launch and are guarded.
    let error = unsafe {
        (api.launch)(name.as_ptr(), dim(grid), dim(block), shared, pointers.as_mut_ptr(), order, seed)
    };
    if !error.is_null() {
        // SAFETY: the text lives until this thread's next launch.
        return Err(unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned());
    }
    for (i, (arg, buffer)) in args.iter_mut().zip(&mut buffers).enumerate() {
        let (Arg::Buffer(bytes), Some(guarded)) = (arg, buffer) else { continue };
        if let Some(at) = guarded.broken() {
            let length = guarded.length;
            return Err(format!("{kernel} wrote at byte {at} of argument {i}, a buffer of {length} bytes"));
        }
        let inside = GUARD..GUARD + guarded.length;
        bytes.copy_from_slice(&guarded.all()[inside]);
    }
    Ok(())
}

//! Launches kernels, and names the kernel in errors.

use crate::{
    cuda::{
        driver::Stream,
        kernels::{Kernels, Unit},
    },
    error::{DeviceError, Result},
};
use cudarc::driver::sys;
use std::{ffi::c_void, fmt};

/// An argument of a kernel. A launch also has its name, for messages.
#[derive(Clone, Copy, Debug)]
pub enum Arg {
    /// An address on the device; 0 is null.
    At(u64),
    /// `int`
    Int(i32),
    /// `long long`
    Long(i64),
    /// `float`
    Float(f32),
    /// `double`
    Double(f64),
    /// A number that exceeds the kernel's `int`; the launch is refused.
    TooLarge(usize),
}

impl Arg {
    fn place(&self) -> *mut c_void {
        match self {
            Self::At(v) => std::ptr::from_ref(v) as *mut c_void,
            Self::Int(v) => std::ptr::from_ref(v) as *mut c_void,
            Self::Long(v) => std::ptr::from_ref(v) as *mut c_void,
            Self::Float(v) => std::ptr::from_ref(v) as *mut c_void,
            Self::Double(v) => std::ptr::from_ref(v) as *mut c_void,
            Self::TooLarge(v) => std::ptr::from_ref(v) as *mut c_void,
        }
    }
}

impl fmt::Display for Arg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::At(0) => f.write_str("null"),
            Self::At(v) => write!(f, "{v:#x}"),
            Self::Int(v) => write!(f, "{v}"),
            Self::Long(v) => write!(f, "{v}"),
            Self::Float(v) => write!(f, "{v}"),
            Self::Double(v) => write!(f, "{v}"),
            Self::TooLarge(v) => write!(f, "{v}"),
        }
    }
}

/// A kernel's `int`.
pub fn int(v: usize) -> Arg {
    i32::try_from(v).map_or(Arg::TooLarge(v), Arg::Int)
}

/// A kernel's `long long`.
pub fn long(v: usize) -> Arg {
    Arg::Long(v as i64)
}

/// Number of blocks, threads per block, and bytes of dynamic shared memory per block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads per block.
    pub block: u32,
    /// Bytes of dynamic shared memory per block.
    pub shared: u32,
}

impl Geometry {
    /// A grid in one dimension.
    pub fn line(grid: usize, block: u32) -> Self {
        Self { grid: [grid as u32, 1, 1], block, shared: 0 }
    }

    /// A grid in two or three.
    pub fn grid(grid: [usize; 3], block: u32) -> Self {
        Self { grid: grid.map(|g| g as u32), block, shared: 0 }
    }

    /// Over the `n` values of a flat operation.
    pub fn flat(n: usize) -> Self {
        Self::line(n.div_ceil(2048).clamp(1, 1 << 20), 256)
    }

    /// With dynamic shared memory.
    pub fn with_shared(self, shared: usize) -> Self {
        Self { shared: shared as u32, ..self }
    }
}

/// Launches kernels on a stream. The next call reports an error inside a kernel.
#[derive(Debug)]
pub struct Launcher {
    kernels: Kernels,
}

impl Launcher {
    pub fn new(kernels: Kernels) -> Self {
        Self { kernels }
    }

    /// Starts a kernel.
    ///
    /// # Safety
    /// `args` have the kernel's types, in its order. Every address is device memory that is long enough
    /// for the kernel with these lengths, and that no other stream writes meanwhile.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        (unit, name): (Unit, &str),
        geometry: Geometry,
        args: &[(&str, Arg)],
    ) -> Result {
        if let Some((what, arg)) = args.iter().find(|(_, a)| matches!(a, Arg::TooLarge(_))) {
            return Err(DeviceError::Unsupported(format!(
                "{name}: {what} is {arg}, and the GPU's kernels count to 2147483647; use a smaller train.batch"
            )));
        }
        if geometry.grid.contains(&0) {
            return Ok(()); // nothing to do
        }
        let function = self.kernels.function(unit, name, geometry.shared)?;
        let mut places: [*mut c_void; MAX_ARGS] = [std::ptr::null_mut(); MAX_ARGS];
        assert!(args.len() <= MAX_ARGS, "{name}: {} arguments", args.len());
        for (place, (_, arg)) in places.iter_mut().zip(args) {
            *place = arg.place();
        }
        let Geometry { grid: [x, y, z], block, shared } = geometry;
        // SAFETY: the arguments are the caller's word; they are copied during the call.
        let code = unsafe {
            sys::cuLaunchKernel(
                function.0,
                x,
                y,
                z,
                block,
                1,
                1,
                shared,
                stream.raw(),
                places.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        stream.context().check(code, || format!("launch of {}", describe(name, geometry, args)))
    }
}

/// The maximum number of arguments of a kernel.
const MAX_ARGS: usize = 20;

fn describe(name: &str, g: Geometry, args: &[(&str, Arg)]) -> String {
    let [x, y, z] = g.grid;
    let args: Vec<String> = args.iter().map(|(n, a)| format!("{n} {a}")).collect();
    format!(
        "{name} (grid {x}x{y}x{z}, block {}, {} bytes of shared memory; {})",
        g.block,
        g.shared,
        args.join(", ")
    )
}

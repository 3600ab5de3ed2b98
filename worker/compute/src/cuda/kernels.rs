//! The kernels' sources, and a device's functions by name.

use crate::{
    cuda::{
        compile::{self, Source},
        driver::Context,
    },
    error::{DeviceError, Result},
};
use cudarc::driver::sys;
use std::{
    collections::HashMap,
    ffi::CString,
    ptr,
    sync::{Arc, Mutex, PoisonError},
};

macro_rules! sources {
    ($($unit:ident: $file:literal $(, $option:literal)*;)+) => {
        /// A source file, compiled as one program at the first use of its kernels.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Unit { $(#[doc = $file] $unit,)+ }

        impl Unit {
            /// Its program.
            pub fn source(self) -> Source {
                match self {
                    $(Unit::$unit => Source {
                        file: $file,
                        text: include_str!(concat!("../../kernels/", $file)),
                        header: ("prelude.cuh", include_str!("../../kernels/prelude.cuh")),
                        options: vec![$($option.to_string()),*],
                    },)+
                }
            }
        }
    };
}

// Without fused multiply-add if results must be bit-equal to the CPU's.
sources! {
    Elementwise: "elementwise.cu";
    Loss: "loss.cu";
    Norm: "norm.cu";
    BatchNorm: "batchnorm.cu";
    Conv: "conv.cu";
    Embedding: "embedding.cu";
    Attention: "attention.cu";
    Stats: "stats.cu";
    Encode: "encode.cu", "--fmad=false";
    Optim: "optim.cu", "--fmad=false";
}

/// A function of a loaded module.
#[derive(Clone, Copy, Debug)]
pub struct Function(pub sys::CUfunction);

// SAFETY: a handle that lives as long as its module, which `Kernels` keeps; the driver takes it from any thread.
unsafe impl Send for Function {}

/// The modules of one device.
#[derive(Debug)]
pub struct Kernels {
    context: Arc<Context>,
    /// The element type to compile: compiling all types would take several times as long.
    define: &'static str,
    loaded: Mutex<Loaded>,
}

#[derive(Debug, Default)]
struct Loaded {
    /// Attention has a module per head size.
    modules: HashMap<(Unit, Option<String>), Module>,
    functions: HashMap<String, Function>,
}

#[derive(Debug)]
struct Module(sys::CUmodule);

// SAFETY: as `Function`.
unsafe impl Send for Module {}

impl Kernels {
    /// Loads modules only at their first use.
    pub fn new(context: &Arc<Context>, define: &'static str) -> Self {
        Self { context: context.clone(), define, loaded: Mutex::default() }
    }

    /// The function with this name. The first of a unit compiles it, which takes up to some seconds without a
    /// cached file. `shared` is the maximum dynamic shared memory of its launches, in bytes.
    pub fn function(&self, unit: Unit, name: &str, shared: u32) -> Result<Function> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(f) = loaded.functions.get(name) {
            return Ok(*f);
        }
        let head = name.rsplit_once('_').map(|(_, end)| end);
        let head = head.filter(|h| unit == Unit::Attention && h.parse::<u32>().is_ok()).map(str::to_string);
        let key = (unit, head);
        let module = match loaded.modules.get(&key) {
            Some(m) => m.0,
            None => {
                let module = self.load(unit, key.1.as_deref())?;
                loaded.modules.insert(key, Module(module));
                module
            }
        };
        let text = CString::new(name)
            .map_err(|_| DeviceError::Unsupported(format!("{name:?} is no name of a kernel")))?;
        let mut raw = ptr::null_mut();
        // SAFETY: the module is loaded and the name ends with zero; writes one handle.
        let code = unsafe { sys::cuModuleGetFunction(&mut raw, module, text.as_ptr()) };
        self.context.check(code, || format!("cuModuleGetFunction of {name}"))?;
        const DEFAULT_SHARED_BYTES: u32 = 48 << 10;
        if shared > DEFAULT_SHARED_BYTES {
            use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as MAX_SHARED_BYTES;
            // SAFETY: the function was just found.
            let code = unsafe { sys::cuFuncSetAttribute(raw, MAX_SHARED_BYTES, shared as i32) };
            self.context
                .check(code, || format!("cuFuncSetAttribute: {shared} bytes of shared memory for {name}"))?;
        }
        loaded.functions.insert(name.to_string(), Function(raw));
        Ok(Function(raw))
    }

    fn load(&self, unit: Unit, head: Option<&str>) -> Result<sys::CUmodule> {
        let (mut source, compute) = (unit.source(), self.context.compute());
        source.options.push(self.define.to_string());
        source.options.extend(head.map(|h| format!("-DPARAFT_HEAD={h}")));
        let load = || {
            let code = compile::cubin(&source, compute)?;
            let mut module = ptr::null_mut();
            // SAFETY: the image is a whole cubin, which says itself how long it is; the driver copies it.
            let done = unsafe { sys::cuModuleLoadData(&mut module, code.as_ptr().cast()) };
            self.context.check(done, || format!("cuModuleLoadData of {}", source.file)).map(|()| module)
        };
        load().or_else(|first| {
            // This driver version may reject code that an earlier one accepted.
            compile::forget(&source, compute);
            tracing::warn!(file = source.file, error = %first, "compiling the kernels again");
            load()
        })
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        if self.context.bind().is_err() {
            return;
        }
        let loaded = self.loaded.get_mut().unwrap_or_else(PoisonError::into_inner);
        for module in loaded.modules.values() {
            // SAFETY: loaded once, unloaded once; no function is launched any more.
            unsafe { sys::cuModuleUnload(module.0) };
        }
    }
}

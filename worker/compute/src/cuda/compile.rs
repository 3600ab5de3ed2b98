//! Compiles CUDA C++ for one device by NVRTC, and caches the code on disk.
//!
//! The cache's folder is `PARAFT_CACHE`, otherwise `paraft` in `XDG_CACHE_HOME`, otherwise `~/.cache/paraft`; an
//! empty `PARAFT_CACHE` disables the cache. A file's name is a hash of the source, the options and the compiler's
//! version. A checksum precedes the code: a damaged file is compiled again. Files are written under a temporary
//! name and renamed, so workers that start together never read incomplete files.

use crate::{
    cuda::library::{self, Part},
    error::{DeviceError, Result},
};
use cudarc::nvrtc::sys::{self, nvrtcResult};
use std::{
    ffi::{CStr, CString},
    fs,
    path::PathBuf,
    ptr,
};
use xxhash_rust::xxh3::xxh3_64;

/// The folder of the cache.
const FOLDER: &str = "PARAFT_CACHE";
const MAGIC: &[u8; 8] = b"PARAFTK2";

/// One program.
#[derive(Clone, Debug)]
pub struct Source {
    /// The file's name for messages: `loss.cu`.
    pub file: &'static str,
    /// The text.
    pub text: &'static str,
    /// Its include file: name and text.
    pub header: (&'static str, &'static str),
    /// Additional options.
    pub options: Vec<String>,
}

/// The version of NVRTC, for example (13, 0).
pub fn version() -> Result<(u32, u32)> {
    library::find(Part::Nvrtc).map_err(|e| DeviceError::Missing(e.to_string()))?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes two integers.
    check(unsafe { sys::nvrtcVersion(&mut major, &mut minor) }, "nvrtcVersion")?;
    Ok((major.max(0) as u32, minor.max(0) as u32))
}

/// The machine code of a program for a compute capability: from the cache, or compiled.
pub fn cubin(source: &Source, (major, minor): (u32, u32)) -> Result<Vec<u8>> {
    let arch = format!("sm_{major}{minor}");
    // Without a compiler, code of any compiler version is acceptable.
    let compiler = version();
    let place = cache_folder().map(|f| f.join("kernels"));
    let name = |version: &str| {
        let mut text = format!("{version}\n{arch}\n{}\n", source.options.join(" "));
        text.push_str(source.header.1);
        text.push_str(source.text);
        let stem = source.file.trim_end_matches(".cu");
        format!("{stem}-{arch}-{version}-{:016x}.cubin", xxh3_64(text.as_bytes()))
    };
    let versions: Vec<String> = match &compiler {
        Ok((a, b)) => vec![format!("{a}.{b}")],
        Err(_) => ["13", "12"]
            .iter()
            .flat_map(|major| (0..10).rev().map(move |minor| format!("{major}.{minor}")))
            .collect(),
    };
    if let Some(folder) = &place {
        for version in &versions {
            if let Some(code) = read(&folder.join(name(version))) {
                return Ok(code);
            }
        }
    }
    compiler?;
    let code = compile(source, &arch)?;
    if let Some(folder) = place {
        let path = folder.join(name(&versions[0]));
        if let Err(error) = write(&path, &code) {
            tracing::warn!(path = %path.display(), %error, "cannot cache compiled kernels; they are compiled at each start");
        }
    }
    Ok(code)
}

/// Removes a program's code for a device from the cache, because the driver rejected it.
pub fn forget(source: &Source, (major, minor): (u32, u32)) {
    let Some(folder) = cache_folder().map(|f| f.join("kernels")) else { return };
    let prefix = format!("{}-sm_{major}{minor}-", source.file.trim_end_matches(".cu"));
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(|n| n.starts_with(&prefix)) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn cache_folder() -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os(FOLDER) {
        return (!folder.is_empty()).then(|| folder.into());
    }
    let home = || std::env::var_os("HOME").map(|h| PathBuf::from(h).join(".cache"));
    std::env::var_os("XDG_CACHE_HOME")
        .filter(|f| !f.is_empty())
        .map(PathBuf::from)
        .or_else(home)
        .map(|f| f.join("paraft"))
}

fn read(path: &std::path::Path) -> Option<Vec<u8>> {
    let mut bytes = fs::read(path).ok()?;
    let head = bytes.get(..16)?;
    let whole = head[..8] == *MAGIC && head[8..] == xxh3_64(&bytes[16..]).to_le_bytes();
    if !whole {
        tracing::warn!(path = %path.display(), "a cached file is damaged; compiling its kernels again");
        return None;
    }
    bytes.drain(..16);
    Some(bytes)
}

fn write(path: &std::path::Path, code: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let beside = path.with_extension(format!("{}.tmp", std::process::id()));
    let text = [MAGIC, &xxh3_64(code).to_le_bytes()[..], code].concat();
    fs::write(&beside, text).and_then(|()| fs::rename(&beside, path)).inspect_err(|_| {
        let _ = fs::remove_file(&beside);
    })
}

fn check(code: nvrtcResult, call: &str) -> Result {
    if code == nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    // SAFETY: gives a constant text for any code.
    let text = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(code)) };
    let error = text.to_string_lossy().into_owned();
    Err(DeviceError::Call { device: "NVRTC".into(), call: call.into(), error })
}

struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

impl Program {
    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: writes one integer.
        if unsafe { sys::nvrtcGetProgramLogSize(self.0, &mut size) } != nvrtcResult::NVRTC_SUCCESS {
            return "(no log)".into();
        }
        let mut log = vec![0u8; size + 1];
        // SAFETY: writes `size` bytes.
        unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) };
        CStr::from_bytes_until_nul(&log).map(|l| l.to_string_lossy().trim().to_string()).unwrap_or_default()
    }
}

/// Options of every program. Division and roots follow IEEE 754, and subnormal numbers are kept: results must equal
/// the CPU's, except for the order of additions.
const OPTIONS: [&str; 5] =
    ["--std=c++17", "-default-device", "--prec-div=true", "--prec-sqrt=true", "--ftz=false"];

fn compile(source: &Source, arch: &str) -> Result<Vec<u8>> {
    let text = |s: &str| {
        CString::new(s).map_err(|_| DeviceError::Unsupported(format!("{}: a zero byte", source.file)))
    };
    let (program_text, file) = (text(source.text)?, text(source.file)?);
    let (header_name, header) = (text(source.header.0)?, text(source.header.1)?);
    let mut raw = ptr::null_mut();
    // SAFETY: all texts outlive the call, which copies them; one header and its name.
    let created = unsafe {
        sys::nvrtcCreateProgram(
            &mut raw,
            program_text.as_ptr(),
            file.as_ptr(),
            1,
            &header.as_ptr(),
            &header_name.as_ptr(),
        )
    };
    check(created, "nvrtcCreateProgram")?;
    let program = Program(raw);
    let arch_option = format!("--gpu-architecture={arch}");
    let options = OPTIONS
        .iter()
        .copied()
        .chain(source.options.iter().map(String::as_str))
        .chain([arch_option.as_str()]);
    let options = options.map(text).collect::<Result<Vec<_>>>()?;
    let pointers: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
    // SAFETY: as many options as are said, alive during the call.
    let done = unsafe { sys::nvrtcCompileProgram(program.0, pointers.len() as i32, pointers.as_ptr()) };
    if done != nvrtcResult::NVRTC_SUCCESS {
        let log = match check(done, "nvrtcCompileProgram") {
            Err(e) => format!("{e}: {}", program.log()),
            Ok(()) => program.log(),
        };
        return Err(DeviceError::Compile { file: source.file.into(), arch: arch.into(), log });
    }
    let mut size = 0;
    // SAFETY: writes one integer.
    check(unsafe { sys::nvrtcGetCUBINSize(program.0, &mut size) }, "nvrtcGetCUBINSize")?;
    let mut code = vec![0u8; size];
    // SAFETY: writes `size` bytes.
    check(unsafe { sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()) }, "nvrtcGetCUBIN")?;
    Ok(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_the_cache_is_whole_or_not_taken() {
        let folder = std::env::temp_dir().join(format!("paraft-cache-{}", std::process::id()));
        let path = folder.join("a.cubin");
        write(&path, b"machine code").expect("a temporary folder");
        assert_eq!(read(&path).as_deref(), Some(&b"machine code"[..]));
        let bytes = fs::read(&path).expect("there");
        for cut in 0..bytes.len() {
            fs::write(&path, &bytes[..cut]).expect("writes");
            assert_eq!(read(&path), None, "cut at {cut}");
        }
        for flip in 0..bytes.len() {
            let mut other = bytes.clone();
            other[flip] ^= 1;
            fs::write(&path, &other).expect("writes");
            assert_eq!(read(&path), None, "byte {flip}");
        }
        fs::remove_dir_all(folder).expect("ours");
    }
}

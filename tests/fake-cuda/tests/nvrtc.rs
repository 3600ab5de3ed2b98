//! Every kernel compiled by NVIDIA's own NVRTC for real devices; its registers and spills against the table
//! in worker/compute/kernels/registers.txt.
//!
//! Runs where PARAFT_NVRTC names the folder of libnvrtc.so.13 (of the wheel nvidia-cuda-nvrtc:
//! nvidia/cu13/lib); PARAFT_REQUIRE_NVRTC=1 makes it a failure where it cannot run. PARAFT_WRITE_REGISTERS=1
//! writes the table anew.

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90", "sm_100"];
/// Without fused multiply-add: what must be bit-equal to the servers.
const EXACT: [&str; 2] = ["optim.cu", "encode.cu"];

/// Registers of a thread, bytes spilled.
type Use = (u32, u32);
/// By kernel, then in the order of the architectures.
type Table = BTreeMap<String, [Use; 3]>;

struct Nvrtc {
    _builtins: Library,
    compiler: Library,
}

type Program = *mut c_void;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type LogSize = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Log = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;

fn find(folder: &Path, stem: &str) -> Result<PathBuf, String> {
    let mut names: Vec<PathBuf> = std::fs::read_dir(folder)
        .map_err(|e| format!("{}: {e}", folder.display()))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(stem)))
        .collect();
    names.sort();
    names.into_iter().next().ok_or_else(|| format!("no {stem}* in {}", folder.display()))
}

impl Nvrtc {
    fn load() -> Result<Self, String> {
        let folder =
            PathBuf::from(std::env::var("PARAFT_NVRTC").map_err(|_| "PARAFT_NVRTC is not set".to_string())?);
        let open = |path: PathBuf| {
            // SAFETY: NVIDIA's library; its constructors touch nothing of ours.
            unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) }.map_err(|e| e.to_string())
        };
        // NVRTC asks for its builtins by name: loaded before, they are found without LD_LIBRARY_PATH.
        let builtins = open(find(&folder, "libnvrtc-builtins.so")?)?;
        Ok(Self { _builtins: builtins, compiler: open(find(&folder, "libnvrtc.so")?)? })
    }

    fn version(&self) -> String {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the signature is that of nvrtc.h.
        unsafe {
            self.compiler.get::<Version>(b"nvrtcVersion\0").expect("nvrtcVersion")(&mut major, &mut minor)
        };
        format!("{major}.{minor}")
    }

    /// The compiler's log.
    fn compile(&self, name: &str, source: &str, prelude: &str, architecture: &str) -> Result<String, String> {
        let c = |text: &str| CString::new(text).expect("no nul");
        let (source, file, header, header_name) = (c(source), c(name), c(prelude), c("prelude.cuh"));
        let mut options =
            vec![c("--std=c++17"), c("-default-device"), c(&format!("--gpu-architecture={architecture}"))];
        options.extend(["--ptxas-options=-v", "--prec-div=true", "--prec-sqrt=true", "--ftz=false"].map(c));
        options.extend(EXACT.contains(&name).then(|| c("--fmad=false")));
        let options: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: the signatures are those of nvrtc.h, and all strings live through the calls.
        unsafe {
            let get = &self.compiler;
            let mut program: Program = std::ptr::null_mut();
            let made = get.get::<Create>(b"nvrtcCreateProgram\0").expect("nvrtcCreateProgram")(
                &mut program,
                source.as_ptr(),
                file.as_ptr(),
                1,
                &header.as_ptr(),
                &header_name.as_ptr(),
            );
            assert_eq!(made, 0, "nvrtcCreateProgram");
            let compile = get.get::<Compile>(b"nvrtcCompileProgram\0").expect("nvrtcCompileProgram");
            let result = compile(program, options.len() as c_int, options.as_ptr());
            let mut size = 0;
            get.get::<LogSize>(b"nvrtcGetProgramLogSize\0").expect("nvrtcGetProgramLogSize")(
                program, &mut size,
            );
            let mut log = vec![0u8; size];
            get.get::<Log>(b"nvrtcGetProgramLog\0").expect("nvrtcGetProgramLog")(
                program,
                log.as_mut_ptr().cast(),
            );
            get.get::<Destroy>(b"nvrtcDestroyProgram\0").expect("nvrtcDestroyProgram")(&mut program);
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_string();
            if result == 0 {
                Ok(log)
            } else {
                Err(format!("{name} for {architecture}: error {result}\n{log}"))
            }
        }
    }
}

/// The number before `unit` in a line such as "Used 32 registers, ...".
fn number_before(line: &str, unit: &str) -> Option<u32> {
    line[..line.find(unit)?].trim_end().rsplit(' ').next()?.parse().ok()
}

/// What the log says of each kernel.
fn uses(log: &str) -> BTreeMap<String, Use> {
    let (mut all, mut kernel, mut spilled) = (BTreeMap::new(), String::new(), 0);
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            kernel = rest.split('\'').next().unwrap_or_default().to_string();
        }
        if let (Some(stores), Some(loads)) =
            (number_before(line, "bytes spill stores"), number_before(line, "bytes spill loads"))
        {
            spilled = stores + loads;
        }
        if let Some(registers) = number_before(line, "registers") {
            all.insert(std::mem::take(&mut kernel), (registers, spilled));
        }
    }
    all
}

fn measure(nvrtc: &Nvrtc, folder: &Path) -> Table {
    let prelude = std::fs::read_to_string(folder.join("prelude.cuh")).expect("prelude.cuh");
    let mut jobs = Vec::new();
    for entry in std::fs::read_dir(folder).expect("the kernels' folder") {
        let path = entry.expect("an entry").path();
        if path.extension().is_some_and(|e| e == "cu") {
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            let source = std::fs::read_to_string(&path).expect("a kernel file");
            jobs.extend((0..ARCHITECTURES.len()).map(|a| (name.clone(), source.clone(), a)));
        }
    }
    assert!(jobs.len() >= 10 * ARCHITECTURES.len(), "{} compilations", jobs.len());
    let (jobs, table) = (Mutex::new(jobs), Mutex::new(Table::new()));
    let next = || jobs.lock().expect("not poisoned").pop();
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from).min(8) {
            scope.spawn(|| {
                while let Some((name, source, a)) = next() {
                    let log = nvrtc
                        .compile(&name, &source, &prelude, ARCHITECTURES[a])
                        .unwrap_or_else(|e| panic!("{e}"));
                    assert!(!log.contains("warning"), "{name}: {log}");
                    let found = uses(&log);
                    assert_eq!(found.len(), source_kernels(&log), "{name}: kernels in the log");
                    for (kernel, used) in found {
                        table.lock().expect("not poisoned").entry(kernel).or_default()[a] = used;
                    }
                }
            });
        }
    });
    table.into_inner().expect("not poisoned")
}

fn source_kernels(log: &str) -> usize {
    log.matches("Compiling entry function").count()
}

fn write_table(version: &str, table: &Table) -> String {
    let mut text = format!(
        "# NVRTC {version}: registers of a thread (+ bytes spilled) for {}\n",
        ARCHITECTURES.join(", ")
    );
    for (kernel, uses) in table {
        text += kernel;
        for (registers, spilled) in uses {
            text += &if *spilled > 0 { format!(" {registers}+{spilled}") } else { format!(" {registers}") };
        }
        text.push('\n');
    }
    text
}

fn read_table(text: &str) -> Table {
    let number = |text: &str| text.parse::<u32>().expect("a number");
    let each = |text: &str| match text.split_once('+') {
        Some((registers, spilled)) => (number(registers), number(spilled)),
        None => (number(text), 0),
    };
    let rows = text.lines().filter(|l| !l.starts_with('#'));
    rows.map(|line| {
        let mut words = line.split(' ');
        let kernel = words.next().expect("a kernel").to_string();
        let uses: Vec<Use> = words.map(each).collect();
        (kernel, uses.try_into().expect("a column for each architecture"))
    })
    .collect()
}

#[test]
fn every_kernel_compiles_and_spills_only_what_the_table_has() {
    let nvrtc = match Nvrtc::load() {
        Ok(nvrtc) => nvrtc,
        Err(why) => {
            let required = std::env::var("PARAFT_REQUIRE_NVRTC").is_ok_and(|v| v == "1");
            assert!(!required, "PARAFT_REQUIRE_NVRTC=1, but: {why}");
            eprintln!("SKIPPED kernels by NVRTC: {why}");
            return;
        }
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../worker/compute/kernels");
    let path = folder.join("registers.txt");
    let table = measure(&nvrtc, &folder);
    let text = write_table(&nvrtc.version(), &table);
    if std::env::var("PARAFT_WRITE_REGISTERS").is_ok_and(|v| v == "1") {
        std::fs::write(&path, &text).expect("the table can be written");
    }
    let listed = std::fs::read_to_string(&path).expect("worker/compute/kernels/registers.txt");
    let known = read_table(&listed);
    for (kernel, uses) in &table {
        let allowed = known.get(kernel).copied().unwrap_or_default();
        for (a, used) in uses.iter().enumerate() {
            assert!(used.1 <= allowed[a].1, "{kernel} spills {} bytes on {}", used.1, ARCHITECTURES[a]);
            assert!(used.0 > 0, "{kernel} was not compiled for {}", ARCHITECTURES[a]);
        }
    }
    // Another version of the compiler allots other registers.
    if listed.lines().next() == text.lines().next() {
        assert!(known == table, "registers changed: look at them, then PARAFT_WRITE_REGISTERS=1\n{text}");
    }
}

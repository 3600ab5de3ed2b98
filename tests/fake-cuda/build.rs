//! Compiles the kernels of worker/compute with the shim, and the fake CUDA libraries, into one shared library with the
//! names of NVIDIA's beside it. Without a C++ compiler the crate builds all the same and says so when it is used.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// A library of NVIDIA's: the name by which cudarc asks for it first, and others by which it is known.
const LIBRARIES: [(&str, &[&str]); 5] = [
    ("libcuda.so", &["libcuda.so.1"]),
    ("libnvrtc.so", &["libnvrtc.so.13"]),
    ("libcublas.so", &["libcublas.so.13"]),
    ("libcublasLt.so", &["libcublasLt.so.13"]),
    ("libnccl.so", &["libnccl.so.2"]),
];

const FLAGS: [&str; 6] =
    ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"];

struct Kernel {
    name: String,
    /// What stands between the parentheses of `__launch_bounds__`.
    bounds: Option<String>,
}

/// A .cu file: its name as a C identifier, and what it defines.
struct KernelFile {
    path: PathBuf,
    stem: String,
    text: String,
    kernels: Vec<Kernel>,
}

struct Builder {
    compiler: PathBuf,
    flags: Vec<String>,
    here: PathBuf,
    out: PathBuf,
    /// Of all that any object includes.
    headers: u64,
}

fn main() {
    let here = PathBuf::from(env("CARGO_MANIFEST_DIR"));
    let out = PathBuf::from(env("OUT_DIR"));
    let folders = [here.join("../../worker/compute/kernels"), here.join("kernels")];
    for path in folders.iter().cloned().chain([here.join("shim"), here.join("fake"), here.join("build.rs")]) {
        println!("cargo:rerun-if-changed={}", path.display());
    }
    println!("cargo:rerun-if-env-changed=PARAFT_FAKE_CUDA_SANITIZE");
    let found = find_compiler();
    let reason = match &found {
        Ok(_) => String::new(),
        Err(reason) => reason.clone(),
    };
    println!("cargo:rustc-env=PARAFT_FAKE_CUDA_MISSING={reason}");
    println!("cargo:rustc-env=PARAFT_FAKE_CUDA_DIR={}", out.join("lib").display());
    let sanitize = std::env::var_os("PARAFT_FAKE_CUDA_SANITIZE").is_some_and(|v| !v.is_empty() && v != "0");
    println!("cargo:rustc-env=PARAFT_FAKE_CUDA_SANITIZED={}", u8::from(sanitize));
    if let Ok(compiler) = found {
        let mut flags: Vec<String> = FLAGS.iter().map(|f| f.to_string()).collect();
        if sanitize {
            // A report names lines.
            flags.extend(["-fsanitize=address".into(), "-g1".into()]);
        }
        let headers = hash_of_headers(&[folders[0].as_path(), &here.join("shim"), &here.join("fake")]);
        let builder = Builder { compiler, flags, here, out, headers };
        builder.build(&folders);
    }
}

fn env(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}

/// The C++ compiler that `cc` would take, if it can make a shared library.
fn find_compiler() -> Result<PathBuf, String> {
    if env("CARGO_CFG_TARGET_OS") != "linux" {
        return Err("the fake CUDA libraries are built on Linux only".into());
    }
    if env("HOST") != env("TARGET") {
        return Err("the fake CUDA libraries are not built for another machine".into());
    }
    let tool =
        cc::Build::new().cpp(true).opt_level(2).try_get_compiler().map_err(|e| one_line(&e.to_string()))?;
    let probe = PathBuf::from(env("OUT_DIR")).join("probe.cpp");
    let object = probe.with_extension("so");
    fs::write(&probe, "#include <vector>\nint main() { return 0; }\n").map_err(|e| e.to_string())?;
    let mut command = Command::new(tool.path());
    command.args(["-std=c++17", "-shared", "-fPIC", "-o"]).arg(&object).arg(&probe);
    match command.output() {
        Ok(done) if done.status.success() => Ok(tool.path().to_path_buf()),
        Ok(done) => Err(one_line(&format!(
            "the C++ compiler {} does not work: {}",
            tool.path().display(),
            String::from_utf8_lossy(&done.stderr)
        ))),
        Err(e) => Err(one_line(&format!("there is no C++ compiler ({}: {e})", tool.path().display()))),
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn files(folder: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).map(|e| e.flatten().map(|e| e.path()).collect()).unwrap_or_default();
    let mut all: Vec<PathBuf> = entries;
    all.retain(|p| p.extension().and_then(|e| e.to_str()).is_some_and(|e| extensions.contains(&e)));
    all.sort();
    all
}

fn hash_of_headers(folders: &[&Path]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for path in folders.iter().flat_map(|f| files(f, &["h", "cuh"])) {
        fs::read(&path).unwrap_or_default().hash(&mut hasher);
    }
    hasher.finish()
}

impl Builder {
    fn build(&self, folders: &[PathBuf]) {
        let kernels: Vec<KernelFile> =
            folders.iter().flat_map(|f| files(f, &["cu"])).map(|path| self.read(path)).collect();
        let mut jobs: Vec<Box<dyn Fn() -> PathBuf + Send + Sync + '_>> = Vec::new();
        for file in &kernels {
            jobs.push(Box::new(|| self.kernel_object(file)));
        }
        for source in files(&self.here.join("shim"), &["cpp"]) {
            jobs.push(Box::new(move || self.object(&source, &[])));
        }
        for source in files(&self.here.join("fake"), &["cpp"]) {
            // Without it a product of 512 by 512 by 512 takes seconds.
            jobs.push(Box::new(move || self.object(&source, &["-O3"])));
        }
        jobs.push(Box::new(|| self.source_table(&kernels)));
        let objects = in_parallel(&jobs);
        self.link(&objects);
    }

    fn compiler(&self) -> Command {
        let mut command = Command::new(&self.compiler);
        command.args(&self.flags);
        command
    }

    /// The kernels of a file, found in what the preprocessor makes of it.
    fn read(&self, path: PathBuf) -> KernelFile {
        let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let mut command = Command::new(&self.compiler);
        command
            .args(["-E", "-P", "-x", "c++", "-std=c++17", "-DPARAFT_SHIM"])
            .args(self.includes(&path))
            .arg(&path);
        let out = run(&mut command);
        let stem = path.file_stem().and_then(|s| s.to_str()).unwrap_or_default();
        let stem: String = stem.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        let folder = path.parent().and_then(|p| p.file_name()).and_then(|n| n.to_str()).unwrap_or_default();
        let kernels = find_kernels(&out);
        KernelFile { stem: format!("{folder}_{stem}").replace('-', "_"), path, text, kernels }
    }

    fn includes(&self, path: &Path) -> Vec<String> {
        let kernels = self.here.join("../../worker/compute/kernels");
        let folders = [path.parent().unwrap_or(path).to_path_buf(), kernels, self.here.join("shim")];
        folders.iter().map(|f| format!("-I{}", f.display())).collect()
    }

    /// A file's kernels with the shim before them, in a namespace of their own, and their static shared memory in a
    /// section of their own so that it can be poisoned.
    fn kernel_object(&self, file: &KernelFile) -> PathBuf {
        let stem = &file.stem;
        let registrations: String = file
            .kernels
            .iter()
            .map(|k| {
                let bounds = k.bounds.as_ref().map_or("1024".to_string(), |b| format!("shim_bounds({b})"));
                let name = &k.name;
                format!("    shim_register_kernel(\"{name}\", {name}, {bounds}, __start_shim_{stem}, __stop_shim_{stem});\n")
            })
            .collect();
        let wrapper = format!(
            "#include \"shim.h\"\n\
             extern \"C\" __attribute__((weak, visibility(\"hidden\"))) char __start_shim_{stem}[], __stop_shim_{stem}[];\n\
             namespace {{\n#include \"{}\"\n\
             __attribute__((constructor)) void shim_register_file() {{\n{registrations}}}\n}}\n",
            file.path.display()
        );
        let source = self.out.join(format!("{stem}.cu.cpp"));
        write_if_changed(&source, &wrapper);
        let mut key = DefaultHasher::new();
        file.text.hash(&mut key);
        wrapper.hash(&mut key);
        self.compile(&source, &["-w"], key, &self.includes(&file.path), |object| {
            let mut command = Command::new("objcopy");
            let section = format!(".bss=shim_{stem}");
            command.args([
                "--set-section-flags",
                ".bss=alloc,load,contents,data",
                "--rename-section",
                &section,
            ]);
            // Without objcopy the shared memory is not poisoned; all else works.
            if !command.arg(object).status().is_ok_and(|s| s.success()) {
                println!("cargo:warning=no objcopy: shared memory of the fake GPU is not poisoned");
            }
        })
    }

    fn object(&self, source: &Path, more: &[&str]) -> PathBuf {
        let mut key = DefaultHasher::new();
        fs::read(source).unwrap_or_default().hash(&mut key);
        let flags: Vec<&str> = more.iter().copied().chain(["-Wall", "-Wextra"]).collect();
        self.compile(source, &flags, key, &self.includes(source), |_| {})
    }

    /// The texts of the kernel files and the names in them, for the fake NVRTC.
    fn source_table(&self, files: &[KernelFile]) -> PathBuf {
        let mut text = String::from("#include \"../fake/sources.h\"\nnamespace fake {\n");
        let mut table = String::new();
        for (i, file) in files.iter().enumerate() {
            let names: String = file.kernels.iter().map(|k| format!("\"{}\", ", k.name)).collect();
            text += &format!("static const char* const names_{i}[] = {{{names}nullptr}};\n");
            table += &format!("{{R\"PARAFT({})PARAFT\", names_{i}}},\n", file.text);
        }
        text += &format!("static const Source table[] = {{\n{table}{{nullptr, nullptr}}}};\n");
        text += &format!(
            "const Source* const SOURCES_BEGIN = table;\nconst int SOURCES_COUNT = {};\n}}\n",
            files.len()
        );
        let source = self.out.join("sources.cpp");
        write_if_changed(&source, &text);
        self.object(&source, &[])
    }

    /// Compiles unless the object is there and was made of the same.
    fn compile(
        &self,
        source: &Path,
        more: &[&str],
        mut key: DefaultHasher,
        includes: &[String],
        finish: impl Fn(&Path),
    ) -> PathBuf {
        (&self.headers, &self.flags, more, &self.compiler).hash(&mut key);
        let key = format!("{:x}", key.finish());
        let name = source.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let (object, stamp) = (self.out.join(format!("{name}.o")), self.out.join(format!("{name}.key")));
        if object.exists() && fs::read_to_string(&stamp).is_ok_and(|k| k == key) {
            return object;
        }
        let mut command = self.compiler();
        command.args(more).args(includes).arg(format!("-I{}", self.here.join("fake").display()));
        run(command.arg("-c").arg(source).arg("-o").arg(&object));
        finish(&object);
        fs::write(&stamp, key).unwrap_or_else(|e| panic!("{}: {e}", stamp.display()));
        object
    }

    fn link(&self, objects: &[PathBuf]) {
        let folder = self.out.join("lib");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        let all = folder.join("libparaft_fake_cuda.so");
        let mut command = self.compiler();
        command
            .args(["-shared", "-Wl,-soname,libparaft_fake_cuda.so", "-Wl,-z,defs", "-o"])
            .arg(&all)
            .args(objects);
        run(command.args(["-lpthread", "-lrt", "-ldl"]));
        let empty = self.out.join("empty.cpp");
        write_if_changed(&empty, "");
        for (name, others) in LIBRARIES {
            // Each is a library of its own that brings the one with the functions: a program that was given one of them
            // finds it again by its name.
            let mut command = self.compiler();
            command.args([
                "-shared",
                &format!("-Wl,-soname,{name}"),
                "-Wl,--no-as-needed",
                "-Wl,-rpath,$ORIGIN",
                "-o",
            ]);
            run(command.arg(folder.join(name)).arg(&empty).arg(&all));
            for other in others {
                std::os::unix::fs::symlink(name, folder.join(other))
                    .unwrap_or_else(|e| panic!("{other}: {e}"));
            }
        }
    }
}

fn write_if_changed(path: &Path, text: &str) {
    if fs::read_to_string(path).is_ok_and(|old| old == text) {
        return;
    }
    fs::write(path, text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}

fn run(command: &mut Command) -> String {
    let out = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(out.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// Runs the jobs on as many threads as cargo allows.
fn in_parallel(jobs: &[Box<dyn Fn() -> PathBuf + Send + Sync + '_>]) -> Vec<PathBuf> {
    let threads = std::env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1usize).max(1);
    let next = Mutex::new(0);
    let done = Mutex::new(vec![PathBuf::new(); jobs.len()]);
    std::thread::scope(|scope| {
        for _ in 0..threads.min(jobs.len()) {
            scope.spawn(|| {
                loop {
                    let mut at = next.lock().unwrap_or_else(|e| e.into_inner());
                    let i = *at;
                    *at += 1;
                    drop(at);
                    let Some(job) = jobs.get(i) else { return };
                    let object = job();
                    done.lock().unwrap_or_else(|e| e.into_inner())[i] = object;
                }
            });
        }
    });
    done.into_inner().unwrap_or_else(|e| e.into_inner())
}

/// `extern "C" __global__ void NAME(` with an optional `__launch_bounds__(...)` on either side of `void`.
fn find_kernels(text: &str) -> Vec<Kernel> {
    let text = one_line(text);
    let mut kernels = Vec::new();
    let mut rest = text.as_str();
    while let Some(at) = rest.find("extern \"C\"") {
        rest = &rest[at + "extern \"C\"".len()..];
        let Some(mut head) = rest.trim_start().strip_prefix("__global__") else { continue };
        let mut bounds = None;
        let name = loop {
            head = head.trim_start();
            let word =
                head.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or_default();
            head = &head[word.len()..];
            match word {
                "void" => {}
                "__launch_bounds__" => {
                    let Some(close) = head.find(')') else { break "" };
                    bounds = Some(head[..close].trim_start().trim_start_matches('(').to_string());
                    head = &head[close + 1..];
                }
                name => break name,
            }
        };
        if !name.is_empty() && head.trim_start().starts_with('(') {
            kernels.push(Kernel { name: name.to_string(), bounds });
        }
    }
    kernels
}

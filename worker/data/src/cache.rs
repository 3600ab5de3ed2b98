//! Unpacked or parsed data, once per host: the first process that loads it writes the values to a file in the
//! user's cache, and all processes map that file ([`crate::values`]).
//!
//! ```text
//!  PARAFT_CACHE, or $XDG_CACHE_HOME/paraft, or ~/.cache/paraft
//!    lock                      held while a data set is made: the others wait and find it
//!    <name>.data               magic | length, description as JSON | labels, values of the training part, of the test part | XXH3
//! ```
//!
//! The name is a hash of the sources' paths, their file-system metadata (device, inode, length, time of the last
//! change) and the reader's options: a replaced source has another name. A file whose hash does not match is made
//! again. Files unused for 30 days are removed when another is made.
//!
//! Sources below 1 MiB need no file, and are kept in memory. The same holds for all data if the cache cannot be
//! written (`PARAFT_CACHE=` disables it): the job is the same, only each process holds a copy.

mod file;

use crate::{DataError, Split};
use file::{open, write};
use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::Xxh3;

/// Smaller sources are read by each process separately.
const SMALL: u64 = 1 << 20;
const MAGIC: &[u8; 8] = b"PARAFTD1";
const MAX_UNUSED_AGE: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// The folder of unpacked data.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    /// The user's cache, from the environment.
    pub fn of_user() -> Self {
        let var = |name| std::env::var_os(name);
        let folder = match var("PARAFT_CACHE") {
            Some(folder) => Some(PathBuf::from(folder)),
            None => {
                let home = || var("HOME").map(|h| Path::new(&h).join(".cache"));
                var("XDG_CACHE_HOME").map(PathBuf::from).or_else(home).map(|c| c.join("paraft"))
            }
        };
        Self { folder: folder.filter(|f| f.is_absolute()) }
    }

    /// A cache in this folder, which is created.
    pub fn at(folder: &Path) -> Self {
        Self { folder: Some(folder.to_path_buf()) }
    }

    /// No cache files: everything is kept in memory.
    pub fn none() -> Self {
        Self { folder: None }
    }

    /// The result of `read` on the sources, from a file if one exists or can be made. `how` names the reader's
    /// options.
    pub(crate) fn split(
        &self,
        sources: &[&Path],
        how: &str,
        read: impl FnOnce() -> Result<Split, DataError>,
    ) -> Result<Split, DataError> {
        let (Some(folder), Ok((name, bytes))) = (&self.folder, name_of(sources, how)) else { return read() };
        if bytes < SMALL {
            return read();
        }
        let path = folder.join(name).with_extension("data");
        if let Ok(split) = open(&path) {
            return Ok(split);
        }
        let lock = lock(folder);
        if lock.is_ok()
            && let Ok(split) = open(&path)
        {
            return Ok(split);
        }
        let split = read()?;
        // Without a file the data is still available.
        let made = lock.and_then(|_held| {
            clear(folder);
            write(&path, &split)?;
            open(&path)
        });
        Ok(made.unwrap_or(split))
    }
}

/// The name for these files and options, and the files' bytes.
fn name_of(sources: &[&Path], how: &str) -> io::Result<(String, u64)> {
    let (mut hash, mut bytes) = (Xxh3::new(), 0);
    hash.update(MAGIC);
    hash.update(how.as_bytes());
    for source in sources {
        let path = source.canonicalize()?;
        let meta = fs::metadata(&path)?;
        hash.update(path.as_os_str().as_bytes());
        for n in [meta.dev(), meta.ino(), meta.len(), meta.mtime() as u64, meta.mtime_nsec() as u64] {
            hash.update(&n.to_le_bytes());
        }
        bytes += meta.len();
    }
    Ok((format!("{:032x}", hash.digest128()), bytes))
}

/// How long to wait for another process to make a file. After that the data is read without a file.
const LOCK_TIMEOUT: Duration = Duration::from_secs(60);
/// After this wait the user is notified.
const WORD: Duration = Duration::from_secs(3);

/// Waits until no other process makes a file. None does until the result is dropped.
fn lock(folder: &Path) -> io::Result<File> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let lock = File::options().create(true).truncate(false).write(true).open(folder.join("lock"))?;
    let began = Instant::now();
    let mut said = false;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(TryLockError::Error(e)) => return Err(e),
            Err(TryLockError::WouldBlock) if began.elapsed() >= LOCK_TIMEOUT => {
                return Err(ErrorKind::TimedOut.into());
            }
            Err(TryLockError::WouldBlock) => {}
        }
        if began.elapsed() >= WORD && !std::mem::replace(&mut said, true) {
            tracing::warn!(folder = %folder.display(), "waiting for another process that reads data into the cache");
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Removes files that are long unused, and the leftovers of killed processes.
fn clear(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let ours = entry.path().extension().is_some_and(|e| e == "data" || e == "part");
        let used = entry.metadata().and_then(|m| m.modified());
        if ours && used.is_ok_and(|t| t.elapsed().is_ok_and(|age| age > MAX_UNUSED_AGE)) {
            let _ = fs::remove_file(entry.path()); // another process may have been faster
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::Samples;
    use crate::{Dataset, TextCorpus, TextVocab};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::SystemTime;

    fn splits() -> [Split; 3] {
        let bytes = |n: u32| {
            let values = (0..6 * n).map(|i| (i * 7) as u8).collect();
            let labels = (0..n).map(|i| i % 5).collect();
            Dataset::new(Samples::Bytes { values, divisor: 255.0 }, vec![1, 2, 3], Some((labels, 5)))
        };
        let floats = |n: u32| {
            let values = (0..4 * n).map(|i| 1.0 / (i as f32 + 0.3)).collect();
            Dataset::new(Samples::Floats(values), vec![4], None)
        };
        let text = |n| TextCorpus::new(&"so it goes. ".repeat(n), TextVocab::Char, 9).and_then(Dataset::text);
        let split = |train: Result<Dataset, DataError>, test: Result<Dataset, DataError>| Split {
            train: train.expect("fits"),
            test: test.expect("fits"),
        };
        [split(bytes(100), bytes(7)), split(floats(1000), floats(1)), split(text(50), text(4))]
    }

    fn batch(data: &Dataset) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
        let indices: Vec<u32> = (0..data.len() as u32).rev().chain([0, 0]).collect();
        let (mut inputs, mut tokens, mut labels) = (Vec::new(), Vec::new(), Vec::new());
        data.fill(&indices, &mut inputs, &mut tokens, &mut labels).expect("there");
        (inputs.iter().map(|v| v.to_bits()).collect(), tokens, labels)
    }

    fn same(a: &Split, b: &Split) {
        for (a, b) in [(&a.train, &b.train), (&a.test, &b.test)] {
            assert_eq!(batch(a), batch(b));
            assert_eq!(
                (a.shape(), a.classes(), a.vocab(), a.len()),
                (b.shape(), b.classes(), b.vocab(), b.len())
            );
            assert_eq!(a.labels(), b.labels());
        }
        assert_eq!(a.digest().expect("there"), b.digest().expect("there"));
    }

    /// A source just large enough for a file.
    fn source(folder: &Path) -> PathBuf {
        let path = folder.join("source");
        fs::write(&path, vec![0; SMALL as usize]).expect("writes");
        path
    }

    fn files(folder: &Path) -> Vec<PathBuf> {
        let all = fs::read_dir(folder).map(|d| d.flatten().map(|e| e.path()).collect());
        let all: Vec<PathBuf> = all.unwrap_or_default();
        all.into_iter().filter(|p| p.extension().is_some_and(|e| e == "data")).collect()
    }

    #[test]
    fn what_is_read_from_the_file_is_what_was_read_from_the_source() {
        for made in splits() {
            let dir = tempfile::tempdir().expect("temp dir");
            let (source, cache) = (source(dir.path()), Cache::at(&dir.path().join("cache")));
            let first = cache.split(&[&source], "how", || Ok(made.clone())).expect("made");
            same(&made, &first);
            assert!(matches!(first.train.samples(), Samples::File(_)), "the maker reads the file too");
            let second = cache.split(&[&source], "how", || panic!("a second time")).expect("there");
            same(&made, &second);
            // Other options, or another file of the same name, are other data.
            for (how, text) in [("other", None), ("how", Some(vec![1; SMALL as usize + 1]))] {
                text.into_iter().for_each(|t| fs::write(&source, t).expect("writes"));
                let asked = AtomicUsize::new(0);
                let again = || {
                    asked.fetch_add(1, Ordering::SeqCst);
                    Ok(made.clone())
                };
                cache.split(&[&source], how, again).expect("made");
                assert_eq!(asked.into_inner(), 1, "{how}");
            }
        }
    }

    #[test]
    fn a_file_with_any_byte_changed_or_cut_off_is_made_again() {
        let [made, ..] = splits();
        let dir = tempfile::tempdir().expect("temp dir");
        let (source, folder) = (source(dir.path()), dir.path().join("cache"));
        let cache = Cache::at(&folder);
        cache.split(&[&source], "how", || Ok(made.clone())).expect("made");
        let path = files(&folder).pop().expect("a file");
        let whole = fs::read(&path).expect("reads");
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            fs::write(&path, &changed).expect("writes");
            assert!(open(&path).is_err(), "byte {at}");
            fs::write(&path, &whole[..at]).expect("writes");
            assert!(open(&path).is_err(), "cut off at {at}");
        }
        same(&made, &cache.split(&[&source], "how", || Ok(made.clone())).expect("made again"));
        same(&made, &open(&path).expect("whole again"));
    }

    #[test]
    fn without_cache_or_with_little_data_it_stays_in_memory() {
        let [made, ..] = splits();
        let dir = tempfile::tempdir().expect("temp dir");
        let source = source(dir.path());
        let no_folder = Cache::at(&source.join("a file is no folder"));
        let small = dir.path().join("small");
        fs::write(&small, "1").expect("writes");
        for (cache, source) in
            [(&Cache::none(), &source), (&no_folder, &source), (&Cache::at(&dir.path().join("c")), &small)]
        {
            let split = cache.split(&[source], "how", || Ok(made.clone())).expect("made");
            assert_eq!(split, made);
        }
        assert!(!dir.path().join("c").exists());
        let cache = Cache::at(&dir.path().join("c"));
        let error = cache.split(&[&source], "how", || Err(DataError::Mismatch("no".into())));
        assert!(matches!(error, Err(DataError::Mismatch(_))));
    }

    #[test]
    fn many_at_once_make_it_once() {
        let [made, ..] = splits();
        let dir = tempfile::tempdir().expect("temp dir");
        let (source, cache) = (source(dir.path()), Cache::at(&dir.path().join("cache")));
        let times = AtomicUsize::new(0);
        std::thread::scope(|s| {
            for _ in 0..8 {
                s.spawn(|| {
                    let make = || {
                        times.fetch_add(1, Ordering::SeqCst);
                        std::thread::sleep(Duration::from_millis(50));
                        Ok(made.clone())
                    };
                    same(&made, &cache.split(&[&source], "how", make).expect("there"));
                });
            }
        });
        assert_eq!(times.into_inner(), 1);
    }

    #[test]
    fn an_unused_file_is_removed_when_another_is_made() {
        let [made, ..] = splits();
        let dir = tempfile::tempdir().expect("temp dir");
        let (source, folder) = (source(dir.path()), dir.path().join("cache"));
        let cache = Cache::at(&folder);
        let used_before = |ago: Duration, path: &Path| {
            let file = File::options().write(true).open(path).expect("opens");
            file.set_modified(SystemTime::now() - ago).expect("ours");
        };
        for (how, ago, left) in
            [("a", Duration::ZERO, 1), ("b", MAX_UNUSED_AGE * 2, 2), ("c", Duration::ZERO, 2)]
        {
            cache.split(&[&source], how, || Ok(made.clone())).expect("made");
            assert_eq!(files(&folder).len(), left, "{how}");
            let (name, _) = name_of(&[&source], how).expect("there");
            used_before(ago, &folder.join(name).with_extension("data"));
        }
    }

    #[test]
    fn removed_or_replaced_cache_file_stays_readable() {
        let [made, other, _] = splits();
        let dir = tempfile::tempdir().expect("temp dir");
        let (source, folder) = (source(dir.path()), dir.path().join("cache"));
        let cache = Cache::at(&folder);
        let split = cache.split(&[&source], "how", || Ok(made.clone())).expect("made");
        let path = files(&folder).pop().expect("a file");
        write(&path, &other).expect("another in its place");
        same(&made, &split);
        fs::remove_file(&path).expect("removes");
        same(&made, &split);
    }
}

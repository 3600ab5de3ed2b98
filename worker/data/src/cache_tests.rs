//! Tests of `cache`.

use super::*;
use crate::dataset::Samples;
use crate::{Dataset, TextCorpus};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

fn splits() -> [Split; 4] {
    let bytes = |n: u32| {
        let values = (0..6 * n).map(|i| (i * 7) as u8).collect();
        let labels = (0..n).map(|i| i % 5).collect();
        Dataset::new(Samples::Bytes { values, divisor: 255.0 }, vec![1, 2, 3], Some((labels, 5)))
    };
    let floats = |n: u32| {
        let values = (0..4 * n).map(|i| 1.0 / (i as f32 + 0.3)).collect();
        Dataset::new(Samples::Floats(values), vec![4], None)
    };
    let numbers = |n: u16| {
        let targets: Vec<f32> = (0..n).map(|i| f32::from(i) - 3.5).collect();
        Dataset::with_targets(Samples::Floats(vec![1.5; 2 * targets.len()]), vec![2], &targets)
    };
    let text = |n| TextCorpus::new(&"so it goes. ".repeat(n), 9).and_then(Dataset::text);
    let split = |train: Result<Dataset, DataError>, test: Result<Dataset, DataError>| Split {
        train: train.expect("fits"),
        test: test.expect("fits"),
    };
    [
        split(bytes(100), bytes(7)),
        split(floats(1000), floats(1)),
        split(numbers(20), numbers(3)),
        split(text(50), text(4)),
    ]
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
            (a.shape(), a.classes(), a.has_targets(), a.vocab(), a.len()),
            (b.shape(), b.classes(), b.has_targets(), b.vocab(), b.len())
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
    for (how, ago, left) in [("a", Duration::ZERO, 1), ("b", MAX_UNUSED_AGE * 2, 2), ("c", Duration::ZERO, 2)]
    {
        cache.split(&[&source], how, || Ok(made.clone())).expect("made");
        assert_eq!(files(&folder).len(), left, "{how}");
        let (name, _) = name_of(&[&source], how).expect("there");
        used_before(ago, &folder.join(name).with_extension("data"));
    }
}

#[test]
fn removed_or_replaced_cache_file_stays_readable() {
    let [made, other, ..] = splits();
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

//! What a replicated push is compared with: the same bytes, copied once for each replica by the plainest means.
//! Copies *at once* are the fair baseline, since a leader sends to both followers while it receives the next push.

use super::{
    far::FarSide,
    load::Via,
    meter::{Meter, median_of},
    raw::{Raw, Reference},
};
use paraft_fleet::failure::Failure;
use paraft_worker::exit;
use std::{
    fs::File,
    io::{self, Seek, Write},
    path::Path,
    sync::atomic::AtomicI32,
    thread,
    time::Duration,
};

/// A bare file starts again after this many bytes: the disk need not hold more.
const FILE_BYTES: usize = 256 << 20;
/// Bytes of a write, as of an entry of a log.
const WRITE_BYTES: usize = 1 << 20;

/// Bytes per second of copies that end when the last of them has ended; each byte counts once.
fn at_once<T: Send>(
    to: &mut [T],
    bytes: usize,
    time: Duration,
    interrupted: &AtomicI32,
    copy: impl Fn(&mut T) -> Result<(), Failure> + Sync,
) -> Result<f64, Failure> {
    to.iter_mut().try_for_each(&copy)?;
    let took = median_of(time, interrupted, || {
        Meter::new([]).time(|| {
            thread::scope(|s| {
                let threads: Vec<_> = to.iter_mut().map(|one| s.spawn(|| copy(one))).collect();
                let panicked = |_| Failure::new(exit::FAILED, "a copy panicked");
                threads.into_iter().try_for_each(|t| t.join().map_err(panicked)?)
            })
        })
    })?;
    Ok(bytes as f64 / took.seconds)
}

/// Connections to these far sides.
fn connect(to: &[FarSide], reference: Reference) -> Result<Vec<Raw>, Failure> {
    to.iter().map(|side| Raw::connect(side, reference)).collect()
}

/// A transfer to each far side, all at the same time, in bytes per second.
pub fn sent_at_once(
    to: &[FarSide],
    reference: Reference,
    payload: &[u8],
    time: Duration,
    interrupted: &AtomicI32,
) -> Result<f64, Failure> {
    at_once(&mut connect(to, reference)?, payload.len(), time, interrupted, |raw| raw.push(payload))
}

/// A transfer to each far side, one after the other, in bytes per second.
pub fn sent_in_turn(
    to: &[FarSide],
    payload: &[u8],
    time: Duration,
    interrupted: &AtomicI32,
) -> Result<f64, Failure> {
    let mut raws = connect(to, Reference::Plain(Via::Tcp))?;
    let took = median_of(time, interrupted, || {
        Meter::new([]).time(|| raws.iter_mut().try_for_each(|raw| raw.push(payload)))
    })?;
    Ok(payload.len() as f64 / took.seconds)
}

/// The payload in so many files of this folder, all at the same time, each with one fsync, in bytes per second.
pub fn written_at_once(
    files: u32,
    dir: &Path,
    payload: &[u8],
    time: Duration,
    interrupted: &AtomicI32,
) -> Result<f64, Failure> {
    let failed = |e: io::Error| Failure::new(exit::IO, format!("{}: {e}", dir.display()));
    std::fs::create_dir_all(dir).map_err(failed)?;
    let open = |i| File::create(dir.join(format!("bare-{i}"))).map_err(failed);
    let mut files: Vec<File> = (0..files).map(open).collect::<Result<_, _>>()?;
    at_once(&mut files, payload.len(), time, interrupted, |file| {
        let write = |file: &mut File| {
            if file.stream_position()? as usize + payload.len() > FILE_BYTES {
                file.rewind()?;
            }
            payload.chunks(WRITE_BYTES).try_for_each(|part| file.write_all(part))?;
            file.sync_data()
        };
        write(file).map_err(failed)
    })
}

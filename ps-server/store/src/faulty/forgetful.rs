//! An in-memory disk that loses unsynced data.

use crate::disk::{Access, Disk, DiskFile, DiskLock};
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, IoSlice},
    mem,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Sector size: a crash keeps or loses each sector as a whole.
const SECTOR_BYTES: usize = 512;

/// The unsynced data that survives a power failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survivors {
    /// Nothing.
    Synced,
    /// Everything, as when only the process died.
    Everything,
    /// Each sector, each size change and each name change by a coin toss from this seed: disks and file systems
    /// write in any order.
    Some(u64),
}

/// An in-memory file system. It separates what the process sees from what a power failure would leave: contents
/// become durable by [`DiskFile::sync`], names by [`Disk::sync_dir`]. Folders are durable at once. Clones share the
/// disk.
#[derive(Clone, Debug, Default)]
pub struct ForgetfulDisk {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    nodes: Vec<Node>,
    names: Names,
    durable_names: Names,
    /// Name changes since their folder was synced, oldest first.
    renamed: Vec<NameChange>,
    dirs: BTreeSet<PathBuf>,
    locks: BTreeSet<PathBuf>,
    failing_syncs: u32,
}

/// The file of each name.
type Names = BTreeMap<PathBuf, usize>;

#[derive(Clone, Debug)]
struct NameChange {
    gone: Option<PathBuf>,
    new: Option<(PathBuf, usize)>,
}

#[derive(Clone, Debug, Default)]
struct Node {
    seen: Vec<u8>,
    durable: Vec<u8>,
    /// Changes since the last sync, oldest first.
    pending: Vec<Change>,
}

#[derive(Clone, Debug)]
enum Change {
    Write { offset: usize, bytes: Vec<u8> },
    SetLen(usize),
    Allocate(usize),
}

impl Change {
    fn apply(&self, to: &mut Vec<u8>) {
        match self {
            Change::Write { offset, bytes } => {
                let end = offset + bytes.len();
                to.resize(to.len().max(end), 0);
                to[*offset..end].copy_from_slice(bytes);
            }
            Change::SetLen(size) => to.resize(*size, 0),
            Change::Allocate(size) => to.resize(to.len().max(*size), 0),
        }
    }

    /// The parts that reach the medium independently of each other.
    fn parts(&self) -> Vec<Change> {
        let Change::Write { offset, bytes } = self else { return vec![self.clone()] };
        let (mut parts, mut at) = (Vec::new(), 0);
        while at < bytes.len() {
            let end = bytes.len().min(at + SECTOR_BYTES - (offset + at) % SECTOR_BYTES);
            parts.push(Change::Write { offset: offset + at, bytes: bytes[at..end].to_vec() });
            at = end;
        }
        parts
    }
}

impl NameChange {
    fn apply(&self, to: &mut Names) {
        if let Some(gone) = &self.gone {
            to.remove(gone);
        }
        to.extend(self.new.clone());
    }

    fn is_in(&self, dir: &Path) -> bool {
        let path = self.gone.as_deref().or(self.new.as_ref().map(|(path, _)| path.as_path()));
        path.and_then(Path::parent) == Some(dir)
    }
}

impl State {
    fn change_name(&mut self, change: NameChange) {
        change.apply(&mut self.names);
        self.renamed.push(change);
    }

    fn change(&mut self, node: usize, change: Change) {
        let node = &mut self.nodes[node];
        change.apply(&mut node.seen);
        node.pending.push(change);
    }
}

fn missing(path: &Path) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("no file {}", path.display()))
}

/// Coin tosses, equal for equal seeds (SplitMix64).
struct Coins(u64);

impl Coins {
    fn toss(&mut self) -> bool {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) & 1 == 1
    }
}

impl ForgetfulDisk {
    /// The disk after a power failure at this moment. This disk does not change.
    pub fn crash(&self, survivors: Survivors) -> ForgetfulDisk {
        let mut coins = Coins(if let Survivors::Some(seed) = survivors { seed } else { 0 });
        let mut survives = || match survivors {
            Survivors::Synced => false,
            Survivors::Everything => true,
            Survivors::Some(_) => coins.toss(),
        };
        let state = self.state.lock();
        let mut after =
            State { dirs: state.dirs.clone(), names: state.durable_names.clone(), ..State::default() };
        for change in state.renamed.iter().filter(|_| survives()) {
            change.apply(&mut after.names);
        }
        after.durable_names = after.names.clone();
        for node in &state.nodes {
            let mut found = node.durable.clone();
            if survivors == Survivors::Everything {
                found.clone_from(&node.seen); // the page cache survives, regardless of syncs
            } else {
                let parts = node.pending.iter().flat_map(Change::parts);
                parts.filter(|_| survives()).for_each(|part| part.apply(&mut found));
            }
            after.nodes.push(Node { durable: found.clone(), seen: found, pending: Vec::new() });
        }
        ForgetfulDisk { state: Arc::new(Mutex::new(after)) }
    }

    /// Makes the next `times` syncs of files fail as Linux does after a write error: the data stays readable and
    /// counts as written, but never reaches the medium.
    pub fn fail_syncs(&self, times: u32) {
        self.state.lock().failing_syncs = times;
    }

    /// The contents of the file `path`, as the process sees them.
    pub fn contents(&self, path: &Path) -> Option<Vec<u8>> {
        let state = self.state.lock();
        state.names.get(path).map(|node| state.nodes[*node].seen.clone())
    }

    /// Sets the contents of `path`, durably, to simulate damage.
    pub fn put(&self, path: &Path, contents: Vec<u8>) {
        let mut state = self.state.lock();
        let node = state.nodes.len();
        state.nodes.push(Node { seen: contents.clone(), durable: contents, pending: Vec::new() });
        state.names.insert(path.to_path_buf(), node);
        state.durable_names.insert(path.to_path_buf(), node);
    }
}

impl Disk for ForgetfulDisk {
    fn create_dir_all(&self, dir: &Path) -> io::Result<()> {
        self.state.lock().dirs.extend(dir.ancestors().map(Path::to_path_buf));
        Ok(())
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        let state = self.state.lock();
        if !state.dirs.contains(dir) {
            return Err(missing(dir));
        }
        let inside = state.names.keys().filter(|path| path.parent() == Some(dir));
        Ok(inside.filter_map(|path| path.file_name()?.to_str().map(str::to_string)).collect())
    }

    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn DiskFile>> {
        let mut state = self.state.lock();
        let node = match (state.names.get(path).copied(), access) {
            (Some(node), Access::Create) => {
                state.change(node, Change::SetLen(0));
                node
            }
            (Some(node), _) => node,
            (None, Access::Create | Access::Append) => {
                let node = state.nodes.len();
                state.nodes.push(Node::default());
                state.change_name(NameChange { gone: None, new: Some((path.to_path_buf(), node)) });
                node
            }
            (None, _) => return Err(missing(path)),
        };
        Ok(Box::new(ForgetfulFile { state: self.state.clone(), node, writable: access != Access::Read }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.state.lock();
        let node = state.names.get(from).copied().ok_or_else(|| missing(from))?;
        state.change_name(NameChange { gone: Some(from.to_path_buf()), new: Some((to.to_path_buf(), node)) });
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state.lock();
        if !state.names.contains_key(path) {
            return Err(missing(path));
        }
        state.change_name(NameChange { gone: Some(path.to_path_buf()), new: None });
        Ok(())
    }

    fn remove_dir_all(&self, dir: &Path) -> io::Result<()> {
        let mut state = self.state.lock();
        if !state.dirs.contains(dir) {
            return Err(missing(dir));
        }
        let inside: Vec<PathBuf> = state.names.keys().filter(|path| path.starts_with(dir)).cloned().collect();
        inside.into_iter().for_each(|path| state.change_name(NameChange { gone: Some(path), new: None }));
        state.dirs.retain(|known| !known.starts_with(dir));
        Ok(())
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        let mut state = self.state.lock();
        let (now, later) = mem::take(&mut state.renamed).into_iter().partition(|change| change.is_in(dir));
        state.renamed = later;
        let now: Vec<NameChange> = now;
        now.iter().for_each(|change| change.apply(&mut state.durable_names));
        Ok(())
    }

    fn lock(&self, path: &Path) -> io::Result<DiskLock> {
        if !self.state.lock().locks.insert(path.to_path_buf()) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(Box::new(HeldLock { state: self.state.clone(), path: path.to_path_buf() }))
    }
}

#[derive(Debug)]
struct HeldLock {
    state: Arc<Mutex<State>>,
    path: PathBuf,
}

impl Drop for HeldLock {
    fn drop(&mut self) {
        self.state.lock().locks.remove(&self.path);
    }
}

#[derive(Debug)]
struct ForgetfulFile {
    state: Arc<Mutex<State>>,
    node: usize,
    writable: bool,
}

impl ForgetfulFile {
    fn change(&self, change: Change) -> io::Result<()> {
        if !self.writable {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "opened for reading"));
        }
        self.state.lock().change(self.node, change);
        Ok(())
    }
}

impl DiskFile for ForgetfulFile {
    fn size(&self) -> io::Result<u64> {
        Ok(self.state.lock().nodes[self.node].seen.len() as u64)
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let state = self.state.lock();
        let found = state.nodes[self.node].seen.get(offset as usize..offset as usize + into.len());
        into.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_at(&mut self, offset: u64, parts: &mut [IoSlice<'_>]) -> io::Result<()> {
        let bytes = parts.iter().flat_map(|part| part.iter().copied()).collect();
        self.change(Change::Write { offset: offset as usize, bytes })
    }

    fn set_len(&mut self, size: u64) -> io::Result<()> {
        self.change(Change::SetLen(size as usize))
    }

    fn allocate(&mut self, size: u64) -> io::Result<()> {
        self.change(Change::Allocate(size as usize))
    }

    fn sync(&mut self) -> io::Result<()> {
        let mut state = self.state.lock();
        let fails = state.failing_syncs > 0;
        state.failing_syncs -= u32::from(fails);
        let node = &mut state.nodes[self.node];
        let pending = mem::take(&mut node.pending);
        if fails {
            return Err(io::Error::other("the sync failed (on purpose)"));
        }
        pending.iter().for_each(|change| change.apply(&mut node.durable));
        Ok(())
    }
}

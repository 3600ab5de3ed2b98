//! What servers replicate: headers, commands, images, the folder of a replica.

use crate::input::Input;
use bytes::Bytes;
use paraft_common::{JobShard, Payload, ShardId, config::ServerJob};
use paraft_server::{
    control::{Agreed, Command, Identity},
    header,
    raft::{RawImage, Replicated, fuzzing},
    replay,
    replicated::Change,
    shard::{self, Proposal, Shard, cut::Cut},
};
use paraft_store::{Disk, LogOptions, Record, SharedLog, faulty::ForgetfulDisk, write_small};
use std::{path::Path, sync::Arc};

/// A header that a peer sent, as every kind that there is, with up to three payloads beside it.
pub fn peer(data: &[u8]) {
    let mut input = Input(data);
    let payloads: Vec<Payload> =
        (0..input.byte() % 4).map(|_| usize::from(input.byte())).map(|n| vec![7; n].into()).collect();
    let header = input.rest();
    fuzzing::read_as_anything(header, &payloads);
    for_sake_of_format(header, |h| fuzzing::read_as_anything(h, &payloads));
    let _ = header::decode::<Identity>(header);
}

/// Once more with the byte of format right, which stands before every header.
fn for_sake_of_format(header: &[u8], read: impl Fn(&[u8])) {
    if header.first().is_some_and(|f| *f != header::FORMAT) {
        read(&[&[header::FORMAT], header].concat());
    }
}

/// A snapshot of the control group's state, then commands.
pub fn control_state(data: &[u8]) {
    let mut input = Input(data);
    let agreed = Agreed::default();
    let head = input.part();
    if !head.is_empty()
        && agreed.install(&RawImage { head: head.to_vec().into(), parts: Vec::new() }).is_err()
    {
        assert_eq!(agreed.get(), Default::default(), "an error changes nothing");
    }
    while !input.is_empty() {
        if let Ok(command) = header::decode::<Command>(input.part()) {
            agreed.apply(&command).expect("it needs no memory to speak of");
        }
    }
    there_and_back(&agreed, &Agreed::default());
}

/// Another replica that installs a state's image has the same state.
fn there_and_back<S: Replicated>(state: &S, other: &S) {
    let image = state.image();
    other.install(&image).expect("its own image");
    assert_eq!(other.image(), image);
}

/// A shard's image, then commands with their bulk.
pub fn shard_state(data: &[u8]) {
    let mut input = Input(data);
    let shards = 1 + u32::from(input.byte() % 3);
    let shard = Shard::new(ShardId(0), shards);
    let head = input.part();
    if !head.is_empty() {
        let part = |input: &mut Input<'_>| Payload::from(input.part().to_vec());
        let parts: Vec<_> = (0..input.byte() % 16).map(|_| part(&mut input).into()).collect();
        let raw = RawImage { head: head.to_vec().into(), parts };
        if let Ok(cut) = Cut::from_raw(&raw.head, raw.parts.iter().map(|part| Ok(part.read()))) {
            assert_eq!(cut.to_raw(), raw, "there is one way to write it");
        }
        if shard.install_raw(&raw).is_err() {
            assert_eq!(Replicated::image(&shard), Replicated::image(&Shard::new(ShardId(0), shards)));
        }
    }
    while !input.is_empty() {
        let (header, payload) = (input.part(), input.part());
        let Ok(proposal) = header::decode::<Proposal>(header) else { continue };
        if is_small(&proposal) {
            shard.apply(&Proposal { payload: payload.to_vec().into(), ..proposal });
        }
    }
    there_and_back(&shard, &Shard::new(ShardId(0), shards));
}

trait InstallRaw {
    fn install_raw(&self, raw: &RawImage) -> Result<(), String>;
}

impl InstallRaw for Shard {
    fn install_raw(&self, raw: &RawImage) -> Result<(), String> {
        Replicated::install(self, raw).map_err(|e| e.to_string())
    }
}

/// Not a job whose weights fill the memory of the fuzzer: servers take jobs of up to 64 GiB.
fn is_small(proposal: &Proposal) -> bool {
    let shard::Command::Admit { job, .. } = &proposal.command else {
        return true;
    };
    ServerJob::decode(job).is_ok_and(|j| j.params_len + j.buffers_len + j.results_len <= 1 << 16)
}

const FOLDER: &str = "/data/shard-0";
/// Of its group in the server's log.
const KEY: u64 = 7;

/// The folder of a replica that does not run, with checksums that are right: its metadata, its snapshot, the headers and
/// payloads of its log. Bits: metadata as it comes, snapshot, purge point.
pub fn replica(data: &[u8]) {
    let mut input = Input(data);
    let how = input.byte();
    let disk = ForgetfulDisk::default();
    let folder = Path::new(FOLDER);
    disk.create_dir_all(folder).expect("in memory");
    let metadata = if how & 1 > 0 { input.part().to_vec() } else { metadata() };
    write_small(&disk, &folder.join("replica"), &metadata).expect("in memory");
    write_small(&disk, Path::new("/data/identity"), &metadata).expect("in memory");
    if how & 2 > 0 {
        let shared: Arc<dyn Disk> = Arc::new(disk.clone());
        let mut file =
            paraft_store::SnapshotWriter::create(shared, &folder.join("snapshot")).expect("in memory");
        for _ in 0..=input.byte() % 16 {
            file.push(&input.part().to_vec().into()).expect("in memory");
        }
        file.finish().expect("in memory");
    }
    let purged = (how & 4 > 0).then(|| (u64::from(input.word()), input.part()));
    let first = purged.map_or(0, |(upto, _)| upto + 1);
    let mut records = Vec::new();
    while !input.is_empty() {
        let (header, payload) = (input.part(), input.part());
        if let Some(Change::Shard(proposal)) = fuzzing::change_of(header)
            && !is_small(&proposal)
        {
            return;
        }
        let index = first + records.len() as u64;
        let header = Bytes::copy_from_slice(header);
        records.push(Record { index, header, payload: payload.to_vec().into() });
    }
    let place = header::encode(&(None::<u64>, Some(KEY))).expect("two numbers");
    write_small(&disk, &folder.join("log-place"), &place).expect("in memory");
    // No segment is written in full: the disk is memory.
    let options = LogOptions { segment_bytes: 4096, sync: true };
    let (log, _) =
        SharedLog::open(Arc::new(disk.clone()), Path::new("/data/log"), options).expect("in memory");
    let (own, _) = log.group(KEY, &mut |_| ()).expect("a new one");
    if let Some((upto, tag)) = purged
        && own.purge(upto, Bytes::copy_from_slice(tag)).is_err()
    {
        return;
    }
    // What is too long for a log is not written.
    own.append(records, Box::new(|_| ()));
    drop(own);
    log.close();
    let shared: Arc<dyn Disk> = Arc::new(disk);
    let _ = replay::fleet_of(shared.clone(), Path::new("/data"));
    let Ok(whole) = replay::replay(shared.clone(), JobShard::default(), folder, u64::MAX) else { return };
    let again = replay::replay(shared, JobShard::default(), folder, u64::MAX).expect("as before");
    assert_eq!(again.replayed, whole.replayed, "the same log, the same digests");
    there_and_back(&*whole.shard, &Shard::new(ShardId(0), whole.shards));
}

/// A replica's metadata, as `replicas` writes it, for shard 0 of 1: node, founding, shards.
fn metadata() -> Vec<u8> {
    header::encode(&(1u64 << 32 | 1, 5u64, 1u32)).expect("three numbers")
}

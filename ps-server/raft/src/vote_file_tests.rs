//! Tests of votes on a disk that forgets, and fails.

use super::*;
use crate::{logs::Logs, wire};
use paraft_store::{
    faulty::{FaultyDisk, ForgetfulDisk, Survivors},
    files::DataFile,
    read_pair,
};
use std::path::{Path, PathBuf};

const FOLDER: &str = "/server/shard-0";

struct OnDisk {
    memory: ForgetfulDisk,
    faults: FaultyDisk,
    file: VoteFile,
}

fn path() -> PathBuf {
    Path::new(FOLDER).join(DataFile::Vote.name())
}

impl OnDisk {
    fn new() -> Self {
        let memory = ForgetfulDisk::default();
        let faults = FaultyDisk::new(Arc::new(memory.clone()));
        let folder = Folder::within(&Logs::new(Arc::new(faults.clone()), Path::new("/server")), FOLDER);
        Self { memory, faults, file: VoteFile::new(folder) }
    }

    /// Writes the vote; returns whether the caller had to wait.
    async fn write(&self, vote: Vote) -> io::Result<bool> {
        match self.file.write(vote, wire::encode(&vote).expect("encodes")) {
            Some(durable) => durable.await.expect("answered").map(|()| true),
            None => Ok(false),
        }
    }

    /// The vote after a power failure now.
    fn after_power_failure(&self) -> Option<Vote> {
        let found = read_pair(&self.memory.crash(Survivors::Synced), &path()).expect("whole");
        found.map(|found| wire::decode(&found.bytes).expect("a vote"))
    }

    /// Waits until nothing is being written.
    async fn idle(&self) {
        let number = self.file.0.given.load(SeqCst);
        while self.file.0.written.lock().number < number {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        self.file.settle();
    }
}

#[tokio::test]
async fn vote_is_durable_before_its_answer() {
    let disk = OnDisk::new();
    for term in 1..5 {
        for vote in [Vote::new(term, 7), Vote::new(term, 8)] {
            assert!(disk.write(vote).await.expect("written"), "a promise to another candidate");
            assert_eq!(disk.after_power_failure(), Some(vote));
        }
    }
}

#[tokio::test]
async fn elected_candidate_does_not_wait_for_the_disk() {
    let disk = OnDisk::new();
    // A follower that had not voted for this leader waits.
    assert!(disk.write(Vote::new_committed(1, 7)).await.expect("written"));
    assert!(disk.write(Vote::new(2, 8)).await.expect("written"));
    assert!(!disk.write(Vote::new_committed(2, 8)).await.expect("known"));
    disk.idle().await;
    assert_eq!(disk.after_power_failure(), Some(Vote::new_committed(2, 8)), "all the same it is written");
    assert!(disk.write(Vote::new_committed(3, 8)).await.expect("written"), "another term");
}

#[tokio::test]
async fn vote_after_a_failed_one_is_durable() {
    let disk = OnDisk::new();
    assert!(disk.write(Vote::new(1, 7)).await.expect("written"));
    disk.idle().await;
    disk.faults.fail_changes(Some(28));
    assert!(disk.write(Vote::new(2, 7)).await.is_err());
    assert_eq!(disk.after_power_failure(), Some(Vote::new(1, 7)));
    assert!(disk.write(Vote::new(2, 7)).await.is_err(), "a vote that failed promises nothing");
    disk.faults.fail_changes(None);
    assert!(disk.write(Vote::new(2, 7)).await.expect("written"));
    assert_eq!(disk.after_power_failure(), Some(Vote::new(2, 7)));
    // The contents of the file are unknown after a failed sync, so it is replaced.
    disk.idle().await;
    disk.memory.fail_syncs(1);
    assert!(disk.write(Vote::new(3, 7)).await.expect("written"));
    assert_eq!(disk.after_power_failure(), Some(Vote::new(3, 7)));
}

#[tokio::test]
async fn ended_replica_writes_no_vote() {
    let disk = OnDisk::new();
    assert!(disk.write(Vote::new(1, 7)).await.expect("written"));
    disk.file.close();
    assert!(disk.write(Vote::new(2, 7)).await.is_err());
    assert_eq!(disk.after_power_failure(), Some(Vote::new(1, 7)));
}

#[tokio::test]
async fn file_does_not_change_after_the_end() {
    let disk = OnDisk::new();
    assert!(disk.write(Vote::new(1, 7)).await.expect("written"));
    disk.idle().await;
    disk.faults.slow_syncs(std::time::Duration::from_millis(30));
    assert!(disk.write(Vote::new(2, 7)).await.expect("written"));
    // Its second copy is still being written, by a thread that the end does not stop.
    disk.file.close();
    disk.file.settle();
    let file = disk.memory.contents(&path());
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    assert_eq!(disk.memory.contents(&path()), file);
}

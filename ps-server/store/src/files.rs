//! Every file that a server writes into its data folder. Nothing here writes: small files go through
//! `paraft_raft`'s `Folder::write`, which takes one of these, and all files through a
//! [`Disk`](crate::Disk), where tests make each fail. No other code of this crate writes files (a test
//! enforces that).
//!
//! ```text
//! <data>/identity, settings, audit.jsonl
//! <data>/log/              the log of all groups
//! <data>/control/          the control group's replica: vote, begun, log-place, snapshot
//! <data>/shard-3/          a shard's replica: likewise, and replica, need
//! <data>/shard-3.aside-1/  a quarantined one, with a log of its own
//! ```

use std::path::Path;

macro_rules! files {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// A kind of file.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum DataFile {
            $($(#[$doc])* $variant,)*
        }

        impl DataFile {
            /// All of them.
            pub const ALL: &[DataFile] = &[$(DataFile::$variant,)*];

            /// Its name; for a log's numbered files, the end of their names.
            pub const fn name(self) -> &'static str {
                match self {
                    $(DataFile::$variant => $name,)*
                }
            }
        }
    };
}

files! {
    /// The server and the fleet of the folder.
    Identity = "identity",
    /// The settings of a listed server when its fleet was founded.
    Settings = "settings",
    /// Administrative acts.
    Audit = "audit.jsonl",
    /// The replica of a shard's folder.
    Replica = "replica",
    /// A replica's vote.
    Vote = "vote",
    /// Marks that a replica's log has had entries.
    Begun = "begun",
    /// The place of a replica's log.
    LogPlace = "log-place",
    /// The memory need of a replica's job.
    Need = "need",
    /// The state at the start of a replica's log.
    Snapshot = "snapshot",
    /// Items of the log.
    LogSegment = ".log",
    /// A segment that is kept for reuse.
    LogSpare = ".spare",
    /// A segment before its renaming.
    LogNew = "new.tmp",
    /// Marks that the end of a segment is being cut off.
    LogCut = "cutting",
    /// Held while a log is open.
    LogLock = "LOCK",
}

impl DataFile {
    /// The kind of file at a path of a data folder, even under its temporary name during a write; `None`: no
    /// server writes such a file.
    pub fn of(path: &Path) -> Option<DataFile> {
        let name = path.file_name()?.to_str()?;
        let in_log = path.parent().and_then(Path::file_name).is_some_and(|above| above == "log");
        Self::ALL.iter().copied().find(|file| {
            let own = file.name();
            match file {
                Self::LogSegment | Self::LogSpare => in_log && name.ends_with(own),
                Self::LogNew | Self::LogLock => in_log && name == own,
                _ => {
                    let written = name.strip_suffix(".tmp").unwrap_or(name);
                    in_log == (*file == Self::LogCut) && written == own
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_of_each_kind_of_file_is_found_by_its_name() {
        for (path, file) in [
            ("d/identity", Some(DataFile::Identity)),
            ("d/settings.tmp", Some(DataFile::Settings)),
            ("d/audit.jsonl", Some(DataFile::Audit)),
            ("d/control/vote.tmp", Some(DataFile::Vote)),
            ("d/shard-7-2/snapshot", Some(DataFile::Snapshot)),
            ("d/log/0000000000000812.log", Some(DataFile::LogSegment)),
            ("d/log/0000000000000812.spare", Some(DataFile::LogSpare)),
            ("d/log/new.tmp", Some(DataFile::LogNew)),
            ("d/log/cutting.tmp", Some(DataFile::LogCut)),
            ("d/log/LOCK", Some(DataFile::LogLock)),
            ("d/log/vote", None),
            ("d/shard-3/cutting", None),
            ("d/shard-3/notes", None),
        ] {
            assert_eq!(DataFile::of(Path::new(path)), file, "{path}");
        }
    }
}

//! The settings of a listed server when its fleet was founded, kept in its data folder. A server that is
//! later started with other settings does not run, and names the differences.

use crate::{
    control::Shape,
    files::DataFile,
    header,
    raft::Folder,
    server::{Place, ServerError, ServerOptions, data_failed},
};
use paraft_common::ServerId;
use paraft_store::RealDisk;
use serde::{Deserialize, Serialize};
use std::{path::Path, sync::Arc};

/// In a server's data folder, beside its identity.
const SETTINGS: DataFile = DataFile::Settings;

/// Shape and servers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settings {
    server: ServerId,
    servers: Vec<String>,
    shape: Shape,
}

impl Settings {
    /// Those of a listed server; a joining server takes its fleet's.
    pub fn of(options: &ServerOptions) -> Option<Self> {
        match &options.place {
            Place::Listed(server) => {
                Some(Self { server: *server, servers: options.servers.clone(), shape: options.shape })
            }
            Place::Joins(_) => None,
        }
    }

    pub fn write(&self, folder: &Folder) -> Result<(), String> {
        Ok(folder.write(SETTINGS, &header::encode(self).map_err(|e| e.to_string())?)?)
    }

    /// The differences, as text. A new address alone is not one: a server may move.
    fn differences(&self, now: &Settings) -> Vec<String> {
        let mut all = self.shape.differences(&now.shape);
        for (id, address) in now.servers.iter().enumerate() {
            if let Some(was) = self.servers.iter().position(|a| a == address).filter(|was| *was != id) {
                all.push(format!("--servers: in place {id} is {address} (its fleet: {was})"));
            }
        }
        // A list may name fewer servers; but its length may explain why the number of shards differs.
        if !all.is_empty() && now.servers.len() != self.servers.len() {
            let (was, is) = (self.servers.len(), now.servers.len());
            all.push(format!("--servers: a list of {is} (its fleet: {was})"));
        }
        all
    }
}

/// Fails if the server of this data folder, which has been in a fleet, is started as another one of the list,
/// or with other settings.
pub fn compare(data: &Path, server: ServerId, servers: &[String], shape: Shape) -> Result<(), ServerError> {
    let folder = Folder::new(Arc::new(RealDisk), data);
    compare_with(&folder, &Settings { server, servers: servers.to_vec(), shape })
}

pub(crate) fn compare_options(folder: &Folder, options: &ServerOptions) -> Result<(), ServerError> {
    Settings::of(options).map_or(Ok(()), |now| compare_with(folder, &now))
}

fn compare_with(folder: &Folder, now: &Settings) -> Result<(), ServerError> {
    let Some(bytes) = folder.read(SETTINGS).map_err(data_failed)? else { return Ok(()) };
    let was: Settings = header::decode(&bytes)
        .map_err(|e| ServerError::Data(format!("{}: {e}", folder.path().join(SETTINGS.name()).display())))?;
    match was.differences(now)[..] {
        [] => Ok(()),
        ref all => Err(ServerError::Settings(format!(
            "{} is a server of a fleet that was founded with other settings: {}. Start it as the others run",
            folder.path().display(),
            all.join("; ")
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paraft_common::Durability;

    fn settings(servers: &[&str], shards: u32) -> Settings {
        let shape = Shape { shards, replicas: 3, durability: Durability::QuorumDisk };
        Settings { server: ServerId(0), servers: servers.iter().map(|s| s.to_string()).collect(), shape }
    }

    #[test]
    fn what_differs_is_named_and_a_new_address_is_no_difference() {
        let was = settings(&["a:1", "b:1", "c:1"], 2);
        assert_eq!(was.differences(&was), Vec::<String>::new());
        assert_eq!(was.differences(&settings(&["a:1", "b:1", "d:1"], 2)), Vec::<String>::new());
        let said = was.differences(&settings(&["b:1", "a:1", "c:1"], 3)).join("; ");
        for words in ["--shards 3 (its fleet: 2)", "0 is b:1 (its fleet: 1)", "1 is a:1 (its fleet: 0)"] {
            assert!(said.contains(words), "{said}");
        }
    }
}

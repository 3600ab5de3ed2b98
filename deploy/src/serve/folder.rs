//! A server's folder.

use paraft_fleet::failure::Failure;
use paraft_server::server::IDENTITY;
use paraft_worker::exit;
use std::{
    fs,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
};

/// Logs and snapshots contain the weights, so only their owner (and the group of a volume) may read
/// them.
pub fn closed_to_others(data: &Path) -> Result<(), Failure> {
    let failed = |e: std::io::Error| Failure::new(exit::IO, format!("{}: {e}", data.display()));
    if !data.exists() {
        return fs::DirBuilder::new().recursive(true).mode(0o700).create(data).map_err(failed);
    }
    let mode = fs::metadata(data).map_err(failed)?.permissions().mode();
    if mode & 0o007 != 0
        && let Err(error) = fs::set_permissions(data, fs::Permissions::from_mode(mode & 0o770))
    {
        tracing::warn!(folder = %data.display(), %error, "other users may read this server's files");
    }
    Ok(())
}

/// The folder name of an address.
pub fn without_colons(address: &str) -> String {
    address.replace(':', "-")
}

/// The existing data folder that differs from the new `data` only in the escape of colons. A start in
/// the new folder would create a second incarnation without the promises of the first.
pub fn meant(data: &Path) -> Option<PathBuf> {
    let name = data.file_name()?.to_str()?;
    let own = data.with_file_name(without_colons(name));
    (own != data && !data.join(IDENTITY).exists() && own.join(IDENTITY).exists()).then_some(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_folder_beside_that_of_the_same_server_is_not_taken() {
        let scratch = tempfile::tempdir().expect("scratch");
        let at = |name: &str| scratch.path().join(name);
        assert_eq!(meant(&at("h:1")), None);
        fs::create_dir(at("h-1")).expect("folder");
        assert_eq!(meant(&at("h:1")), None, "no server has been in it");
        fs::write(at("h-1").join(IDENTITY), []).expect("file");
        assert_eq!(meant(&at("h:1")), Some(at("h-1")));
        assert_eq!(meant(&at("h-1")), None);
        fs::create_dir(at("h:1")).expect("folder");
        fs::write(at("h:1").join(IDENTITY), []).expect("file");
        assert_eq!(meant(&at("h:1")), None, "it has been there before");
    }
}

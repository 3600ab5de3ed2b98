//! Disks with injected faults, for tests and for tools that stress a server.
//!
//! - [`ForgetfulDisk`] is in memory and tracks what was synced: [`ForgetfulDisk::crash`] returns the disk after a
//!   power failure.
//! - [`FaultyDisk`] wraps another disk, including the real one, and makes it full, slow or dead.
//!
//! ```
//! use paraft_store::{Access, Disk, faulty::{ForgetfulDisk, Survivors}};
//! use std::{io::IoSlice, path::Path};
//! let (disk, path) = (ForgetfulDisk::default(), Path::new("/a"));
//! let mut file = disk.open(path, Access::Create)?;
//! file.write_at(0, &mut [IoSlice::new(b"abc")])?;
//! file.sync()?;
//! // The contents are durable, the name is not.
//! assert_eq!(disk.crash(Survivors::Synced).contents(path), None);
//! disk.sync_dir(Path::new("/"))?;
//! assert_eq!(disk.crash(Survivors::Synced).contents(path), Some(b"abc".to_vec()));
//! # Ok::<(), std::io::Error>(())
//! ```

mod faults;
mod forgetful;

pub use faults::FaultyDisk;
pub use forgetful::{ForgetfulDisk, Survivors};

//! In a process of its own, since it looks at the process's memory.

use anyhow::Result;
use paraft_common::Mode;
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    ledger::Ledger,
    raw::{Call, prefix},
};

#[test]
fn a_length_of_a_gigabyte_is_refused_and_costs_no_memory() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::default())?;
    let address = &fleet.at.addresses[0];
    let before = paraft_host::usage().peak_rss_bytes;
    for _ in 0..32 {
        let mut worker = Call::open(address, "/paraft.v1.Shards/Exchange")?;
        worker.body(&prefix(1 << 30), false)?;
        worker.body(&[0x1a; 16 << 10], false)?;
        worker.expect(b"cannot be read: a message of 1073741824 bytes")?;
        let mut peer = Call::open(address, "/paraft.v1.Peers/Call")?;
        peer.body(&prefix(1 << 30), false)?;
        peer.expect_response()?;
        let mut status = Call::open(address, "/paraft.v1.Shards/Status")?;
        status.body(&prefix(u32::MAX), false)?;
        status.expect_response()?;
    }
    let grown = paraft_host::usage().peak_rss_bytes - before;
    assert!(grown < 64 << 20, "{grown} bytes more");
    let ledger = Ledger::new(Mode::Bsp, 1, 5);
    assert_eq!(ledger.join(&fleet.at, 0)?.run()?, [-1.0; 5]);
    Ok(())
}

//! Bounds on messages and connections, each with its reason.

use std::time::Duration;

/// The largest bucket, in bytes: larger messages cost fresh pages for their buffers, and followers buffer up
/// to 64 of them.
pub const MAX_BUCKET_BYTES: usize = 1 << 20;
/// The largest message: one bucket and its header. A longer length field is refused before anything is
/// allocated for it.
pub const MAX_MESSAGE_BYTES: usize = MAX_BUCKET_BYTES + (64 << 10);
/// HTTP/2 frame: a bucket. Since messages are not assembled, one frame for it costs a sixth less CPU time
/// than four (h2 reads 8 KiB with each frame's header, and the rest in a call of its own); 16 KiB, the
/// default, cost a third of the goodput. Such frames delay the small messages behind them, by less than a
/// millisecond on a fast link.
pub const FRAME_BYTES: u32 = 1 << 20;
/// Maximum open streams on one connection. A worker's client has three for each of up to 64 shards (exchange,
/// reads, a part of a checkpoint) and a few calls. A server's channel has, for each of 65 groups, an append
/// or a piece of a snapshot, a vote and a heartbeat, and those that timed out. Twice as many; each takes
/// about 7 KiB.
pub const MAX_STREAMS: u32 = 512;
/// Maximum bytes of a request's headers. Ours are less than 1 KiB.
pub const HEADER_BYTES: u32 = 16 << 10;
/// HTTP/2 window of a stream: larger ones lose to page faults of fresh memory.
pub const STREAM_WINDOW_BYTES: u32 = 8 << 20;
/// Window of a connection, shared by its streams.
pub const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// Maximum payload of a worker that is pushed and not acknowledged: what a fast network and a slow disk have
/// in flight. Beyond it the worker waits.
pub const PUSH_WINDOW_BYTES: usize = 64 << 20;
/// Weights that are requested before the pushes they wait for take a worker's memory: only models up to this
/// size do so.
pub const PULL_AHEAD_BYTES: usize = 64 << 20;
/// Send buffer of a Unix socket: a bucket and a half.
pub const SOCKET_BUFFER_BYTES: usize = 3 << 19;
/// A client sends a ping on a silent connection this often...
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(1);
/// ...and gives it up after this long without an answer.
pub const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(2);
/// A server does so this often. It only frees what a vanished client has left: a lease finds a silent member, a
/// timer a silent server, and each server has three connections from each other one.
pub const SERVER_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// The longest job text a session may open with: as many groups of parameters as a job may have take 100 KiB, and the names of
/// its tensors up to 120 KiB.
pub const MAX_JOB_BYTES: usize = 256 << 10;

//! A simulated link with latency and bandwidth, between a worker and a server or between two servers. A
//! proxy of this process implements it, so it needs neither root nor another machine. Its clock has a
//! granularity of a millisecond.

use std::time::Duration;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::tcp::{ReadHalf, WriteHalf},
    sync::mpsc,
    time::{Instant, sleep_until},
};

/// The links of connections to the servers; `None`: unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Links {
    /// Connections of workers.
    pub workers: Option<Link>,
    /// Connections of other servers.
    pub servers: Option<Link>,
}

/// The link of each connection, in each direction.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Link {
    /// Delay of a byte in addition to loopback.
    pub delay: Duration,
    /// Bandwidth in bits per second; `None`: no limit.
    pub bits_per_s: Option<f64>,
}

/// Maximal pieces in flight, of up to [`MAX_PIECE`] bytes.
const MAX_IN_FLIGHT: usize = 1024;
const MAX_PIECE: usize = 64 << 10;
/// The precision of a sleep.
const SLEEP_PRECISION: Duration = Duration::from_millis(2);

/// The schedule of a link.
struct Schedule {
    link: Link,
    /// When the link is free.
    free: Instant,
}

impl Schedule {
    /// Schedules a piece that arrives at `now`: returns when the next piece can enter, and when this
    /// one leaves the link.
    fn take(&mut self, now: Instant, bytes: usize) -> (Instant, Instant) {
        let takes = self.link.bits_per_s.map_or(0.0, |b| bytes as f64 * 8.0 / b);
        self.free = self.free.max(now) + Duration::from_secs_f64(takes);
        (self.free, self.free + self.link.delay)
    }
}

/// Carries one direction of a connection to its end. Resets are the only other fault on it.
pub async fn carry(link: Link, mut read: ReadHalf<'_>, mut write: WriteHalf<'_>) {
    let (send, mut receive) = mpsc::channel::<(Instant, Vec<u8>)>(MAX_IN_FLIGHT);
    let reader = async move {
        let mut schedule = Schedule { link, free: Instant::now() };
        let mut buffer = vec![0; MAX_PIECE];
        while let Ok(n @ 1..) = read.read(&mut buffer).await {
            let (free, due) = schedule.take(Instant::now(), n);
            if send.send((due, buffer[..n].to_vec())).await.is_err() {
                return;
            }
            // Excess data waits at its sender, as before a slow link. Waits below the clock's precision
            // are skipped; the schedule accounts for them.
            if free > Instant::now() + SLEEP_PRECISION {
                sleep_until(free).await;
            }
        }
    };
    let writer = async move {
        while let Some((due, bytes)) = receive.recv().await {
            sleep_until(due).await;
            if write.write_all(&bytes).await.is_err() {
                return;
            }
        }
    };
    tokio::join!(reader, writer);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_queue_for_the_link_and_fly_side_by_side() {
        let now = Instant::now();
        let ms = |n: u64| now + Duration::from_millis(n);
        // 8 Mbit/s: a megabyte per second, so 1000 bytes take a millisecond.
        let link = Link { delay: Duration::from_millis(20), bits_per_s: Some(8e6) };
        let mut schedule = Schedule { link, free: now };
        assert_eq!(schedule.take(now, 1000), (ms(1), ms(21)));
        assert_eq!(
            schedule.take(now, 3000),
            (ms(4), ms(24)),
            "behind the first, whose flight does not hold it up"
        );
        assert_eq!(schedule.take(ms(10), 1000), (ms(11), ms(31)), "the link was free again");
        let mut wide = Schedule { link: Link { bits_per_s: None, ..link }, free: now };
        assert_eq!(wide.take(now, 1 << 30), (now, ms(20)));
    }
}

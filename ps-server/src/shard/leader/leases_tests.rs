//! Tests of `leases`.

use super::*;
use paraft_common::Mode;
use proptest::prelude::*;

const STEP: Duration = Duration::from_millis(10);

proptest! {
    /// A member is removed after one lease to one and a quarter of silence, or at the end of its allowed
    /// absence; no other is.
    #[test]
    fn a_member_goes_for_its_silence_and_for_nothing_else(
        beats in prop::collection::vec(prop::collection::vec((1u32..300, 1u32..150), 1..6), 3),
    ) {
        let job = ServerJob { grace_ms: 1000, ..ServerJob::new("leases", Mode::Bsp, 8, 8) };
        let (lease, begun) = (job.lease(), Instant::now());
        let mut leases = Leases::default();
        let workers: Vec<WorkerId> = (0..3).map(WorkerId).collect();
        leases.begin(workers.clone(), Some(&job), begun);
        let lives: Vec<Arc<Liveness>> = workers.iter().map(|_| Arc::default()).collect();
        for (w, liveness) in workers.iter().zip(&lives) {
            leases.opened(u64::from(w.0), liveness.clone());
            leases.mark_present(*w);
        }
        // Each alternates between some steps with heartbeats and some without.
        let beats_at = |w: usize, step: u32| {
            let turn: u32 = beats[w].iter().map(|(on, off)| on + off).sum();
            let mut at = step % turn;
            for (on, off) in &beats[w] {
                if at < *on { return true; }
                if at < on + off { return false; }
                at -= on + off;
            }
            false
        };
        let mut last = [begun; 3];
        let mut here: BTreeSet<WorkerId> = workers.iter().copied().collect();
        for step in 0..1500u32 {
            let now = begun + STEP * step;
            for w in 0..3 {
                if here.contains(&workers[w]) && beats_at(w, step) {
                    lives[w].heard();
                    last[w] = now;
                }
            }
            if leases.deadline(!here.is_empty()).is_none_or(|at| at > now) {
                continue;
            }
            let attached = here.iter().map(|w| (*w, u64::from(w.0)));
            let Some(looked) = leases.check(lease, attached, now) else { continue };
            let over: Vec<_> = looked.over.iter().map(|(w, _)| *w).collect();
            for w in here.clone() {
                let silent = now - last[w.0 as usize];
                prop_assert!(!over.contains(&w) || silent >= lease, "{w} after {silent:?}");
                prop_assert!(silent < lease * 5 / 4 + STEP, "{w} was looked at too late");
                prop_assert!(over.contains(&w) || silent < lease, "{w} stays after {silent:?}");
                prop_assert!(looked.left[&w] <= lease);
            }
            for (w, conn) in looked.over {
                here.remove(&w);
                prop_assert!(leases.closed(conn).is_some());
                leases.expire(w, now);
                prop_assert_eq!(leases.take_expired(now), vec![w], "once");
                prop_assert_eq!(leases.take_expired(now), vec![]);
                leases.mark_leaving(w);
                prop_assert!(!leases.is_quiet());
                leases.mark_left(w, false);
            }
        }
    }

    /// An absent member has the rest of its lease, and is not absent once it is back.
    #[test]
    fn who_is_away_has_what_is_left_of_its_lease(silent in 0u32..6, back in any::<bool>()) {
        let job = ServerJob { grace_ms: 4000, ..ServerJob::new("leases", Mode::Bsp, 8, 8) };
        let (mut leases, now, w) = (Leases::default(), Instant::now(), WorkerId(7));
        leases.mark_absent(w, Silence(silent), Some(&job), now);
        let left = Duration::from_millis(4000 - 1000 * u64::from(silent.saturating_sub(1).min(4)));
        prop_assert_eq!(leases.deadline(false), Some(now + left));
        if back {
            leases.mark_present(w);
        }
        let gone = if back { vec![] } else { vec![w] };
        prop_assert_eq!(leases.take_expired(now + left), gone);
        prop_assert!(leases.is_quiet());
    }
}

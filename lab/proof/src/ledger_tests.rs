//! Tests of `ledger`.

use super::*;

fn applied(ledger: &Ledger, pushes: &[(u32, u64)]) -> Vec<f32> {
    let mut weights = vec![0.0f32; ledger.len()];
    for (worker, round) in pushes {
        let mut gradient = vec![0.0; weights.len()];
        ledger.write(*worker, Step(*round), &mut gradient);
        weights.iter_mut().zip(&gradient).for_each(|(w, g)| *w -= g);
    }
    weights
}

#[test]
fn every_push_has_its_own_entry_with_its_apply_count() {
    for rounds in [3, 5000, 30_000] {
        let ledger = Ledger::in_every_bucket(Mode::Asp, 2, rounds, 3);
        assert_eq!(ledger.per_place > 1, rounds > 3, "{rounds}");
        // 0: once, acknowledged. 1: once, unknown. The last: twice. The one before: acknowledged and lost.
        let pushes = [(0, 1), (1, 1), (1, rounds), (1, rounds)];
        let fate = |w, r: Step, _| match (w, r.0) {
            (0, 1) => Fate::Acknowledged,
            (1, r) if r == rounds - 1 => Fate::Acknowledged,
            (1, _) => Fate::Unknown,
            _ => Fate::Unmade,
        };
        let tally = ledger.read(&applied(&ledger, &pushes), fate);
        let seen = (tally.acknowledged, tally.lost, tally.doubled, tally.unknown_applied, tally.damaged);
        assert_eq!(seen, (6, 3, 3, 6, 0), "{rounds}: {tally:?}");
        // An applied push that no worker made is an error, too, once per bucket.
        let tally = ledger.read(&applied(&ledger, &[(0, 2)]), |_, _, _| Fate::Unmade);
        assert_eq!((tally.doubled, tally.lost), (3, 0));
    }
}

#[test]
fn what_is_no_sum_of_entries_is_damage() {
    let ledger = Ledger::in_every_bucket(Mode::Asp, 1, 4, 1);
    for bad in [1.0, -0.5, -4.0, f32::NAN] {
        let mut weights = vec![0.0; ledger.len()];
        weights[2] = bad;
        assert_eq!(ledger.read(&weights, |_, _, _| Fate::Unmade).damaged, 1, "{bad}");
    }
}

#[test]
fn a_gradient_that_is_written_again_holds_one_round() {
    let ledger = Ledger::in_every_bucket(Mode::Asp, 1, 9000, 2);
    let mut gradient = vec![0.0; ledger.len()];
    for round in 1..=9000 {
        ledger.write(0, Step(round), &mut gradient);
    }
    assert_eq!(gradient.iter().filter(|g| **g != 0.0).count(), 2);
}

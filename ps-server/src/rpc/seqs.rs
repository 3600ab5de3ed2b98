//! The numbers of a stream's pushes: a push keeps its number when it is sent again, and a later push of the same bucket has
//! a higher one. An acknowledgement names a push by its number alone, so a client that mixed them up would take another
//! push for done.

use paraft_common::{Seq, Step, config::MAX_STEP};
use paraft_proto::RefusalKind;
use std::collections::BTreeMap;

/// What one stream has pushed, by local bucket: 24 bytes for each bucket of the shard, at most.
#[derive(Debug, Default)]
pub struct Seqs(BTreeMap<usize, (Step, Seq)>);

impl Seqs {
    /// Notes a push of a local bucket.
    ///
    /// # Errors
    /// Its number cannot be; the push is refused, and the stream goes on.
    pub fn push(&mut self, bucket: usize, step: Step, seq: Seq) -> Result<(), RefusalKind> {
        if seq.0 == 0 || seq.0 > MAX_STEP {
            return Err(RefusalKind::WrongSeq {
                got: seq.0,
                why: format!("numbers are from 1 to {MAX_STEP}"),
            });
        }
        let Some((last, known)) = self.0.get(&bucket).copied() else {
            self.0.insert(bucket, (step, seq));
            return Ok(());
        };
        let wrong = |why: String| Err(RefusalKind::WrongSeq { got: seq.0, why });
        match step.cmp(&last) {
            std::cmp::Ordering::Equal if seq != known => {
                wrong(format!("the push of {step} had number {} before", known.0))
            }
            std::cmp::Ordering::Greater if seq <= known => {
                wrong(format!("the push of {last} had number {}, and {step} comes later", known.0))
            }
            std::cmp::Ordering::Less if seq >= known => {
                wrong(format!("the push of {last} had number {}, and {step} came before", known.0))
            }
            std::cmp::Ordering::Greater => {
                self.0.insert(bucket, (step, seq));
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pushs_number_stays_with_it_and_rises_from_step_to_step() {
        let mut seqs = Seqs::default();
        let mut push = |bucket, step, seq| seqs.push(bucket, Step(step), Seq(seq)).map_err(|e| e.to_string());
        push(0, 1, 1).expect("the first");
        push(1, 1, 2).expect("of another bucket");
        push(0, 2, 3).expect("the next");
        push(0, 2, 3).expect("again");
        push(0, 1, 1).expect("an older one again");
        for (step, seq, word) in [
            (2, 4, "had number 3 before"),
            (3, 3, "comes later"),
            (3, 2, "comes later"),
            (1, 5, "came before"),
            (3, 0, "from 1 to"),
            (3, u64::MAX, "from 1 to"),
        ] {
            let why = push(0, step, seq).expect_err(word);
            assert!(why.contains(word), "`{word}` is not in: {why}");
        }
        push(0, 3, 9).expect("numbers may skip");
    }
}

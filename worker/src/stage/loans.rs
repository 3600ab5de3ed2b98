//! Parameters that stages of different ranks share: one rank owns and pulls them, and lends them to the others.

use super::{Stage, messages::LENT, sums::put};
use crate::engine::StepError;
use paraft_compute::collective::{Lines, Tag};
use paraft_models::Loan;
use std::ops::Range;

impl Stage<'_> {
    /// The loans to ranks with other stages, with the borrowing place.
    pub(super) fn lends(&self) -> Vec<(usize, Loan, usize)> {
        self.between(|loan, here| here.contains(&loan.owner) && !here.contains(&loan.user), |loan| loan.user)
    }

    /// The loans from other ranks, with the lending place.
    pub(super) fn borrows(&self) -> Vec<(usize, Loan, usize)> {
        self.between(|loan, here| here.contains(&loan.user) && !here.contains(&loan.owner), |loan| loan.owner)
    }

    fn between(
        &self,
        is: impl Fn(&Loan, &Range<usize>) -> bool,
        other: impl Fn(&Loan) -> usize,
    ) -> Vec<(usize, Loan, usize)> {
        let place = |loan: &Loan| self.here.beside(self.here.of_stage(other(loan), self.stages.len()));
        let here = &self.here.stages;
        let mut all: Vec<(usize, Loan, usize)> = Vec::new();
        for (i, loan) in self.computed().loans().iter().enumerate().filter(|(_, loan)| is(loan, here)) {
            let to = place(loan);
            // If several stages of a rank use a tensor, the rank receives it once.
            if !all.iter().any(|(_, known, at)| known.range == loan.range && *at == to) {
                all.push((i, loan.clone(), to));
            }
        }
        all
    }

    /// Sends parameters that two stages use from the rank that pulls them to the rank that borrows them.
    pub(super) fn lend(&mut self, lines: &mut Lines) -> Result<(), StepError> {
        let number = |i: usize, pulls: u64| pulls << 10 | i as u64;
        for (i, loan, to) in self.lends() {
            let tag = Tag { kind: LENT, number: number(i, self.pulls) };
            lines.send(to, tag, self.weights[loan.range].to_vec())?;
        }
        for (i, loan, from) in self.borrows() {
            let values = lines.receive(from, Tag { kind: LENT, number: number(i, self.pulls) })?;
            put(&mut self.weights, &loan.range, &values)?;
        }
        self.pulls += 1;
        Ok(())
    }
}

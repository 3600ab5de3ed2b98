//! The labels of a file: 0 and 1, however the file writes them, or numbers to predict.

use super::lines::{Fault, fault, number, shown};
use crate::Task;

/// Reads a file's labels, which must be alike.
#[derive(Debug)]
pub(super) struct Targets {
    task: Task,
    /// The number for "no" in this file, 0 or -1, once one was seen.
    no: Option<f32>,
}

impl Targets {
    pub fn new(task: Task) -> Self {
        Self { task, no: None }
    }

    /// A label, as the models take it. `at` is its place in the line.
    pub fn label(&mut self, word: &[u8], at: usize) -> Result<f32, Fault> {
        let Some(label) = number(word) else {
            let remedy = if word.contains(&b',') {
                "give each sample one label"
            } else {
                "write a finite number, or remove the row"
            };
            return fault(at, format!("label {} is no finite number", shown(word)), remedy);
        };
        if self.task == Task::Regression || label == 1.0 {
            return Ok(label);
        }
        if label != 0.0 && label != -1.0 {
            return fault(
                at,
                format!("label {} is neither 1 nor 0 nor -1", shown(word)),
                "write classes as 0 and 1 or as -1 and +1, or predict the number with task = \"regression\"",
            );
        }
        match self.no {
            Some(no) if no != label => fault(
                at,
                format!("label {}, where rows before have {no}", shown(word)),
                "write classes as 0 and 1, or as -1 and +1, not as both",
            ),
            _ => {
                self.no = Some(label);
                Ok(0.0)
            }
        }
    }
}

/// A sample's importance: a finite number, 0 or more.
pub(super) fn importance(word: &[u8], at: usize) -> Result<f32, Fault> {
    match number(word).filter(|i| *i >= 0.0) {
        Some(importance) => Ok(importance),
        None => fault(
            at,
            format!("importance {} is no finite number of 0 or more", shown(word)),
            "correct it, or leave it out for 1",
        ),
    }
}

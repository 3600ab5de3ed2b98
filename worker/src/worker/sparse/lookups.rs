//! From ids to rows: the distinct ids of a minibatch, and each use's place among them.

use paraft_data::{Field, Hashing, SparseBatch, SparseDataset};
use paraft_models::{Lookups, SparseInput, SparseTable};

/// A minibatch, as data and as a model's input.
pub struct Batch {
    samples: SparseBatch,
    hashing: Option<Hashing>,
    /// Whether the fields share their ids; else each has its own tables.
    shared: bool,
    /// The distinct ids, rising: of all fields, or of each.
    ids: Vec<Vec<u64>>,
    pub input: SparseInput,
}

impl Batch {
    pub fn new(tables: &[SparseTable], hashing: Option<Hashing>) -> Self {
        Self {
            samples: SparseBatch::default(),
            hashing,
            shared: tables.iter().all(|t| t.field.is_none()),
            ids: Vec::new(),
            input: SparseInput::default(),
        }
    }

    /// The distinct ids that a table has rows for, rising.
    pub fn ids(&self, table: &SparseTable) -> &[u64] {
        self.ids.get(table.field.unwrap_or(0)).map_or(&[], |ids| ids)
    }

    /// Replaces the content by these samples.
    pub fn fill(&mut self, data: &SparseDataset, indices: &[u32]) {
        data.fill(indices, &mut self.samples);
        if let Some(hashing) = &self.hashing {
            self.samples.hash(hashing);
        }
        let fields = &self.samples.fields;
        self.ids = match self.shared {
            true => vec![distinct(fields)],
            false => fields.iter().map(|f| distinct(std::slice::from_ref(f))).collect(),
        };
        self.input.labels.clone_from(&self.samples.labels);
        self.input.importance.clone_from(&self.samples.importance);
        self.input.dense.clone_from(&self.samples.dense);
        self.input.fields.resize_with(fields.len(), Lookups::default);
        for (at, (to, from)) in self.input.fields.iter_mut().zip(fields).enumerate() {
            let ids = &self.ids[if self.shared { 0 } else { at }];
            to.offsets.clone_from(&from.offsets);
            to.weights.clone_from(&from.weights);
            to.places.clear();
            // All are there, so that a place is that of the id.
            to.places.extend(from.ids.iter().map(|id| ids.partition_point(|other| other < id) as u32));
        }
    }
}

fn distinct(fields: &[Field]) -> Vec<u64> {
    let mut ids: Vec<u64> = fields.iter().flat_map(|f| &f.ids).copied().collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

#[cfg(test)]
mod tests {
    use super::*;
    use paraft_models::ModelConfig;

    fn field(offsets: &[u32], ids: &[u64]) -> Field {
        Field { offsets: offsets.into(), ids: ids.into(), weights: Vec::new() }
    }

    #[test]
    fn ids_are_distinct_and_sorted_in_all_fields_or_in_each() {
        let samples = SparseBatch {
            labels: vec![1.0, 0.0],
            fields: vec![field(&[0, 1, 2], &[9, 4]), field(&[0, 1, 2], &[7, 9])],
            ..SparseBatch::default()
        };
        let data = SparseDataset::new(samples).expect("samples");
        let (logistic, mf) = (ModelConfig::Logistic, ModelConfig::Mf { l2: 0.0 });
        let mut batch = Batch::new(logistic.tables(), None);
        batch.fill(&data, &[1, 0, 1]);
        assert_eq!(batch.ids(&logistic.tables()[0]), [4, 7, 9]);
        assert_eq!(batch.input.fields[0].places, [0, 2, 0]);
        assert_eq!(batch.input.fields[1].places, [2, 1, 2]);
        assert_eq!(batch.input.labels, [0.0, 1.0, 0.0]);
        let mut batch = Batch::new(mf.tables(), None);
        batch.fill(&data, &[0, 1]);
        assert_eq!((batch.ids(&mf.tables()[0]), batch.ids(&mf.tables()[1])), (&[4, 9][..], &[7, 9][..]));
        assert_eq!(
            (&batch.input.fields[0].places[..], &batch.input.fields[1].places[..]),
            (&[1, 0][..], &[0, 1][..])
        );
        let mut hashed = Batch::new(logistic.tables(), Some(Hashing::new(63).expect("bits")));
        hashed.fill(&data, &[0, 1]);
        assert_eq!(hashed.ids(&logistic.tables()[0]).len(), 4, "9 is another id in each field");
    }
}

//! A partition against naive code, under updates, evictions and images at random places.

use super::*;
use crate::raft::LazyPart;
use paraft_common::table::{RowInit, RowOptimizer, put_rows};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap};

const DIM: usize = 3;
const RATE: RowRate = RowRate { factor: 1.0, set: None };

fn spec(max_rows: u64, full: WhenFull, optimizer: RowOptimizer) -> Arc<TableSpec> {
    let init = match optimizer {
        RowOptimizer::Ftrl { .. } => RowInit::Zeros,
        _ => RowInit::Uniform { range: 1.0 },
    };
    let of = TableSpec::new("t", DIM, max_rows);
    Arc::new(TableSpec { partitions: 1, full, init, seed: 5, optimizer, ..of })
}

/// Slots and a map, in the plainest way.
struct Naive {
    spec: Arc<TableSpec>,
    /// The id, the number of updates, the last version and the values of each slot.
    slots: Vec<(u64, u32, u32, Vec<f32>)>,
    places: HashMap<u64, usize>,
    hand: usize,
    counts: (u64, u64, u64),
}

impl Naive {
    fn new(spec: Arc<TableSpec>) -> Self {
        Self { spec, slots: Vec::new(), places: HashMap::new(), hand: 0, counts: (0, 0, 0) }
    }

    fn initial(&self, id: u64) -> Vec<f32> {
        let mut row = vec![0.0; DIM];
        self.spec.initial(id, &mut row);
        row.resize(DIM + self.spec.slots(), 0.0);
        row
    }

    fn update(&mut self, rows: &BTreeMap<u64, [f32; DIM]>, version: u32) {
        for (id, gradient) in rows {
            let place = match self.places.get(id) {
                Some(place) => *place,
                None if (self.slots.len() as u64) < self.spec.partition_rows() => {
                    self.slots.push((*id, 0, 0, self.initial(*id)));
                    self.slots.len() - 1
                }
                None if self.spec.full == WhenFull::Refuse => {
                    self.counts.2 += 1;
                    continue;
                }
                None => {
                    let n = self.slots.len();
                    let window: Vec<usize> = (0..8.min(n)).map(|i| (self.hand + i) % n).collect();
                    let oldest = window.iter().map(|slot| self.slots[*slot].2).min().expect("a slot");
                    let place = window.into_iter().find(|s| self.slots[*s].2 == oldest).expect("that one");
                    self.hand = (self.hand + 8) % n;
                    self.counts.1 += 1;
                    self.places.remove(&self.slots[place].0);
                    self.slots[place] = (*id, 0, 0, self.initial(*id));
                    place
                }
            };
            if self.places.insert(*id, place).is_none() {
                self.counts.0 += 1;
            }
            let (_, updates, touched, row) = &mut self.slots[place];
            (*updates, *touched) = (*updates + 1, version);
            let bytes: Vec<[u8; 4]> = gradient.iter().map(|g| g.to_le_bytes()).collect();
            self.spec.optimizer.update(RATE, u64::from(*updates), 0.5, row, &bytes);
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let words = |(id, updates, touched, row): &(u64, u32, u32, Vec<f32>)| {
            let head = [*id as u32, (*id >> 32) as u32, *updates, *touched];
            head.into_iter().chain(row.iter().map(|v| v.to_bits())).collect::<Vec<u32>>()
        };
        self.slots.iter().flat_map(words).flat_map(u32::to_le_bytes).collect()
    }
}

fn bytes_of(image: RowsImage) -> Vec<u8> {
    image.into_tiles().flat_map(|tile| tile.read()).collect()
}

fn of(rows: &BTreeMap<u64, [f32; DIM]>) -> Rows {
    let ids: Vec<u64> = rows.keys().copied().collect();
    let values: Vec<f32> = rows.values().flatten().copied().collect();
    Rows::of(&put_rows(&ids, &values, DIM), DIM).expect("rows")
}

fn optimizers() -> impl Strategy<Value = RowOptimizer> {
    prop_oneof![
        Just(RowOptimizer::Sgd { lr: 0.5 }),
        Just(RowOptimizer::Adagrad { lr: 0.5, eps: 1e-10 }),
        Just(RowOptimizer::RowwiseAdagrad { lr: 0.5, eps: 1e-8 }),
        Just(RowOptimizer::Ftrl { lr: 0.5, beta: 1.0, l1: 0.1, l2: 0.1 }),
        Just(RowOptimizer::Adam { lr: 0.5, beta1: 0.9, beta2: 0.99, eps: 1e-8 }),
    ]
}

#[derive(Clone, Debug)]
enum Op {
    Update(BTreeMap<u64, [f32; DIM]>),
    /// Take an image, and read it after so many more operations.
    Image(usize),
    /// Continue on a replica that was built from an image.
    Install,
    Pull(Vec<u64>),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let id = prop_oneof![0..20u64, 0..200u64, any::<u64>()];
    let value = (-64i32..64).prop_map(|v| v as f32 / 8.0);
    let rows = prop::collection::btree_map(id.clone(), prop::array::uniform3(value), 0..40);
    let op = prop_oneof![
        6 => rows.prop_map(Op::Update),
        2 => (0..6usize).prop_map(Op::Image),
        1 => Just(Op::Install),
        1 => prop::collection::vec(id, 0..40).prop_map(Op::Pull),
    ];
    prop::collection::vec(op, 1..40)
}

proptest! {
    #[test]
    fn partition_equals_naive_code(
        ops in ops(),
        optimizer in optimizers(),
        max in prop_oneof![Just(1u64), Just(17), Just(64), Just(100_000)],
        full in prop_oneof![Just(WhenFull::Evict), Just(WhenFull::Refuse)],
    ) {
        let spec = spec(max, full, optimizer);
        let mut partition = Arc::new(Partition::new((0, spec.clone()), 0).expect("memory"));
        let mut naive = Naive::new(spec.clone());
        let mut images: Vec<(usize, RowsImage, Vec<u8>)> = Vec::new();
        for (version, op) in (1u32..).zip(ops) {
            match op {
                Op::Update(rows) => {
                    partition.update(&of(&rows), u64::from(version), 0.5, RATE).expect("memory");
                    naive.update(&rows, version);
                }
                Op::Image(delay) => images.push((delay, RowsImage::of(&partition), naive.bytes())),
                Op::Install => {
                    let image = RowsImage::of(&partition);
                    partition = image.partition().expect("its own image");
                }
                Op::Pull(ids) => {
                    let expected = ids.iter().flat_map(|id| {
                        let row = naive.places.get(id).map(|at| naive.slots[*at].3.clone());
                        row.unwrap_or_else(|| naive.initial(*id)).into_iter().take(DIM)
                    });
                    let expected: Vec<u8> = expected.flat_map(f32::to_le_bytes).collect();
                    prop_assert_eq!(partition.pull(&ids), expected);
                }
            }
            let (due, later) = images.into_iter().partition(|(delay, ..)| *delay == 0);
            images = later;
            images.iter_mut().for_each(|(delay, ..)| *delay -= 1);
            for (_, image, expected) in due {
                prop_assert_eq!(bytes_of(image), expected);
            }
        }
        prop_assert_eq!(bytes_of(RowsImage::of(&partition)), naive.bytes());
        let header = partition.header();
        let counts = (header.created, header.evicted, header.refused);
        prop_assert_eq!((counts, header.hand as usize), (naive.counts, naive.hand));
    }
}

#[test]
fn image_keeps_what_changes_before_it_is_read_and_no_more() {
    let partition = Partition::new((0, spec(100_000, WhenFull::Evict, RowOptimizer::Sgd { lr: 1.0 })), 0);
    let partition = Arc::new(partition.expect("memory"));
    let rows = |ids: std::ops::Range<u64>| of(&ids.map(|id| (id, [1.0; DIM])).collect());
    partition.update(&rows(0..40_000), 1, 1.0, RATE).expect("memory");
    let before = bytes_of(RowsImage::of(&partition));
    let image = RowsImage::of(&partition);
    let row = partition.spec().row_bytes();
    partition.update(&rows(0..100), 2, 1.0, RATE).expect("memory");
    partition.update(&rows(0..100), 3, 1.0, RATE).expect("memory");
    assert_eq!(partition.outdated().0, 100 * row, "each changed row once");
    // Slot 0 is in the first tile; once that is dropped, its rows are not kept any more.
    let mut tiles = image.into_tiles();
    let first = tiles.next().expect("a tile");
    let read = first.read();
    assert_eq!(read[..], before[..read.len()]);
    let in_first = (first.bytes() as u64) / row;
    drop(first);
    let slots: Vec<u64> = (0..100).collect();
    assert!(in_first < 40_000 && partition.outdated().0 <= slots.len() as u64 * row);
    partition.update(&rows(0..40_000), 4, 1.0, RATE).expect("memory");
    assert_eq!(partition.outdated().0, (40_000 - in_first) * row, "those of the other tiles");
    let rest: Vec<u8> = tiles.flat_map(|tile| tile.read()).collect();
    assert_eq!([&read[..], &rest].concat(), before);
    assert_eq!(partition.outdated().0, 0);
}

#[test]
fn damaged_tiles_are_refused() {
    let spec = spec(100, WhenFull::Evict, RowOptimizer::Sgd { lr: 1.0 });
    let partition = Arc::new(Partition::new((0, spec.clone()), 0).expect("memory"));
    partition.update(&of(&BTreeMap::from([(1, [1.0; DIM]), (2, [1.0; DIM])])), 1, 1.0, RATE).expect("memory");
    let (header, bytes) = (partition.header(), bytes_of(RowsImage::of(&partition)));
    let load = |header: RowsHeader, tile: Vec<u8>| {
        let mut tiles = vec![Payload::from(tile)];
        let next = || tiles.pop().ok_or_else(|| ApplyError::Damaged("no tile is left".into()));
        Partition::load((0, spec.clone()), 0, header, next).map(drop)
    };
    load(header, bytes.clone()).expect("whole");
    load(header, bytes[..bytes.len() - 1].to_vec()).expect_err("cut");
    load(RowsHeader { rows: 1 << 40, ..header }, bytes.clone()).expect_err("too many rows");
    load(RowsHeader { rows: 3, ..header }, bytes).expect_err("fewer rows than it says");
}

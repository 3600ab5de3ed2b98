//! A partition against naive code, under updates, evictions and images at random places.

use super::*;
use crate::raft::LazyPart;
use paraft_common::table::{
    Expire, RowInit, RowOptimizer, RowRate, RowType, Rows, WhenFull, put_rows, rounding_key,
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, HashMap};

const DIM: usize = 4;
const RATE: RowRate = RowRate { factor: 1.0, set: None };

fn spec(max_rows: u64, full: WhenFull, optimizer: RowOptimizer) -> Arc<TableSpec> {
    let init = match optimizer {
        RowOptimizer::Ftrl { .. } => RowInit::Zeros,
        _ => RowInit::Uniform { range: 1.0 },
    };
    let of = TableSpec::new("t", DIM, max_rows);
    Arc::new(TableSpec { partitions: 1, full, init, seed: 5, optimizer, ..of })
}

/// As [`spec`], with the rest of what a table can be.
fn spec_of(
    max_rows: u64,
    (full, min_count, dtype): (WhenFull, u32, RowType),
    expire: Option<Expire>,
    optimizer: RowOptimizer,
) -> Arc<TableSpec> {
    let expire = expire.filter(|expire| expire.keep_at_least < max_rows);
    let of = (*spec(max_rows, full, optimizer)).clone();
    let spec = TableSpec { min_count, dtype, expire, ..of };
    spec.check().expect("a table");
    Arc::new(spec)
}

/// Slots and a map, in the plainest way.
struct Naive {
    spec: Arc<TableSpec>,
    /// The id, the number of updates, the last version and the values of each slot.
    slots: Vec<(u64, u32, u32, Vec<f32>)>,
    places: HashMap<u64, usize>,
    hand: usize,
    sweep: usize,
    /// Created, evicted, refused, too rare, expired, revived.
    counts: [u64; 6],
    counted: History,
    /// When each id was removed.
    removed: HashMap<u64, u32>,
}

impl Naive {
    fn new(spec: Arc<TableSpec>) -> Self {
        let counted = History::new(&spec).expect("memory");
        let (places, removed) = (HashMap::new(), HashMap::new());
        Self { spec, slots: Vec::new(), places, hand: 0, sweep: 0, counts: [0; 6], counted, removed }
    }

    fn initial(&self, id: u64) -> Vec<f32> {
        let mut row = vec![0.0; DIM];
        self.spec.initial(id, &mut row);
        row.resize(DIM + self.spec.slots(), 0.0);
        row
    }

    fn update(&mut self, rows: &BTreeMap<u64, [f32; DIM]>, version: u32) {
        for (id, gradient) in rows {
            if !self.places.contains_key(id) && !self.counted.admits(&self.spec, *id) {
                self.counts[3] += 1;
                continue;
            }
            let Some(place) = self.place(*id, version) else { continue };
            let (_, updates, touched, row) = &mut self.slots[place];
            (*updates, *touched) = (*updates + 1, version);
            let bytes: Vec<[u8; 4]> = gradient.iter().map(|g| g.to_le_bytes()).collect();
            self.spec.optimizer.update(RATE, u64::from(*updates), 0.5, row, &bytes);
            let (mut words, key) = (vec![0.0; self.spec.dtype.words(DIM)], rounding_key(*id, *updates));
            self.spec.dtype.put(key, &row[..DIM], &mut words);
            self.spec.dtype.get(&words, &mut row[..DIM]);
        }
        if let Some(expire) = self.spec.expire {
            let looked = (self.slots.len() * 4).div_ceil(expire.after as usize).clamp(1, 4096);
            for _ in 0..looked.min(self.slots.len()) {
                if self.slots.len() as u64 <= expire.keep_at_least {
                    return;
                }
                let slot = if self.sweep < self.slots.len() { self.sweep } else { 0 };
                let (id, _, touched, row) = &self.slots[slot];
                let norm = row[..DIM].iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
                let small = expire.norm_below.is_none_or(|below| norm < f64::from(below));
                self.sweep = slot + 1;
                if version - touched >= expire.after && small {
                    let id = *id;
                    self.remove(id, version);
                    self.counts[4] += 1;
                    self.sweep = slot;
                }
            }
        }
    }

    fn remove(&mut self, id: u64, version: u32) {
        let Some(slot) = self.places.remove(&id) else { return };
        self.removed.insert(id, version);
        self.slots.swap_remove(slot);
        if let Some(moved) = self.slots.get(slot) {
            self.places.insert(moved.0, slot);
        }
    }

    /// The slot of an id, which gets a row if there is none and there is room.
    fn place(&mut self, id: u64, version: u32) -> Option<usize> {
        if let Some(place) = self.places.get(&id) {
            return Some(*place);
        }
        let new = (id, 0, 0, self.initial(id));
        let place = if (self.slots.len() as u64) < self.spec.partition_rows() {
            self.slots.push(new);
            self.slots.len() - 1
        } else if self.spec.full == WhenFull::Refuse {
            self.counts[2] += 1;
            return None;
        } else {
            let n = self.slots.len();
            let window: Vec<usize> = (0..8.min(n)).map(|i| (self.hand + i) % n).collect();
            let oldest = window.iter().map(|slot| self.slots[*slot].2).min().expect("a slot");
            let place = window.into_iter().find(|s| self.slots[*s].2 == oldest).expect("that one");
            self.hand = (self.hand + 8) % n;
            self.counts[1] += 1;
            let gone = self.slots[place].0;
            self.places.remove(&gone);
            self.removed.insert(gone, version);
            self.slots[place] = new;
            place
        };
        self.places.insert(id, place);
        self.counts[0] += 1;
        self.counts[5] += u64::from(self.removed.remove(&id).is_some());
        Some(place)
    }

    fn bytes(&self) -> Vec<u8> {
        self.slots.iter().flat_map(|row| self.words(row)).flat_map(u32::to_le_bytes).collect()
    }

    fn words(&self, (id, updates, touched, row): &(u64, u32, u32, Vec<f32>)) -> Vec<u32> {
        let head = [*id as u32, (*id >> 32) as u32, *updates, *touched];
        let mut weights = vec![0.0; self.spec.dtype.words(DIM)];
        self.spec.dtype.put(0, &row[..DIM], &mut weights);
        let row = weights.iter().chain(&row[DIM..]).map(|v| v.to_bits());
        head.into_iter().chain(row).collect()
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
    /// Removes rows, and asks for it a second time.
    Remove(Vec<u64>),
    /// Goes through a checkpoint.
    Resume,
    /// Writes rows of these values, and asks for it a second time.
    Put(BTreeMap<u64, [f32; DIM]>),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let id = prop_oneof![0..20u64, 0..200u64, any::<u64>()];
    let value = (-64i32..64).prop_map(|v| v as f32 / 8.0);
    let rows = prop::collection::btree_map(id.clone(), prop::array::uniform4(value), 0..40);
    let op = prop_oneof![
        6 => rows.clone().prop_map(Op::Update),
        2 => (0..6usize).prop_map(Op::Image),
        1 => Just(Op::Install),
        1 => Just(Op::Resume),
        1 => prop::collection::vec(id.clone(), 0..40).prop_map(Op::Pull),
        1 => prop::collection::vec(id, 0..40).prop_map(Op::Remove),
        1 => rows.prop_map(Op::Put),
    ];
    prop::collection::vec(op, 1..40)
}

fn expire() -> impl Strategy<Value = Option<Expire>> {
    let norm = prop_oneof![Just(None), Just(Some(1.0f32))];
    let some = (prop_oneof![1..4u32, Just(100)], norm, prop_oneof![Just(0u64), Just(20)]);
    let some =
        some.prop_map(|(after, norm_below, keep_at_least)| Expire { after, norm_below, keep_at_least });
    prop::option::of(some)
}

/// What a resume from a checkpoint of this partition makes.
fn resumed(partition: &Arc<Partition>) -> Arc<Partition> {
    let new = Partition::new((0, partition.spec.clone()), 0).expect("memory");
    let image = RowsImage::of(partition);
    let history: Vec<_> = image.history().map(|piece| piece.read().slice(8..)).collect();
    let mut part = 0;
    for tile in image.into_tiles() {
        assert!(new.add(part, &tile.read().into()).expect("its own rows"));
        part += 1;
    }
    for piece in history {
        assert!(new.add_history(part, &piece.clone().into()).expect("its own history"));
        assert!(!new.add_history(part, &piece.into()).expect("once"));
        part += 1;
    }
    Arc::new(new)
}

proptest! {
    #[test]
    fn partition_equals_naive_code(
        ops in ops(),
        optimizer in optimizers(),
        max in prop_oneof![Just(1u64), Just(17), Just(64), Just(100_000)],
        full in prop_oneof![Just(WhenFull::Evict), Just(WhenFull::Refuse)],
        min_count in prop_oneof![3 => Just(1u32), 1 => 2..4u32],
        dtype in prop_oneof![2 => Just(RowType::F32), 1 => Just(RowType::Bf16), 1 => Just(RowType::F16)],
        expire in expire(),
    ) {
        let spec = spec_of(max, (full, min_count, dtype), expire, optimizer);
        let mut partition = Arc::new(Partition::new((0, spec.clone()), 0).expect("memory"));
        let mut naive = Naive::new(spec.clone());
        let mut images: Vec<(usize, RowsImage, Vec<u8>)> = Vec::new();
        for (version, op) in (1u32..).zip(ops) {
            match &op {
                Op::Remove(_) | Op::Put(_) => {}
                Op::Update(rows) => {
                    partition.update(&of(rows), u64::from(version), 0.5, RATE).expect("memory");
                    naive.update(rows, version);
                }
                Op::Image(delay) => images.push((*delay, RowsImage::of(&partition), naive.bytes())),
                Op::Install => {
                    let image = RowsImage::of(&partition);
                    partition = image.partition().expect("its own image");
                }
                Op::Resume => partition = resumed(&partition),
                Op::Pull(ids) => {
                    let expected = ids.iter().flat_map(|id| {
                        let row = naive.places.get(id).map(|at| naive.slots[*at].3.clone());
                        row.unwrap_or_else(|| naive.initial(*id)).into_iter().take(DIM)
                    });
                    let expected: Vec<u8> = expected.flat_map(f32::to_le_bytes).collect();
                    prop_assert_eq!(partition.pull(ids), expected);
                }
            }
            if let Op::Remove(ids) = &op {
                let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
                let before = naive.slots.len();
                ids.iter().for_each(|id| naive.remove(*id, version));
                let gone = (before - naive.slots.len()) as u64;
                naive.counts[1] += gone;
                for _ in 0..2 {
                    let edited = partition.edit(u64::from(version), false, &bytes, u64::from(version));
                    prop_assert_eq!(edited.expect("memory"), gone);
                }
            }
            if let Op::Put(rows) = &op {
                let mut bytes = Vec::new();
                let mut written = 0;
                for (id, values) in rows {
                    let mut row = values.to_vec();
                    row.resize(DIM + spec.slots(), 0.25);
                    bytes.extend(naive.words(&(*id, 9, 77, row.clone())).into_iter().flat_map(u32::to_le_bytes));
                    let Some(place) = naive.place(*id, version) else { continue };
                    naive.slots[place] = (*id, 9, version, row);
                    written += 1;
                }
                for _ in 0..2 {
                    let edited = partition.edit(u64::from(version), true, &bytes, u64::from(version));
                    prop_assert_eq!(edited.expect("memory"), written);
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
        let counts = [header.created, header.evicted, header.refused, header.too_rare, header.expired, header.revived];
        prop_assert_eq!((counts, header.hand as usize), (naive.counts, naive.hand));
        let removed = RowsImage::of(&partition).removed_since(3).expect("it is not long");
        let mut expected: Vec<u64> = naive.removed.iter().filter(|(_, at)| **at > 3).map(|(id, _)| *id).collect();
        expected.sort_unstable();
        prop_assert_eq!(removed.into_iter().collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>(), expected);
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
fn history_of_other_rows_is_refused() {
    let spec = spec_of(300_000, (WhenFull::Evict, 2, RowType::F32), None, RowOptimizer::Sgd { lr: 1.0 });
    let partition = Arc::new(Partition::new((0, spec.clone()), 0).expect("memory"));
    let rows = of(&(0..1000).map(|id| (id, [1.0; DIM])).collect());
    (1..3).for_each(|version| partition.update(&rows, version, 1.0, RATE).expect("memory"));
    let bytes: Vec<u8> = (0..1000u64).flat_map(u64::to_le_bytes).collect();
    partition.edit(3, false, &bytes, 3).expect("memory");
    partition.update(&rows, 4, 1.0, RATE).expect("memory");
    assert!(RowsImage::of(&partition).history().count() > 4, "it takes several pieces");
    assert_eq!(bytes_of(RowsImage::of(&resumed(&partition))), bytes_of(RowsImage::of(&partition)));
    let again =
        |partition: &Arc<Partition>| RowsImage::of(partition).into_parts().last().map(|part| part.read());
    assert_eq!(again(&resumed(&partition)), again(&partition));
    let piece = RowsImage::of(&partition).history().next().expect("one").read().slice(8..);
    let new = Partition::new((0, spec), 0).expect("memory");
    for len in [0, COUNTS_BYTES, piece.len() - 1] {
        new.add_history(0, &piece.slice(..len).into()).expect_err("cut");
    }
    partition.update(&rows, 5, 1.0, RATE).expect("memory");
    let of_more = RowsImage::of(&partition).history().next().expect("one").read().slice(8..);
    let error = new.add_history(0, &of_more.into()).expect_err("there are no rows");
    assert!(error.contains("1000 rows"), "{error}");
    assert_eq!(new.header(), RowsHeader::default(), "nothing is half done");
}

#[test]
fn damaged_tiles_are_refused() {
    let spec = spec(100, WhenFull::Evict, RowOptimizer::Sgd { lr: 1.0 });
    let partition = Arc::new(Partition::new((0, spec.clone()), 0).expect("memory"));
    partition.update(&of(&BTreeMap::from([(1, [1.0; DIM]), (2, [1.0; DIM])])), 1, 1.0, RATE).expect("memory");
    let (header, bytes) = (partition.header(), bytes_of(RowsImage::of(&partition)));
    let history = RowsImage::of(&partition).into_parts().last().expect("behind the rows").read();
    let load = |header: RowsHeader, tile: Vec<u8>| {
        let mut tiles = vec![Payload::from(history.clone()), Payload::from(tile)];
        let next = || tiles.pop().ok_or_else(|| ApplyError::Damaged("no tile is left".into()));
        Partition::load((0, spec.clone()), 0, header, next).map(drop)
    };
    load(header, bytes.clone()).expect("whole");
    load(header, bytes[..bytes.len() - 1].to_vec()).expect_err("cut");
    load(RowsHeader { rows: 1 << 40, ..header }, bytes.clone()).expect_err("too many rows");
    load(RowsHeader { rows: 3, ..header }, bytes).expect_err("fewer rows than it says");
}

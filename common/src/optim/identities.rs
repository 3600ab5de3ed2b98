//! What must hold without an oracle: equalities between optimizers, and that no bit depends on how a vector is
//! cut into buckets.

use super::*;
use crate::{
    codec::put_f32_le,
    encoding::{Encoding, Values},
    payload::{Payload, tests::cut},
    simd::{at, levels},
};
use bytes::Bytes;
use proptest::prelude::*;

pub(super) fn all_kinds() -> Vec<OptimizerConfig> {
    let rms = RmsProp { weight_decay: 0.01, ..RmsProp::default() };
    vec![
        OptimizerConfig::sgd(0.1),
        OptimizerConfig::Momentum(Momentum { dampening: 0.1, weight_decay: 0.01, ..Momentum::default() }),
        OptimizerConfig::Nesterov(Nesterov::default()),
        OptimizerConfig::Adagrad(Adagrad { initial_accumulator: 0.1, ..Adagrad::default() }),
        OptimizerConfig::RmsProp(rms),
        OptimizerConfig::RmsProp(RmsProp { momentum: 0.9, ..rms }),
        OptimizerConfig::RmsProp(RmsProp { centered: true, ..rms }),
        OptimizerConfig::RmsProp(RmsProp { centered: true, momentum: 0.9, ..rms }),
        OptimizerConfig::adam(0.001),
        OptimizerConfig::AdamW(AdamW::default()),
        OptimizerConfig::Adadelta(Adadelta { weight_decay: 0.01, ..Adadelta::default() }),
        OptimizerConfig::Adamax(Adamax { weight_decay: 0.01, ..Adamax::default() }),
        OptimizerConfig::NAdam(NAdam { weight_decay: 0.01, ..NAdam::default() }),
        OptimizerConfig::RAdam(RAdam {
            beta2: 0.9,
            weight_decay: 0.01,
            decoupled_weight_decay: true,
            ..RAdam::default()
        }),
    ]
}

/// Numbers of many sizes from a fixed recurrence (no random crate here, and none is needed).
pub(super) fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let mut x = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (x >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..n).map(|i| next() * [1.0, 1e-3, 10.0, 1e-6][i % 4]).collect()
}

fn le(values: &[f32]) -> Payload {
    let mut out = vec![0xAA]; // one byte in front: payloads arrive at odd addresses
    put_f32_le(values, &mut out);
    Bytes::from(out).slice(1..).into()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Ten updates of `n` weights cut in two at `cut`, each part with its own slots, as buckets have.
fn train(config: &OptimizerConfig, n: usize, cut: usize) -> Vec<f32> {
    let parts = [0..cut, cut..n];
    let mut weights = numbers(n, 1);
    let mut slots = parts.clone().map(|c| config.new_slots(c.len()));
    for t in 1..=10 {
        let hyper = Hyper { lr: 0.01, t, clip_value: Some(0.9) };
        let payload = le(&numbers(n, 100 + t as u32));
        for (at, slots) in parts.clone().into_iter().zip(&mut slots) {
            let part = payload.to_bytes().slice(at.start * 4..at.end * 4).into();
            config.apply(
                &hyper,
                &mut weights[at],
                slots,
                Gradient { payload: &part, encoding: Encoding::F32, scale: 0.25 },
            );
        }
    }
    weights
}

#[test]
fn a_vector_cut_in_buckets_gives_the_same_bits_as_the_whole() {
    for config in all_kinds() {
        let whole = bits(&train(&config, 1003, 0));
        for cut in [1, 7, 500, 1002] {
            assert_eq!(whole, bits(&train(&config, 1003, cut)), "{config:?} cut at {cut}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn an_encoded_payload_in_pieces_gives_the_bits_of_one_piece(
        at in prop::collection::vec(any::<prop::sample::Index>(), 1..12), n in 1usize..1300,
    ) {
        for (config, encoding) in all_kinds().into_iter().flat_map(|c| Encoding::ALL.map(|e| (c.clone(), e))) {
            let mut sent = Vec::new();
            encoding.encode(&numbers(n, 6), &mut sent);
            let pieces = cut(&sent, &at);
            let mut values = vec![0.0; n];
            Values::new(&pieces, encoding, n).expect("its length").read(&mut values).expect("as many");
            let [a, b] = [(&le(&values), Encoding::F32), (&pieces, encoding)].map(|(payload, encoding)| {
                let (mut weights, mut slots) = (numbers(n, 1), config.new_slots(n));
                for t in 1..=3 {
                    let hyper = Hyper { lr: 0.01, t, clip_value: Some(0.9) };
                    config.apply(&hyper, &mut weights, &mut slots, Gradient { payload, encoding, scale: 0.25 });
                }
                let mut buffer = numbers(n, 2);
                apply_buffer(&mut buffer, Gradient { payload, encoding, scale: 0.5 });
                [vec![weights, buffer], slots].concat().iter().map(|v| bits(v)).collect::<Vec<_>>()
            });
            prop_assert_eq!(a, b, "{:?} {}", config, encoding);
        }
    }
}

#[test]
fn momentum_zero_is_sgd() {
    let momentum = Momentum { momentum: 0.0, dampening: 0.5, weight_decay: 0.1, ..Momentum::default() };
    let sgd = Sgd { weight_decay: 0.1, ..Sgd::default() };
    let a = train(&OptimizerConfig::Momentum(momentum), 257, 0);
    assert_eq!(bits(&a), bits(&train(&OptimizerConfig::Sgd(sgd), 257, 0)));
}

#[test]
fn adamw_without_decay_is_adam() {
    let adamw = OptimizerConfig::AdamW(AdamW { weight_decay: 0.0, ..AdamW::default() });
    let adam = OptimizerConfig::adam(1e-3);
    assert_eq!(bits(&train(&adamw, 257, 0)), bits(&train(&adam, 257, 0)));
}

#[test]
fn weight_decay_on_sgd_shrinks_the_weights() {
    let sgd = OptimizerConfig::Sgd(Sgd { lr: 0.1, weight_decay: 0.5 });
    let start = numbers(64, 3);
    let mut weights = start.clone();
    let hyper = Hyper { lr: 0.1, t: 1, clip_value: None };
    sgd.apply(
        &hyper,
        &mut weights,
        &mut [],
        Gradient { payload: &le(&[0.0; 64]), encoding: Encoding::F32, scale: 1.0 },
    );
    for (w, s) in weights.iter().zip(&start) {
        // w - lr * (wd * w) and (1 - lr * wd) * w round at different places: two units in the last place.
        assert!((w - 0.95 * s).abs() <= 2.0 * f32::EPSILON * s.abs());
    }
}

#[test]
fn every_kind_takes_another_rate_and_decay() {
    for config in all_kinds() {
        let other = config.with(0.125, 0.25);
        let table = |c| toml::Table::try_from(c).expect("a table");
        let (mut a, b) = (table(&config), table(&other));
        a.insert("lr".into(), 0.125.into());
        a.insert("weight_decay".into(), 0.25.into());
        assert_eq!((a, other.lr()), (b, 0.125), "and nothing else");
    }
}

#[test]
fn a_buffer_is_plain_subtraction() {
    let start = numbers(33, 4);
    let push = numbers(33, 5);
    let mut values = start.clone();
    apply_buffer(&mut values, Gradient { payload: &le(&push), encoding: Encoding::F32, scale: 0.5 });
    for ((v, s), p) in values.iter().zip(&start).zip(&push) {
        assert_eq!(v.to_bits(), (s - p * 0.5).to_bits());
    }
}

#[test]
fn constant_gradients_do_not_break_centred_rmsprop() {
    let config = OptimizerConfig::RmsProp(RmsProp { alpha: 0.5, centered: true, ..RmsProp::default() });
    let (mut weights, mut slots) = (vec![0f32; 64], config.new_slots(64));
    let payload = le(&numbers(64, 9));
    for t in 1..500 {
        let hyper = Hyper { lr: 1e-6, t, clip_value: None };
        config.apply(
            &hyper,
            &mut weights,
            &mut slots,
            Gradient { payload: &payload, encoding: Encoding::F32, scale: 1.0 },
        );
    }
    assert!(weights.iter().all(|w| w.is_finite()));
}

/// The promise of equal replicas, pinned: if this hash changes, so do the bits of every running job, and a
/// server of one version cannot follow a leader of another.
#[test]
fn optimizer_bits_are_equal_on_every_host_and_vector_unit() {
    for level in levels() {
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        let mut after = Vec::new();
        for config in all_kinds() {
            for b in bits(&at(level, || train(&config, 1003, 0))) {
                hash = (hash ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3);
            }
            after.push(hash);
        }
        for (kinds, pinned) in PINNED {
            let got = after[kinds - 1];
            assert_eq!(got, pinned, "of the first {kinds} some gave other bits with {level:?}: {got:#x}");
        }
    }
}

/// By how many of the kinds: what is new is appended.
const PINNED: [(usize, u64); 2] = [(10, 0x8908_a328_4248_cc2c), (14, 0x2fda_a488_94f0_c7ae)];

#[test]
fn wrong_options_are_named_with_their_range() {
    let read = |s: &str| toml::from_str::<OptimizerConfig>(s);
    let bad =
        read("kind = \"momentum\"\nlr = 1\nmomentum = 1.5").expect("parses").validate().expect_err("range");
    assert_eq!(bad.to_string(), "[optimizer] momentum = 1.5: must be at least 0 and less than 1");
    for (text, key) in [
        ("kind = \"sgd\"\nlr = -0.1", "lr"),
        ("kind = \"sgd\"\nlr = nan", "lr"),
        ("kind = \"sgd\"\nlr = 1e39", "lr"),
        ("kind = \"nesterov\"\nmomentum = 0.0", "momentum"),
        ("kind = \"adagrad\"\neps = 0.0", "eps"),
        ("kind = \"rmsprop\"\nalpha = 1.0", "alpha"),
        ("kind = \"adam\"\nbeta2 = 1.0", "beta2"),
        ("kind = \"adamw\"\nweight_decay = inf", "weight_decay"),
        ("kind = \"adadelta\"\nrho = 1.0", "rho"),
        ("kind = \"adamax\"\nbeta1 = -0.1", "beta1"),
        ("kind = \"nadam\"\nmomentum_decay = -1.0", "momentum_decay"),
        ("kind = \"radam\"\neps = 2.0", "eps"),
    ] {
        assert_eq!(read(text).expect("parses").validate().expect_err(text).key, key);
    }
    for unknown in
        ["kind = \"sgd\"\nmomentum = 0.9", "kind = \"lamb\"", "lr = 0.1", "kind = \"adam\"\nbetas = 1"]
    {
        assert!(read(unknown).is_err(), "{unknown}");
    }
    for config in all_kinds() {
        config.validate().expect("valid");
        let text = toml::to_string(&config).expect("writes");
        assert_eq!(read(&text).expect("reads"), config);
    }
}

#[test]
#[should_panic(expected = "payload and bucket differ in length")]
fn a_payload_of_another_length_is_a_bug_of_the_caller() {
    let hyper = Hyper { lr: 0.1, t: 1, clip_value: None };
    let payload = &vec![0; 7].into();
    OptimizerConfig::sgd(0.1).apply(
        &hyper,
        &mut [0.0; 2],
        &mut [],
        Gradient { payload, encoding: Encoding::F32, scale: 1.0 },
    );
}

//! Kernels whose results must be bit-equal to the servers': optimizers and encodings. The oracle is
//! paraft-common.

mod support;
use paraft_common::encoding::Encoding;
use paraft_common::optim::exact::pow;
use paraft_common::optim::{
    Adagrad, Adam, AdamW, Gradient, Hyper, Momentum, Nesterov, OptimizerConfig, RmsProp, Sgd, apply_buffer,
};
use paraft_common::payload::Payload;
use support::*;

fn payload(values: &[f32]) -> Payload {
    let mut bytes = Vec::new();
    Encoding::F32.encode(values, &mut bytes);
    bytes.into()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// One update by the kernel: weights and slots in place.
fn update(
    s: Schedule,
    config: &OptimizerConfig,
    hyper: &Hyper,
    scale: f32,
    w: &mut [f32],
    slots: &mut [Vec<f32>],
    g: &[f32],
) {
    let (n, count) = (w.len(), w.len() as i64);
    let limit = hyper.clip_value.unwrap_or(f32::INFINITY);
    let lr = hyper.lr;
    let adam = |c: &Adam, decay: f64, shrink: f64, w: &mut [f32], slots: &mut [Vec<f32>]| {
        let step = (f64::from(lr) / (1.0 - pow(c.beta1, hyper.t))) as f32;
        let unbias2 = (1.0 / (1.0 - pow(c.beta2, hyper.t)).sqrt()) as f32;
        let [m, v] = slots else { panic!("two slots") };
        let args = args![
            w,
            m,
            v,
            g,
            count,
            scale,
            limit,
            decay as f32,
            shrink as f32,
            (1.0 - c.beta1) as f32,
            c.beta2 as f32,
            (1.0 - c.beta2) as f32,
            step,
            unbias2,
            c.eps as f32
        ];
        launch_flat(s, "adam", n, args);
    };
    match config {
        OptimizerConfig::Sgd(c) => {
            launch_flat(s, "sgd", n, args![w, g, count, scale, limit, c.weight_decay as f32, lr]);
        }
        OptimizerConfig::Momentum(c) => {
            let enter = if hyper.t == 1 { 1.0 } else { (1.0 - c.dampening) as f32 };
            let args = args![
                w,
                &mut slots[0],
                g,
                count,
                scale,
                limit,
                c.weight_decay as f32,
                lr,
                c.momentum as f32,
                enter
            ];
            launch_flat(s, "momentum", n, args);
        }
        OptimizerConfig::Nesterov(c) => {
            let args =
                args![w, &mut slots[0], g, count, scale, limit, c.weight_decay as f32, lr, c.momentum as f32];
            launch_flat(s, "nesterov", n, args);
        }
        OptimizerConfig::Adadelta(_)
        | OptimizerConfig::Adamax(_)
        | OptimizerConfig::NAdam(_)
        | OptimizerConfig::RAdam(_) => unreachable!("it has no kernel: `has_kernel`"),
        OptimizerConfig::Adagrad(c) => {
            let lr = (f64::from(lr) / (1.0 + (hyper.t - 1) as f64 * c.lr_decay)) as f32;
            let args =
                args![w, &mut slots[0], g, count, scale, limit, c.weight_decay as f32, lr, c.eps as f32];
            launch_flat(s, "adagrad", n, args);
        }
        OptimizerConfig::RmsProp(c) => {
            let mut slots = slots.iter_mut();
            let v = slots.next().expect("the mean square");
            let mean = if c.centered { slots.next() } else { None };
            let buf = if c.momentum > 0.0 { slots.next() } else { None };
            let args = args![
                w,
                v,
                mean,
                buf,
                g,
                count,
                scale,
                limit,
                c.weight_decay as f32,
                lr,
                c.alpha as f32,
                (1.0 - c.alpha) as f32,
                c.eps as f32,
                c.momentum as f32
            ];
            launch_flat(s, "rmsprop", n, args);
        }
        OptimizerConfig::Adam(c) => adam(c, c.weight_decay, 1.0, w, slots),
        OptimizerConfig::AdamW(c) => {
            let plain = Adam {
                lr: c.lr,
                beta1: c.beta1,
                beta2: c.beta2,
                eps: c.eps,
                weight_decay: 0.0,
                amsgrad: false,
            };
            adam(&plain, 0.0, 1.0 - f64::from(lr) * c.weight_decay, w, slots);
        }
    }
}

fn configs() -> Vec<OptimizerConfig> {
    let mut all = vec![
        OptimizerConfig::Sgd(Sgd { lr: 0.1, weight_decay: 0.01 }),
        OptimizerConfig::Sgd(Sgd { lr: 0.1, weight_decay: 0.0 }),
        OptimizerConfig::Momentum(Momentum { lr: 0.1, momentum: 0.9, dampening: 0.3, weight_decay: 0.01 }),
        OptimizerConfig::Nesterov(Nesterov { lr: 0.1, momentum: 0.9, weight_decay: 0.01 }),
        OptimizerConfig::Adagrad(Adagrad { lr_decay: 0.1, weight_decay: 0.01, ..Adagrad::default() }),
        OptimizerConfig::Adam(Adam { weight_decay: 0.01, ..Adam::default() }),
        OptimizerConfig::Adam(Adam { beta1: 0.3, ..Adam::default() }),
        OptimizerConfig::AdamW(AdamW { weight_decay: 0.1, ..AdamW::default() }),
    ];
    for (centered, momentum) in [(false, 0.0), (false, 0.9), (true, 0.0), (true, 0.9)] {
        all.push(OptimizerConfig::RmsProp(RmsProp {
            centered,
            momentum,
            weight_decay: 0.01,
            ..RmsProp::default()
        }));
    }
    all
}

#[test]
fn optimizers_are_bit_equal_to_the_servers() {
    if skipped() {
        return;
    }
    let mut random = Random::new(40);
    for config in configs() {
        for (n, clip_value) in [(1, None), (2051, Some(0.5)), (999, None)] {
            let start: Vec<f32> = random.values(n, 1.0);
            let gradients: Vec<Vec<f32>> = (0..4)
                .map(|step| (0..n).map(|_| random.unit() * [1.0, 1e-3, 1e-20, 10.0][step % 4]).collect())
                .collect();
            let hyper = |t| Hyper { lr: 0.037, t, clip_value };
            let (mut w, mut slots) = (start.clone(), config.new_slots(n));
            for (t, g) in (1..).zip(&gradients) {
                let payload = payload(g);
                config.apply(
                    &hyper(t),
                    &mut w,
                    &mut slots,
                    Gradient { payload: &payload, encoding: Encoding::F32, scale: 0.75 },
                );
            }
            let out = in_every_schedule(config.kind(), |s| {
                let (mut w, mut slots) = (start.clone(), config.new_slots(n));
                for (t, g) in (1..).zip(&gradients) {
                    update(s, &config, &hyper(t), 0.75, &mut w, &mut slots, g);
                }
                let mut out = outputs![w];
                slots.iter().for_each(|slot| out.add(slot));
                out
            });
            for (got, want) in out.iter().zip(std::iter::once(&w).chain(&slots)) {
                let got: Vec<f32> = got.iter().map(|v| *v as f32).collect();
                assert_eq!(bits(&got), bits(want), "{config:?}");
            }
        }
    }
}

#[test]
fn a_buffer_tensor_is_sgd_of_rate_one() {
    if skipped() {
        return;
    }
    let mut random = Random::new(41);
    let (start, g): (Vec<f32>, Vec<f32>) = (random.values(300, 1.0), random.values(300, 1.0));
    let mut want = start.clone();
    apply_buffer(&mut want, Gradient { payload: &payload(&g), encoding: Encoding::F32, scale: 0.3 });
    let out = in_every_schedule("buffer", |s| {
        let mut w = start.clone();
        launch_flat(s, "sgd", 300, args![&mut w, &g, 300i64, 0.3f32, f32::INFINITY, 0.0f32, 1.0f32]);
        outputs![w]
    });
    assert_eq!(out[0].iter().map(|v| (*v as f32).to_bits()).collect::<Vec<_>>(), bits(&want));
}

/// Values of every size, with some that are not finite where `wild`.
fn gradient(random: &mut Random, n: usize, wild: bool) -> Vec<f32> {
    (0..n)
        .map(|i| match (wild, i % 7) {
            (true, _) => f32::from_bits(random.next() as u32),
            (_, 0) => f32::from_bits(random.next() as u32 & 0x3fff_ffff),
            (_, 1) => f32::from_bits(random.next() as u32 & 0x7fff_8000 | 0x1000) % 3e38,
            _ => random.unit(),
        })
        .collect()
}

struct Code {
    encoding: Encoding,
    encode: &'static str,
}

const CODES: [Code; 3] = [
    Code { encoding: Encoding::Bf16, encode: "encode_bf16" },
    Code { encoding: Encoding::F16, encode: "encode_f16" },
    Code { encoding: Encoding::Int8, encode: "encode_int8" },
];

/// For int8 fewer blocks than the table says, so that each takes several runs of values.
fn code_grid(code: &Code, n: usize) -> (usize, usize, usize) {
    if code.encoding == Encoding::Int8 { (n.div_ceil(1024).min(2), 1, 1) } else { flat(n).0 }
}

#[test]
fn encodings_are_the_bytes_of_the_servers() {
    if skipped() {
        return;
    }
    let mut random = Random::new(42);
    for (n, wild, offset) in [
        (1, false, 0),
        (1023, false, 1),
        (1024, false, 0),
        (1025, false, 0),
        (5000, true, 0),
        (3, true, 0),
        (4099, false, 0),
    ] {
        let mut g = gradient(&mut random, n + offset, wild);
        if n == 4099 {
            g[1024..2048].fill(1e-40); // too small for a scale
            g[2048] = f32::MAX;
            g[2049] = -f32::MAX;
        }
        let g = &g[offset..];
        for code in &CODES {
            let mut bytes = Vec::new();
            code.encoding.encode(g, &mut bytes);
            let out = in_every_schedule(code.encode, |s| {
                // Words, so that the bytes are aligned to four.
                let mut words = vec![u32::MAX; bytes.len().div_ceil(4)];
                launch(s, code.encode, code_grid(code, n), 256, 0, args![g, &mut words, n as i64]);
                outputs![words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>()]
            });
            let got: Vec<u8> = out[0].iter().map(|b| *b as u8).collect();
            assert_eq!(got[..bytes.len()], bytes, "{} of {n}", code.encode);
            assert!(got[bytes.len()..].iter().all(|b| *b == 0xff), "{} wrote behind its end", code.encode);
        }
    }
}

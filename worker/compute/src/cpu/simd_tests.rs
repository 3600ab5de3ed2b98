//! Tests of `simd`.

use super::*;

fn noise(seed: u32) -> Lane {
    Lane(std::array::from_fn(|i| {
        let bits = (seed + i as u32).wrapping_mul(2_654_435_761);
        (bits >> 8) as f32 / (1 << 23) as f32 - 1.0
    }))
}

/// All operations of a tile, and one value that depends on all of them.
struct Tile<'a>(&'a [Lane], &'a mut [Lane]);

impl Kernel for Tile<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (x, y) in self.0.windows(3).zip(self.1.iter_mut()) {
            for s in s.parts() {
                let (a, b, c) = (s.load(&x[0]), s.load(&x[1]), s.load(&x[2]));
                let more = s.select(s.gt(a, b), s.sub(a, b), s.mul(a, c));
                let v = s.select(s.eq(a, c), s.splat(0.5), s.fma(a, b, more));
                s.store(y, s.add(v, s.load(y)));
            }
        }
    }
}

#[test]
fn tile_in_parts_equals_whole_and_skips_dead_parts() {
    let mut x: Vec<Lane> = (0..20).map(|i| noise(97 * i)).collect();
    x[7] = x[5];
    x[11].0[3] = f32::NAN;
    for cpu in Cpu::every() {
        let mut whole: Vec<Lane> = (0..18).map(|i| noise(31 * i)).collect();
        let before = whole.clone();
        cpu.run(Tile(&x, &mut whole));
        for live in 1..=LANES {
            let mut parts = before.clone();
            cpu.run_tiles(live, Tile(&x, &mut parts));
            for (i, part) in parts.iter().enumerate() {
                let bits = |lane: &Lane| lane.0.map(f32::to_bits);
                assert_eq!(bits(part)[..live], bits(&whole[i])[..live], "{:?}, {live} live", cpu.isa());
                let dead = live.next_multiple_of(LANES / 2);
                assert_eq!(bits(part)[dead..], bits(&before[i])[dead..], "{:?}, {live} live", cpu.isa());
            }
        }
    }
}

struct Sum<'a>(&'a Lane, &'a mut f32);

impl Kernel for Sum<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        *self.1 = s.sum(s.load(self.0));
    }
}

#[test]
fn a_sum_of_lanes_is_by_halves_at_every_level() {
    // Sixteen ones, except two values that absorb additions before they cancel.
    let mut x = Lane([1.0; LANES]);
    (x.0[0], x.0[2]) = (1e8, -1e8);
    let by_halves = |n: usize| {
        let mut v = x.0;
        let mut n = n / 2;
        while n > 0 {
            (0..n).for_each(|i| v[i] += v[i + n]);
            n /= 2;
        }
        v[0].to_bits()
    };
    for cpu in Cpu::every() {
        let mut sum = 0.0;
        cpu.run(Sum(&x, &mut sum));
        assert_eq!(sum.to_bits(), by_halves(16), "{:?}", cpu.isa());
        cpu.run_live(7, Sum(&x, &mut sum));
        assert_eq!(sum.to_bits(), by_halves(8), "{:?}", cpu.isa());
    }
    assert_ne!(by_halves(16), x.0.iter().sum::<f32>().to_bits(), "the order makes no difference here");
}

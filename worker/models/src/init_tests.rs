//! Tests of `init`.

use super::*;

#[test]
fn normal_values_have_their_moments() {
    let mut v = vec![0.0; 100_001];
    Init::new(3).normal(0.02, &mut v);
    let n = v.len() as f32;
    let mean = v.iter().sum::<f32>() / n;
    let moment = |p: i32| v.iter().map(|x| (x / 0.02).powi(p)).sum::<f32>() / n;
    // The moments of the standard normal distribution are 1 and 3. The standard errors are 0.0045 and 0.03.
    assert!(mean.abs() < 3e-4 && (moment(2) - 1.0).abs() < 0.02 && (moment(4) - 3.0).abs() < 0.15);
}

#[test]
fn many_threads_draw_what_one_does() {
    let len = 3 * PART + 5;
    let mut by_threads = Init::new(7);
    let (mut one, mut many) = (vec![0.0; len], vec![0.0; len]);
    for normal in [false, true] {
        let mut stream = by_threads.0.clone();
        let mut begin = Init(stream.clone());
        match normal {
            true => by_threads.normal(0.02, &mut many),
            false => by_threads.uniform(25, &mut many),
        }
        for part in one.chunks_mut(PART) {
            match normal {
                true => begin.normal(0.02, part),
                false => begin.uniform(25, part),
            }
        }
        assert!(one.iter().zip(&many).all(|(a, b)| a.to_bits() == b.to_bits()), "normal: {normal}");
        // The following values agree too.
        stream.set_word_pos(begin.0.get_word_pos());
        assert_eq!(unit(&mut stream), unit(&mut by_threads.0.clone()));
    }
}

#[test]
fn values_fill_the_interval_and_depend_on_the_seed_only() {
    let draw = |seed| {
        let mut v = vec![0.0; 10_000];
        Init::new(seed).uniform(25, &mut v);
        v
    };
    let v = draw(7);
    assert_eq!(v, draw(7));
    assert_ne!(v, draw(8));
    assert!(v.iter().all(|x| x.abs() <= 0.2));
    let mean = v.iter().sum::<f32>() / v.len() as f32;
    let var = v.iter().map(|x| x * x).sum::<f32>() / v.len() as f32;
    // A uniform variable's variance is width² / 12; ten thousand draws are within a few percent.
    assert!(mean.abs() < 0.005 && (var - 0.04 / 3.0).abs() < 0.0005, "mean {mean}, variance {var}");
}

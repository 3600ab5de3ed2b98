//! Tests of `setup`.

use super::*;

#[test]
fn what_no_fleet_can_be_like_is_refused_by_name() {
    assert!(Setup::default().check(1).is_ok());
    let set = |change: fn(&mut Setup)| {
        let mut setup = Setup::default();
        change(&mut setup);
        setup.check(4).expect_err("refused").to_string()
    };
    for (said, name) in [
        (set(|s| s.compute_ms = -1.0), "compute-ms"),
        (set(|s| s.latency_ms = f64::NAN), "latency-ms"),
        (set(|s| s.jitter = 11.0), "jitter"),
        (set(|s| s.server_gbit = 1e-9), "server-gbit"),
        (set(|s| s.mttf_s = Some(0.0)), "mttf-s"),
        (set(|s| s.cores = Some(0)), "cores"),
        (set(|s| _ = s.slow.insert(4, 2.0)), "worker 4"),
        (set(|s| _ = s.slow.insert(3, f64::INFINITY)), "worker 3"),
        (set(|s| s.straggle = Some(Straggle { probability: 2.0, factor: 2.0 })), "straggle"),
    ] {
        assert!(said.contains(name), "{said}");
    }
    assert_eq!(parse_slow("1:5x"), Ok((1, 5.0)));
    assert_eq!(parse_slow("worker=2:1.5"), Ok((2, 1.5)));
    assert!(["", "1", "1:", "x:5x", "1:NaNx"].into_iter().all(|t| parse_slow(t).is_err()));
    assert_eq!("0.01:10x".parse(), Ok(Straggle { probability: 0.01, factor: 10.0 }));
    assert!("10x".parse::<Straggle>().is_err());
}

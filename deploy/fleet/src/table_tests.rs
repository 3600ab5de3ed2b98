//! Tests of `table`.

use super::*;

#[test]
fn failures_of_servers_stand_below_the_table_if_any() {
    let quiet = Summary { mode: "bsp".into(), ..Summary::default() };
    let none = modes(std::slice::from_ref(&quiet));
    assert!(!none.contains("servers lost"), "{none}");
    let broken = Summary {
        servers_lost: 1,
        leaders_elected: 2,
        longest_stall_seconds: Some(0.1),
        mode: "asp".into(),
        ..Summary::default()
    };
    let row = "servers lost 1, leaders elected 2, longest stall 0.10 s";
    let one = modes(std::slice::from_ref(&broken));
    assert_eq!(one.lines().last(), Some(&*format!(" {row}")), "{one}");
    let two = modes(&[quiet, broken]);
    assert_eq!(two.lines().last(), Some(&*format!(" asp: {row}")), "{two}");
    assert_eq!(two.matches("servers lost").count(), 1, "{two}");
}

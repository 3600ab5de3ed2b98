//! What the screen of `paraft top` shows, and the actions of its keys.

use super::*;
use facts::{Member, Server, Shard};
use ratatui::{Terminal, backend::TestBackend};

fn fleet(at: u64, state: &str) -> Facts {
    let member = |worker| Member { worker, clock: at / 100 - u64::from(worker), ..Member::default() };
    let job = |id, name: &str| Job {
        id,
        name: name.into(),
        state: "running".into(),
        mode: "bsp".into(),
        workers: 2,
        samples: at * 10,
        members: vec![member(0), member(1)],
        ..Job::default()
    };
    let server = |id| Server { id, address: format!("h{id}:1"), state: "up".into(), ..Server::default() };
    Facts {
        simulated: false,
        at,
        leader: Some(0),
        servers: vec![server(0), Server { state: state.into(), ..server(1) }],
        shards: vec![Shard { leader: Some(0), voters: vec![0, 1], silent: vec![1], ..Shard::default() }],
        jobs: vec![job(1, "digits"), job(2, "text")],
        faults: None,
        ..Facts::default()
    }
}

fn seen(screen: &Screen, (width, height): (u16, u16)) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
    terminal.draw(|frame| screen.draw(frame)).expect("drawn");
    terminal.backend().to_string()
}

#[test]
fn top_draws_a_fleet_in_large_and_small_terminals() {
    let mut screen = Screen::default();
    seen(&screen, (80, 24));
    screen.see(Some(fleet(1000, "up")));
    screen.see(Some(fleet(3000, "silent")));
    let all = seen(&screen, (110, 40));
    for words in
        ["s0 leads", "digits", "text", "samples/s", "silent", "s1 is silent, and was up", "h1:1", "w1"]
    {
        assert!(all.contains(words), "`{words}` is not in:\n{all}");
    }
    for size in [(20, 5), (1, 1), (300, 100), (40, 12)] {
        seen(&screen, size);
    }
    let small = seen(&screen, (80, 24));
    for words in ["digits", "bsp", "samples/s", "h1:1", "s1 is silent", "q end"] {
        assert!(small.contains(words), "`{words}` is not in:\n{small}");
    }
    screen.key(KeyCode::Esc);
    screen.key(KeyCode::Char('s'));
    let asks = seen(&screen, (80, 24));
    assert!(asks.contains("other key: no"), "a question is seen to its end:\n{asks}");
    screen.key(KeyCode::Esc);
    screen.see(None);
    assert!(seen(&screen, (110, 40)).contains("no server answers"));
    screen.see(None);
    assert!(seen(&screen, (110, 40)).contains("s0 is silent, and was up"));
    let gone = seen(&screen, (80, 24));
    assert!(gone.contains("has no leader that can agree") && gone.contains(" no leader "), "{gone}");
}

#[test]
fn a_key_does_nothing_before_it_is_said_what_it_means() {
    let mut screen = Screen::default();
    screen.see(Some(fleet(1000, "up")));
    let press = |screen: &mut Screen, keys: &str| -> Vec<Command> {
        keys.chars().map(|c| screen.key(KeyCode::Char(c))).filter(|a| *a != Command::Nothing).collect()
    };
    let mode = |job: &str| vec![Command::Act(Act::Mode { job: job.into(), mode: "asp".into() })];
    assert_eq!(press(&mut screen, "may"), mode("text"), "the latest job");
    assert_eq!(press(&mut screen, "jmay"), mode("digits"));
    assert_eq!(press(&mut screen, "jjkmay"), mode("text"));
    assert_eq!(press(&mut screen, "d1y"), [Command::Act(Act::Drain { server: 1, undo: false })]);
    assert!(press(&mut screen, "d7y").is_empty() && screen.said == "there is no s7");
    assert!(press(&mut screen, "sn").is_empty() && press(&mut screen, "mxy").is_empty());
    screen.key(KeyCode::Char('s'));
    assert!(seen(&screen, (110, 40)).contains("Stop text?"));
    assert_eq!(screen.key(KeyCode::Char('y')), Command::Act(Act::Stop { job: "text".into() }));
    assert_eq!(press(&mut screen, "cy"), [Command::Act(Act::Save { job: "text".into() })]);
    // Actions on absent items are ignored.
    assert!(press(&mut screen, "-y+yfxy").is_empty());
    let mut facts = fleet(4000, "up");
    facts.jobs[1].most = Some(2);
    facts.faults = Some([(1, Fault::SlowDisk)].into());
    screen.see(Some(facts));
    assert!(seen(&screen, (110, 40)).contains("+/- workers  f fault"));
    assert_eq!(press(&mut screen, "+y-y"), [Command::Act(Act::Workers { job: 2, workers: 1 })], "2 at most");
    let fault = |fault, undo| [Command::Act(Act::Fault { server: 1, fault, undo })];
    assert_eq!(press(&mut screen, "f1py"), fault(Fault::Partition, false));
    assert_eq!(press(&mut screen, "f1dy"), fault(Fault::SlowDisk, true), "it is on");
    assert!(press(&mut screen, "f7pyf1zy").is_empty());
    let mut facts = fleet(5000, "up");
    facts.jobs[1].state = "finished".into();
    screen.see(Some(facts));
    assert_eq!(press(&mut screen, "xy"), [Command::Act(Act::Delete { job: "text".into() })]);
    assert_eq!(press(&mut screen, "q"), [Command::End]);
}

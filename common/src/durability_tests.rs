//! Tests of `durability`.

use super::*;

#[test]
fn contradictions_are_named_with_their_key_and_a_remedy() {
    use Durability as D;
    let w = LeaderWindow::default();
    for (mode, durability, window, key) in [
        (Mode::Bsp, D::QuorumMemory, w, None),
        (Mode::Bsp, D::QuorumDisk, w, None),
        (Mode::Ssp(2), D::Leader, w, None),
        (Mode::Asp, D::Leader, w, None),
        (Mode::Bsp, D::Leader, w, Some("durability")),
        (Mode::Asp, D::Leader, LeaderWindow { ms: 1, ..w }, Some("leader_window.ms")),
        (Mode::Asp, D::Leader, LeaderWindow { pushes: 0, ..w }, Some("leader_window.pushes")),
    ] {
        let got = check(mode, durability, window).err().map(|e| e.key);
        assert_eq!(got, key, "{mode} {durability} {window:?}");
    }
}

#[test]
fn levels_read_back_what_they_print() {
    #[derive(Deserialize)]
    struct Job {
        durability: Durability,
    }
    for d in [Durability::QuorumDisk, Durability::QuorumMemory, Durability::Leader] {
        let read: Job = toml::from_str(&format!("durability = \"{d}\"")).expect("toml");
        assert_eq!(read.durability, d);
    }
}

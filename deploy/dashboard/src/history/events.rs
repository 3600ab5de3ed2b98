//! The events between two snapshots of a fleet.

use crate::facts::{Facts, Shard};
use std::collections::BTreeMap;

/// Kind, job and text of each event.
pub type Messages = Vec<(&'static str, Option<u32>, String)>;

/// Servers that joined, left or changed, and a new leader of the control group.
pub fn servers(before: &Facts, now: &Facts, said: &mut Messages) {
    for s in &now.servers {
        match before.servers.iter().find(|o| o.id == s.id) {
            None => said.push(("server", None, format!("s{} has joined, at {}", s.id, s.address))),
            Some(o) if o.state != s.state => {
                said.push(("server", None, format!("s{} is {}, and was {}", s.id, s.state, o.state)));
            }
            Some(o) if o.trouble != s.trouble && !s.trouble.is_empty() => {
                said.push(("server", None, format!("s{}: {}", s.id, s.trouble)));
            }
            Some(_) => {}
        }
    }
    for o in before.servers.iter().filter(|o| now.servers.iter().all(|s| s.id != o.id)) {
        said.push(("server", None, format!("s{} is no longer a server of the fleet", o.id)));
    }
    if before.leader != now.leader {
        said.push(match now.leader {
            Some(s) => ("election", None, format!("s{s} leads the control group")),
            None => ("election", None, "the control group has no leader that can agree".into()),
        });
    }
}

/// Up to this many shards with the same change get their own events.
const MAX_SEPARATE_EVENTS: usize = 4;

/// Elections and changed states of shards.
pub fn shards(before: &Facts, now: &Facts, said: &mut Messages) {
    let old: BTreeMap<_, _> = before.shards.iter().map(|o| ((o.job, o.shard), o)).collect();
    // A failed server has dozens of shards: shards with the same change share one event.
    let mut led: BTreeMap<(u32, Option<u64>), Vec<&Shard>> = BTreeMap::new();
    let mut states: BTreeMap<(u32, &str, &str), Vec<&Shard>> = BTreeMap::new();
    for s in &now.shards {
        let Some(o) = old.get(&(s.job, s.shard)) else { continue };
        let elected = s.leader.is_some() && (o.leader != s.leader || o.term < s.term && o.term > 0);
        if elected || o.leader.is_some() && s.leader.is_none() {
            led.entry((s.job, s.leader)).or_default().push(s);
        }
        if o.state != s.state {
            states.entry((s.job, &s.state, &o.state)).or_default().push(s);
        }
    }
    let list = |all: &[&Shard]| all.iter().map(|s| s.shard.to_string()).collect::<Vec<_>>().join(", ");
    for ((job, leader), all) in led {
        let job_name = name(now, job);
        let mut say = |what: String| said.push(("election", Some(job), what));
        match leader {
            _ if all.len() <= MAX_SEPARATE_EVENTS => all.iter().for_each(|s| {
                say(match leader {
                    Some(leader) => {
                        format!("s{leader} leads shard {} of {job_name}, in term {}", s.shard, s.term)
                    }
                    None => format!("shard {} of {job_name} has no leader", s.shard),
                });
            }),
            Some(leader) => {
                say(format!("s{leader} leads {} shards of {job_name}: {}", all.len(), list(&all)))
            }
            None => say(format!("{} shards of {job_name} have no leader: {}", all.len(), list(&all))),
        }
    }
    for ((job, state, was), all) in states {
        let job_name = name(now, job);
        let mut say = |what: String| said.push(("repair", Some(job), what));
        if all.len() > MAX_SEPARATE_EVENTS {
            say(format!("{} shards of {job_name} are {state}, and were {was}: {}", all.len(), list(&all)));
            continue;
        }
        for s in all {
            let why = if s.trouble.is_empty() { String::new() } else { format!(": {}", s.trouble) };
            say(format!("shard {} of {job_name} is {state}, and was {was}{why}", s.shard));
        }
    }
}

fn name(facts: &Facts, job: u32) -> String {
    match facts.jobs.iter().find(|j| j.id == job).map(|j| j.name.as_str()) {
        // The initial shard group of a fleet, until a worker starts a job.
        Some("") | None => "no job".into(),
        Some(name) => name.to_string(),
    }
}

/// New jobs, and changed states, modes, workers, evaluations and checkpoints.
pub fn jobs(before: &Facts, now: &Facts, said: &mut Messages) {
    for j in &now.jobs {
        let (id, name) = (Some(j.id), name(now, j.id));
        let Some(o) = before.jobs.iter().find(|o| o.id == j.id) else {
            said.push(("job", id, format!("{name} is {}", j.state)));
            continue;
        };
        if o.state != j.state {
            said.push(("job", id, format!("{name} is {}, and was {}", j.state, o.state)));
        }
        if o.mode != j.mode && !j.mode.is_empty() && !o.mode.is_empty() {
            said.push(("mode", id, format!("{name} continues in {}, and was in {}", j.mode, o.mode)));
        }
        // Without a leader, the members of the shard are unknown.
        if !j.members.is_empty() && !o.members.is_empty() {
            for m in j.members.iter().filter(|m| o.members.iter().all(|o| o.worker != m.worker)) {
                said.push(("worker", id, format!("worker {} of {name} is there", m.worker)));
            }
            for m in o.members.iter().filter(|o| j.members.iter().all(|m| o.worker != m.worker)) {
                said.push(("worker", id, format!("worker {} of {name} has left", m.worker)));
            }
        }
        let known = o.evaluated.as_ref().map(|e| e.epoch);
        if let Some(e) = j.evaluated.as_ref().filter(|e| known != Some(e.epoch)) {
            let accuracy = if e.accuracy > 0.0 {
                format!(", accuracy {:.2} %", 100.0 * e.accuracy)
            } else {
                String::new()
            };
            let what = format!("{name}: held-out loss {:.4}{accuracy}", e.loss);
            said.push(("evaluation", id, what));
        }
        if let Some((step, _)) = j.checkpoint.filter(|c| Some(*c) != o.checkpoint) {
            said.push(("checkpoint", id, format!("{name}: a checkpoint of step {step}")));
        }
    }
}

//! Jobs that come to a fleet and go: what is asked of the leader of the control group.

use super::convert::shape_of;
use crate::control::{Agent, Command, JobState, Outcome, Submission};
use paraft_proto::{EndJobRequest, SubmitRequest};

/// Takes a job in; gives its number. The error is for people.
pub async fn submit(agent: &Agent, request: SubmitRequest) -> Result<u32, String> {
    let SubmitRequest { name, token, shape, keep_ms, run } = request;
    let shape = shape_of(shape.as_ref()).ok_or("the job's settings are of another version")?;
    if name.chars().chain(run.chars()).any(char::is_control) {
        return Err("the job's name, or its run's folder, has a character that is none to be shown".into());
    }
    if token == 0 {
        return Err("a submission has a token, drawn at random".into());
    }
    let servers = agent.agreed.read(|s| s.servers.values().filter(|m| !m.draining).count());
    if shape.replicas as usize > servers {
        return Err(format!(
            "{} replicas need as many servers, and this fleet has {servers}: set cluster.replicas, or start servers",
            shape.replicas
        ));
    }
    let seen_ms = paraft_host::clock::unix_ms();
    let submission = Submission { name, token, shape, keep_ms, seen_ms, run };
    match agent.propose(Command::Submit(submission.clone())).await? {
        Outcome::Submitted(job) => {
            tracing::info!(%job, name = submission.name, %shape, "submitted");
            Ok(job.0)
        }
        Outcome::Refused(why) => Err(why),
        Outcome::Done | Outcome::Joined(_) => Err("an answer of another kind".into()),
    }
}

/// Ends a job; gives the word for what it was before.
pub async fn end(agent: &Agent, request: EndJobRequest) -> Result<&'static str, String> {
    let EndJobRequest { job: name, delete } = request;
    let found = agent.agreed.read(|s| {
        let mut named = s.jobs.iter().filter(|(_, j)| j.name == name);
        named.next_back().map(|(id, j)| (id, j.state, j.stopping))
    });
    let Some((job, state, stopping)) = found else {
        let there = agent.job_names();
        let there = if there.is_empty() { "none".to_string() } else { there.join(", ") };
        return Err(format!("this fleet has no job `{name}`; it has {there}"));
    };
    if !delete && (stopping || state == JobState::Stopped) {
        return Ok(state.name()); // asked again
    }
    let command = match delete {
        true => Command::Delete { job },
        false => Command::Stop { job, now_ms: paraft_host::clock::unix_ms() },
    };
    match agent.propose(command).await? {
        Outcome::Refused(why) => Err(why),
        _ => {
            tracing::info!(%job, name, delete, "ended by a person's word");
            Ok(state.name())
        }
    }
}

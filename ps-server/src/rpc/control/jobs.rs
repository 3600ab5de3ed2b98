//! Submission and end of jobs, at the leader of the control group.

use super::super::shape::shape_of;
use crate::control::{Agent, Done, JobState, Order, Outcome, State, Submission};
use paraft_common::config::{MAX_NAME_CHARS, check_name};
use paraft_proto::{EndJobRequest, RefusalKind, SubmitRequest};

/// Submits a job; returns its number.
pub async fn submit(agent: &Agent, request: SubmitRequest) -> Result<u32, RefusalKind> {
    let submission = submission(&agent.agreed.get(), request, paraft_host::clock::unix_ms())?;
    let (name, shape) = (submission.name.clone(), submission.shape);
    match agent.order(submission.token, Order::Submit(submission)).await? {
        Outcome::Submitted(job) => {
            tracing::info!(%job, name, %shape, "submitted");
            Ok(job.0)
        }
        _ => Err(another_order()),
    }
}

/// Checks a request for a job against this state.
///
/// # Errors
/// What is wrong with it.
pub fn submission(state: &State, request: SubmitRequest, seen_ms: u64) -> Result<Submission, RefusalKind> {
    let bad = |why: String| Err(RefusalKind::BadOrder(why));
    let SubmitRequest { name, token, shape, keep_ms, run } = request;
    let Some(shape) = shape_of(shape.as_ref()) else {
        return bad("the job's settings are of another version".into());
    };
    check_name(&name).map_err(RefusalKind::BadName)?;
    if run.chars().any(char::is_control) {
        return bad("the name of the job's run folder has a control character".into());
    }
    let servers = state.servers.values().filter(|m| !m.draining).count();
    if shape.replicas as usize > servers {
        let emptied =
            state.servers.iter().filter(|(_, m)| m.draining).map(|(s, _)| s.to_string()).collect::<Vec<_>>();
        let emptied = match emptied.is_empty() {
            true => String::new(),
            false => format!(" beside {}, which `paraft drain` empties (--undo)", emptied.join(", ")),
        };
        return bad(format!(
            "{} replicas need as many servers, and this fleet has {servers}{emptied}: set cluster.replicas, or start servers",
            shape.replicas
        ));
    }
    Ok(Submission { name, token, shape, keep_ms, seen_ms, run })
}

/// Ends a job; returns its state before.
pub async fn end(agent: &Agent, request: EndJobRequest) -> Result<JobState, RefusalKind> {
    let (token, name, delete) = (request.token, request.job.clone(), request.delete);
    let order = match ending(&agent.agreed.get(), request, paraft_host::clock::unix_ms())? {
        Ending::Ended(before) => return Ok(before),
        Ending::Order(order) => order,
    };
    match agent.order(token, order).await? {
        Outcome::Ended(before) => {
            tracing::info!(name, delete, "ended by an operator");
            Ok(before)
        }
        _ => Err(another_order()),
    }
}

/// The result of checking a request for a job's end.
#[derive(Debug)]
pub enum Ending {
    /// It is done already; the job's state before.
    Ended(JobState),
    /// An order to commit.
    Order(Order),
}

/// Checks a request for a job's end against this state.
///
/// # Errors
/// What is wrong with it.
pub fn ending(state: &State, request: EndJobRequest, now_ms: u64) -> Result<Ending, RefusalKind> {
    let EndJobRequest { job: name, delete, token } = request;
    // Before the name is looked up: the job that this order deleted is gone.
    match state.orders.of(token) {
        Some(Done::Ended(before)) => return Ok(Ending::Ended(before)),
        Some(Done::Done | Done::Submitted(_)) => return Err(another_order()),
        None => {}
    }
    let Some((job, found)) = state.jobs.iter().rfind(|(_, j)| j.name == name) else {
        let shown: String = name.chars().take(MAX_NAME_CHARS).collect();
        let asked = shown.escape_debug().to_string();
        return Err(RefusalKind::NoSuchJob { asked, there: state.jobs.names() });
    };
    if !delete && (found.stopping || found.state == JobState::Stopped) {
        return Ok(Ending::Ended(found.state)); // a repeated request
    }
    Ok(Ending::Order(match delete {
        true => Order::Delete { job },
        false => Order::Stop { job, now_ms },
    }))
}

fn another_order() -> RefusalKind {
    RefusalKind::BadOrder("this token is another order's: draw one at random for each order".into())
}

#[cfg(test)]
#[path = "jobs_tests.rs"]
mod tests;

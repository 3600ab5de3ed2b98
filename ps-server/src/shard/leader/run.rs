//! The task of one replica's [`Leader`]: it waits for inputs and carries out effects. Only this module of the
//! leader has a clock, channels and a runtime.

use super::{ConnId, Counters, DrawSession, Effect, Event, Input, Leader, Now, Replication, Reply};
use crate::{
    compute,
    raft::Leadership,
    shard::{command::Outcome, state::Shard},
};
use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use paraft_common::SessionId;
use paraft_trace::Moment;
use std::{collections::BTreeMap, sync::Arc};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

/// Messages that may wait for the leader. If the queue is full, streams and their workers wait.
pub const EVENT_QUEUE: usize = 1024;

/// Messages that are taken in one go before outcomes and deadlines are checked again.
const MAX_EVENT_BATCH: usize = 32;

/// Draws session ids at random.
pub fn random_sessions() -> DrawSession {
    Box::new(|| SessionId(rand::random_range(1..=u64::MAX)))
}

/// Starts the leader of one replica.
pub fn spawn(
    shard: Arc<Shard>,
    group: Arc<dyn Replication>,
    counters: Arc<Counters>,
    founding: u64,
    draw_session: DrawSession,
) -> mpsc::Sender<Event> {
    let (tx, events) = mpsc::channel(EVENT_QUEUE);
    let leadership = group.leadership();
    let job = shard.name().job().0;
    let leader = Leader::new(shard, counters, founding, draw_session);
    let task = Task { leader, job, group, lines: ReplySenders::default(), done: FuturesUnordered::new() };
    tokio::spawn(task.run(events, leadership));
    tx
}

/// The reply channel of each stream.
#[derive(Default)]
pub(crate) struct ReplySenders(BTreeMap<ConnId, mpsc::Sender<Reply>>);

impl ReplySenders {
    /// Converts an event to the leader's input. Returns the room of a message with a payload: from here on the
    /// shard's own rule bounds it.
    pub fn input(&mut self, event: Event) -> Input {
        match event {
            Event::Open { conn, tx, worker, session, job, liveness } => {
                self.0.insert(conn, tx);
                Input::Open { conn, worker, session, job, liveness }
            }
            Event::Message(conn, message) | Event::Bulk(conn, message, _) => Input::Message(conn, message),
            Event::Closed(conn) => {
                self.close(conn);
                Input::Closed(conn)
            }
            Event::SwitchMode { number, wanted, tx } => Input::SwitchMode(number, wanted, tx.map(Into::into)),
            Event::Stop => Input::Stop,
            Event::EditRows(edit, tx) => Input::EditRows(edit, tx.into()),
            Event::Fetch { step, now, tx } => Input::Fetch(step, now, tx.into()),
        }
    }

    /// Sends a reply. Returns false if the stream had to be closed: its queue holds everything that a worker may
    /// have outstanding, so a full queue means that the worker does not read.
    pub fn send(&mut self, conn: ConnId, reply: Reply) -> bool {
        let sent = self.0.get(&conn).is_none_or(|tx| tx.try_send(reply).is_ok());
        if !sent {
            self.close(conn);
        }
        sent
    }

    /// Closes a stream.
    pub fn close(&mut self, conn: ConnId) {
        self.0.remove(&conn);
    }
}

struct Task {
    leader: Leader,
    /// The job whose share of computation time it uses.
    job: u32,
    group: Arc<dyn Replication>,
    lines: ReplySenders,
    done: FuturesUnordered<BoxFuture<'static, Input>>,
}

fn now() -> Now {
    Now { at: Instant::now().into_std(), moment: Moment::now() }
}

impl Task {
    async fn run(mut self, mut events: mpsc::Receiver<Event>, mut leadership: watch::Receiver<Leadership>) {
        let first = *leadership.borrow_and_update();
        self.handle(Input::Leadership(first)).await;
        loop {
            let deadline = self.leader.deadline().map(Instant::from_std);
            let input = tokio::select! {
                biased;
                Some(done) = self.done.next(), if !self.done.is_empty() => done,
                changed = leadership.changed() => match changed {
                    Err(_) => return, // the group has shut down
                    Ok(()) => Input::Leadership(*leadership.borrow_and_update()),
                },
                event = events.recv() => match event {
                    None => return,
                    Some(event) => self.lines.input(event),
                },
                () = tokio::time::sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    Input::Time
                }
            };
            self.handle(input).await;
            // Waiting on all sources costs as much as many inputs.
            for _ in 0..MAX_EVENT_BATCH {
                let Ok(event) = events.try_recv() else { break };
                let input = self.lines.input(event);
                self.handle(input).await;
            }
        }
    }

    /// Handles one input, and those that its effects return at once.
    async fn handle(&mut self, input: Input) {
        let (mut next, mut inputs) = (Some(input), Vec::new());
        while let Some(input) = next.take().or_else(|| inputs.pop()) {
            self.leader.handle(now(), &*self.group, input);
            while let Some(effect) = self.leader.next_effect() {
                inputs.extend(match effect {
                    Effect::Send(conn, reply) => {
                        (!self.lines.send(conn, reply)).then_some(Input::Closed(conn))
                    }
                    effect => self.carry_out(effect).await,
                });
            }
        }
    }

    /// Carries out an effect. Returns an input that the leader must handle before anything else.
    async fn carry_out(&mut self, effect: Effect) -> Option<Input> {
        match effect {
            Effect::Send(..) => {} // the caller sends it
            Effect::Close(conn) => self.lines.close(conn),
            Effect::Propose(number, proposal) => {
                let waits = self.group.propose(proposal).await;
                let outcome = async move {
                    let outcome = match waits {
                        Ok(outcome) => outcome.await,
                        Err(e) => Err(e),
                    };
                    Input::Outcome(number, outcome)
                };
                self.done.push(outcome.boxed());
            }
            Effect::Confirm(number) => {
                let confirmed = self.group.barrier();
                let confirmed = confirmed.map(move |c| Input::Outcome(number, c.map(|()| Outcome::Done)));
                self.done.push(confirmed.boxed());
            }
            Effect::Compute(bytes, work) => {
                return Some(Input::Computed(compute::run(self.job, bytes, work).await));
            }
            Effect::SwitchResult(asker, switched) => asker.answer(switched),
            Effect::EditResult(asker, edited) => asker.answer(edited),
            Effect::FetchResult(asker, fetched) => asker.answer(fetched),
            Effect::Sleep => self.done.push(self.group.sleep().map(|_| Input::SleepOrWake).boxed()),
            Effect::Wake => self.done.push(self.group.ensure_awake().map(|_| Input::SleepOrWake).boxed()),
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// An attacker that tries a million numbers a second for a year has one chance in 500,000.
    #[test]
    fn the_numbers_of_sessions_cannot_be_guessed() {
        let mut draw = random_sessions();
        let drawn: BTreeSet<u64> = (0..64).map(|_| draw().0).collect();
        assert_eq!(drawn.len(), 64);
        let high = drawn.iter().map(|s| s >> 32).collect::<BTreeSet<_>>();
        assert!(high.len() > 60, "they lie close together: {drawn:x?}");
        assert!(drawn.iter().all(|s| SessionId(*s).tag() != *s), "what is shown is the number itself");
    }
}

//! Asks for chunks of the data (leased sampler). What is answered is read off the replicated state, after every apply:
//! the ask itself, another worker's that completes an epoch, a member that leaves. So an answer that went down with a
//! leader is given again by the next, when the worker asks it again.

use super::{ConnId, Message, Owner, Purpose, Reply};
use crate::shard::{chunks::Answer, command::Command};
use paraft_common::{SessionId, WorkerId};

/// An ask that was not answered for good.
#[derive(Debug)]
pub(super) struct WaitingTake {
    worker: WorkerId,
    request: u64,
    /// It was told to wait.
    told: bool,
}

impl Owner {
    /// Takes in what only workers of the leased sampler say.
    pub(super) async fn leased(
        &mut self,
        conn: ConnId,
        worker: WorkerId,
        session: SessionId,
        message: Message,
    ) {
        match message {
            Message::Take { request, epoch, done } => {
                if let Some(lead) = &mut self.lead {
                    lead.takes.insert(conn, WaitingTake { worker, request, told: false });
                }
                let take = Command::Take { worker, session, request, epoch, done };
                self.propose(Purpose::Other, take.into()).await;
            }
            Message::Rest => {
                // In the log too a worker trains, then rests.
                let rest = Command::Rest { worker, session };
                self.propose_behind_own(worker, Purpose::Other, rest).await;
            }
            Message::Resume { level } => {
                // Behind what the others have pushed: where they are decides where it begins.
                let resume = Command::Resume { worker, session, level };
                self.propose_behind_own(worker, Purpose::Resume { conn }, resume).await;
            }
            _ => {}
        }
    }

    /// Answers every ask that the state has an answer for.
    pub(super) fn answer_takes(&mut self) {
        let Some(lead) = &mut self.lead else { return };
        if lead.takes.is_empty() {
            return;
        }
        let mut answers = Vec::new();
        self.shard.read(|m| {
            let Some(chunks) = &m.chunks else { return };
            lead.takes.retain(|conn, take| {
                let answer = chunks.answer(take.worker, take.request, m.stop);
                let waits = matches!(answer, None | Some(Answer::Wait));
                if let Some(answer) = answer.filter(|_| !(waits && take.told)) {
                    answers.push((*conn, take.request, answer));
                    take.told = true;
                }
                waits
            });
        });
        for (conn, request, answer) in answers {
            self.send(conn, Reply::Taken { request, answer });
        }
    }
}

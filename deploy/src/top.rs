//! `paraft top`: the data of the live page in a terminal, with its actions on keys.

use crate::{dashboard::here, ended};
use clap::Args;
use paraft_dashboard::{
    LocalControl,
    act::Act,
    facts::{self, Facts, Job},
    history::History,
};
use paraft_fleet::{
    ask,
    failure::Failure,
    faults::Fault,
    targets::{FleetArg, Target},
};
use paraft_worker::exit;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use std::{
    io::IsTerminal,
    sync::mpsc::{self, Receiver},
    time::Duration,
};

mod drawing;

#[derive(Args)]
pub struct TopArgs {
    #[command(flatten)]
    pub fleet: FleetArg,
}

/// The poll interval.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The poll interval of the keyboard.
const KEY_POLL_INTERVAL: Duration = Duration::from_millis(50);

pub fn run(args: &TopArgs) -> Result<i32, Failure> {
    let fleet = args.fleet.to_ask()?;
    let servers = match fleet.target()? {
        Target::Servers(servers) => servers,
        Target::Ended(run) => return Ok(ended::refer(&run)),
    };
    if !std::io::stdout().is_terminal() {
        return Err(Failure::new(exit::USAGE, "this is for a terminal").help("`paraft status` prints"));
    }
    // Fails with a clear error if no server answers.
    ask::jobs(&servers)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.map_err(|e| Failure::new(exit::IO, format!("no runtime: {e}")))?;
    let (tell, told) = mpsc::channel();
    let here = here(fleet.folder());
    let adds = here.clone();
    runtime.spawn(async move {
        let mut known = servers;
        loop {
            let mut facts = facts::ask(&mut known).await;
            facts.iter_mut().for_each(|facts| adds.add(facts));
            if tell.send(facts).is_err() {
                return;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    });
    let mut terminal = ratatui::try_init().map_err(|e| Failure::new(exit::IO, e))?;
    let ended = watch(&mut terminal, &runtime, &told, &here);
    ratatui::restore();
    ended.map(|()| exit::OK).map_err(|e| Failure::new(exit::IO, e))
}

fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    runtime: &tokio::runtime::Runtime,
    told: &Receiver<Option<Facts>>,
    here: &LocalControl,
) -> std::io::Result<()> {
    let mut screen = Screen::default();
    let (say, said) = mpsc::channel();
    loop {
        for facts in told.try_iter() {
            screen.see(facts);
        }
        if let Some(said) = said.try_iter().last() {
            screen.said = said;
        }
        terminal.draw(|frame| screen.draw(frame))?;
        if !event::poll(KEY_POLL_INTERVAL)? {
            continue;
        }
        let Event::Key(key) = event::read()? else { continue };
        if key.kind == KeyEventKind::Release {
            continue;
        }
        let interrupts = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
        match screen.key(if interrupts { KeyCode::Char('q') } else { key.code }) {
            Command::Nothing => {}
            Command::End => return Ok(()),
            Command::Act(act) => {
                let (facts, say, here) = (screen.history.last().clone(), say.clone(), here.clone());
                screen.said = "...".into();
                runtime.spawn(async move {
                    let done = act.carry_out(&facts, &here).await;
                    let _ = say.send(done.unwrap_or_else(|why| format!("not done: {why}")));
                });
            }
        }
    }
}

/// A key's command.
#[derive(Debug, PartialEq, Eq)]
enum Command {
    Nothing,
    Act(Act),
    End,
}

/// A question that the next key answers.
#[derive(Debug, Default, PartialEq, Eq)]
enum Question {
    #[default]
    None,
    /// The new mode.
    Mode,
    /// The server to drain.
    Drain,
    /// The server for a fault.
    Fault,
    /// The fault of this server.
    Which(u32),
    /// The confirmation of an action, with its consequence.
    Sure(Act, String),
}

/// Modes by their keys, in the order of the question.
const MODES: [(char, &str); 6] =
    [('b', "bsp"), ('1', "ssp:1"), ('4', "ssp:4"), ('6', "ssp:16"), ('a', "asp"), ('r', "auto")];

/// Faults by their keys, in the order of the question.
const FAULTS: [(char, Fault); 6] = [
    ('p', Fault::Partition),
    ('l', Fault::SlowLink),
    ('d', Fault::SlowDisk),
    ('f', Fault::DiskFull),
    ('e', Fault::Eio),
    ('r', Fault::Readonly),
];

/// The state of the screen.
#[derive(Default)]
struct Screen {
    history: History,
    /// No server answered the last poll.
    silent: bool,
    /// The number of the displayed job; the latest if there is none.
    job: Option<u32>,
    question: Question,
    /// The result of the last action.
    said: String,
}

impl Screen {
    fn see(&mut self, facts: Option<Facts>) {
        // A single miss may mean that all servers are busy.
        let was_silent = std::mem::replace(&mut self.silent, facts.is_none());
        match facts {
            Some(facts) => _ = self.history.see(facts),
            None if was_silent => _ = self.history.see(self.history.last().clone().without_replies()),
            None => {}
        }
    }

    fn job(&self) -> Option<&Job> {
        let jobs = &self.history.last().jobs;
        self.job.and_then(|id| jobs.iter().find(|j| j.id == id)).or(jobs.last())
    }

    fn key(&mut self, key: KeyCode) -> Command {
        let facts = self.history.last();
        match (std::mem::take(&mut self.question), key) {
            (Question::Sure(act, _), KeyCode::Char('y')) => return Command::Act(act),
            (Question::Mode, KeyCode::Char(c)) => {
                let mode = MODES.iter().find(|(key, _)| *key == c).map(|(_, mode)| mode.to_string());
                if let Some((mode, job)) = mode.zip(self.job().map(|j| j.name.clone())) {
                    let what = format!(
                        "Switch {job} to {mode}? Shards switch one after the other, no push is lost."
                    );
                    self.question = Question::Sure(Act::Mode { job, mode }, what);
                }
            }
            (Question::Drain, KeyCode::Char(c)) => {
                let server = c.to_digit(10).map(u64::from);
                match facts.servers.iter().find(|s| Some(s.id) == server) {
                    None => self.said = format!("there is no s{c}"),
                    Some(s) => {
                        let undo = s.state == "draining";
                        let what = match undo {
                            true => format!("Fill s{} again? It takes replicas and leaders again.", s.id),
                            false => format!(
                                "Empty s{}? What it leads ({}) and holds ({}) moves to other servers; training continues.",
                                s.id, s.leads, s.holds
                            ),
                        };
                        self.question = Question::Sure(Act::Drain { server: s.id, undo }, what);
                    }
                }
            }
            (Question::Fault, KeyCode::Char(c)) => {
                let server = c.to_digit(10).filter(|n| facts.servers.iter().any(|s| s.id == u64::from(*n)));
                match server {
                    Some(server) => self.question = Question::Which(server),
                    None => self.said = format!("there is no s{c}"),
                }
            }
            (Question::Which(server), KeyCode::Char(c)) => {
                if let Some((_, fault)) = FAULTS.iter().find(|(key, _)| *key == c) {
                    let (fault, on) = (*fault, facts.faults.as_ref());
                    let undo = on.is_some_and(|on| on.contains(&(server, fault)));
                    let what = match undo {
                        true => format!("Take {} back from s{server}?", fault.name()),
                        false => format!("Put {} on s{server}, until you take it back?", fault.name()),
                    };
                    self.question = Question::Sure(Act::Fault { server, fault, undo }, what);
                }
            }
            // Any other key cancels.
            (
                Question::Sure(..) | Question::Mode | Question::Drain | Question::Fault | Question::Which(_),
                _,
            ) => {}
            (Question::None, KeyCode::Char('q')) => return Command::End,
            (Question::None, KeyCode::Char('m' | 'c' | 's' | 'x' | '+' | '-')) if self.job().is_none() => {
                self.said = "no job has begun".into();
            }
            (Question::None, KeyCode::Char('m')) => self.question = Question::Mode,
            (Question::None, KeyCode::Char('d')) => self.question = Question::Drain,
            (Question::None, KeyCode::Char('s')) => {
                if let Some(job) = self.job().map(|j| j.name.clone()) {
                    let what =
                        format!("Stop {job}? Its workers finish where they are; its weights are kept.");
                    self.question = Question::Sure(Act::Stop { job }, what);
                }
            }
            (Question::None, KeyCode::Char('c')) => {
                if let Some(job) = self.job().map(|j| j.name.clone()) {
                    let what = format!("Save a checkpoint of {job}? A worker writes it after its next step.");
                    self.question = Question::Sure(Act::Save { job }, what);
                }
            }
            (Question::None, KeyCode::Char('x')) => {
                if let Some(job) = self.job().filter(|j| has_ended(j)).map(|j| j.name.clone()) {
                    let what = format!("Delete {job}? The servers forget its weights and optimizer state.");
                    self.question = Question::Sure(Act::Delete { job }, what);
                }
            }
            (Question::None, KeyCode::Char(c @ ('+' | '-'))) => {
                if let Some((job, most)) = self.job().and_then(|j| Some((j, j.most?))) {
                    let now = job.members.iter().filter(|m| !m.finished).count() as u32;
                    let workers = if c == '+' { now + 1 } else { now.saturating_sub(1) };
                    if (1..=most).contains(&workers) {
                        let what = match workers {
                            1 => format!("Let {} have 1 worker, not {now}?", job.name),
                            n => format!("Let {} have {n} workers, not {now}?", job.name),
                        };
                        self.question = Question::Sure(Act::Workers { job: job.id, workers }, what);
                    }
                }
            }
            (Question::None, KeyCode::Char('f')) if facts.faults.is_some() => self.question = Question::Fault,
            (Question::None, KeyCode::Up | KeyCode::Char('k')) => self.go(1),
            (Question::None, KeyCode::Down | KeyCode::Char('j')) => self.go(-1),
            (Question::None, _) => {}
        }
        Command::Nothing
    }

    /// The latest job is listed first.
    fn go(&mut self, up: isize) {
        let jobs = &self.history.last().jobs;
        let now = self.job().and_then(|job| jobs.iter().position(|j| j.id == job.id));
        let next = now.and_then(|now| now.checked_add_signed(up)).and_then(|i| jobs.get(i)).map(|j| j.id);
        self.job = next.or(self.job);
    }
}

fn has_ended(j: &Job) -> bool {
    !["running", "waiting"].contains(&j.state.as_str())
}

#[cfg(test)]
#[path = "top_tests.rs"]
mod tests;

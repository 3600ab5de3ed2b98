//! `paraft top`: the data of the live page in a terminal, with its actions on keys.

use crate::dashboard::here;
use clap::Args;
use paraft_dashboard::{
    LocalControl,
    act::Act,
    facts::{self, Facts, Job},
    history::History,
};
use paraft_fleet::{ask, failure::Failure, faults::Fault, table, targets};
use paraft_worker::exit;
use ratatui::{
    Frame,
    crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers},
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Cell, Paragraph, Row, Sparkline, Table, Wrap},
};
use std::{
    io::IsTerminal,
    path::PathBuf,
    sync::mpsc::{self, Receiver},
    time::Duration,
};

#[derive(Args)]
pub struct TopArgs {
    /// A run's folder, a job file with cluster.addresses, or any server as host:port.
    pub of: Option<PathBuf>,
    /// Servers as host:port, comma-separated; one that answers is enough.
    #[arg(long, env = "PARAFT_SERVERS", value_delimiter = ',')]
    pub servers: Vec<String>,
}

/// The poll interval.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The poll interval of the keyboard.
const KEY_POLL_INTERVAL: Duration = Duration::from_millis(50);

pub fn run(args: &TopArgs) -> Result<i32, Failure> {
    let servers = targets::addresses(args.of.as_deref(), &args.servers)?;
    if !std::io::stdout().is_terminal() {
        return Err(Failure::new(exit::USAGE, "this is for a terminal").help("`paraft status` prints"));
    }
    // Fails with a clear error if no server answers.
    ask::jobs(&servers)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.map_err(|e| Failure::new(exit::IO, format!("no runtime: {e}")))?;
    let (tell, told) = mpsc::channel();
    // Servers given by address may belong to another run.
    let here = here(args.of.as_deref().filter(|_| args.servers.is_empty()));
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

/// Lines of the question and of the keys.
const FOOT: u16 = 3;

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
                                "Empty s{}? What it leads ({}) and holds ({}) moves to other servers; training goes on.",
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

    fn draw(&self, frame: &mut Frame) {
        let facts = self.history.last();
        // A title and a header above the rows. With little space, charts and events shrink.
        let rows = |n: usize| n as u16 + 2;
        let (jobs, servers) = (rows(facts.jobs.len().clamp(1, 6)), rows(facts.servers.len().clamp(1, 8)));
        let rest = frame.area().height.saturating_sub(1 + jobs + servers + FOOT);
        let happened = (rest / 3).clamp(2, 8);
        let [head, jobs, middle, servers, happened, foot] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(jobs),
            Constraint::Length(rest.saturating_sub(happened)),
            Constraint::Length(servers),
            Constraint::Length(happened.min(rest)),
            Constraint::Length(FOOT),
        ])
        .areas(frame.area());
        frame.render_widget(self.head(), head);
        frame.render_widget(self.jobs(), jobs);
        let [curves, workers] =
            Layout::horizontal([Constraint::Percentage(50), Constraint::Percentage(50)]).areas(middle);
        self.curves(frame, curves);
        frame.render_widget(self.workers(workers), workers);
        frame.render_widget(self.servers(), servers);
        frame.render_widget(self.happened(happened), happened);
        frame.render_widget(self.foot(), foot);
    }

    fn head(&self) -> Line<'_> {
        let facts = self.history.last();
        let leads = match facts.leader {
            Some(s) => Span::raw(format!("s{s} leads the control group")),
            None => Span::styled("the control group has no leader that can agree", bad()),
        };
        let silent = self.silent.then(|| Span::styled("  nobody answers", bad()));
        let servers = format!("Paraft  {} servers  ", facts.servers.len());
        Line::from_iter([Span::styled(servers, bold()), leads].into_iter().chain(silent))
    }

    fn jobs(&self) -> Table<'_> {
        let shown = self.job().map(|j| j.id);
        let row = |j: &Job| {
            let point = self.history.curves.get(&j.id).and_then(|c| c.points.back());
            let accuracy = j.evaluated.as_ref().filter(|e| e.accuracy > 0.0);
            let row = Row::new([
                Cell::from(j.name.clone()),
                state(match j.stopping {
                    _ if is_lost(j) => "no leader",
                    true => "stopping",
                    false => &j.state,
                }),
                j.mode.clone().into(),
                format!("{} of {}", j.members.iter().filter(|m| !m.finished).count(), j.workers).into(),
                steps(j).to_string().into(),
                number(point.filter(|_| !is_lost(j)).and_then(|p| p.samples)).into(),
                number(point.and_then(|p| p.loss)).into(),
                accuracy.map_or("-".into(), |e| format!("{:.2} %", 100.0 * e.accuracy)).into(),
                table::bytes(j.bytes).into(),
            ]);
            row.style(if shown == Some(j.id) {
                Style::new().add_modifier(Modifier::REVERSED)
            } else {
                Style::new()
            })
        };
        let widths = [9, 9, 6, 7, 7, 9, 7, 8, 9].map(Constraint::Min);
        let head = ["job", "state", "mode", "workers", "steps", "samples/s", "loss", "accuracy", "bytes"];
        Table::new(self.history.last().jobs.iter().rev().take(6).map(row), widths)
            .header(Row::new(head).style(soft()))
            .block(block("Jobs"))
    }

    fn curves(&self, frame: &mut Frame, area: Rect) {
        let Some(curves) = self.job().and_then(|j| self.history.curves.get(&j.id)) else {
            return frame.render_widget(Paragraph::new("no job trains").block(block("Job")), area);
        };
        let [above, below] =
            Layout::vertical([Constraint::Percentage(50), Constraint::Percentage(50)]).areas(area);
        let wide = usize::from(area.width.saturating_sub(2)).max(1);
        let last = |of: fn(&paraft_dashboard::history::Point) -> Option<f64>| -> Vec<f64> {
            let all: Vec<f64> = curves.points.iter().filter_map(of).collect();
            all[all.len().saturating_sub(wide)..].to_vec()
        };
        for (area, title, values) in
            [(above, "samples/s", last(|p| p.samples)), (below, "training loss", last(|p| p.loss))]
        {
            // Bars need whole numbers.
            let most = values.iter().copied().fold(0.0, f64::max).max(f64::MIN_POSITIVE);
            let bars: Vec<u64> = values.iter().map(|v| (v / most * 1000.0) as u64).collect();
            let title = format!("{title} {}, at most {}", number(values.last().copied()), number(Some(most)));
            frame.render_widget(
                Sparkline::default().block(block(title)).data(bars).style(Style::new().fg(Color::Cyan)),
                area,
            );
        }
    }

    fn workers(&self, area: Rect) -> Table<'_> {
        let rows = usize::from(area.height.saturating_sub(3));
        let job = self.job();
        let front = job.map_or(0, steps);
        let mut members: Vec<_> = job.map(|j| j.members.iter().collect()).unwrap_or_default();
        // With little space, show the slowest workers.
        if members.len() > rows {
            members.sort_by_key(|m| m.clock);
        }
        let waits = |worker: u32| -> f64 {
            job.into_iter()
                .flat_map(|j| &j.waits)
                .filter(|w| w.worker == worker)
                .fold(0.0, |all, w| all + w.seconds)
        };
        let row = |m: &&facts::Member| {
            let state_of = if m.finished {
                "finished"
            } else if m.idle {
                "idle"
            } else {
                "running"
            };
            Row::new([
                Cell::from(format!("w{}", m.worker)),
                m.clock.to_string().into(),
                (front - m.clock).to_string().into(),
                state(state_of),
                m.lease_ms.map_or("-".into(), |ms| format!("{:.1} s", ms as f64 / 1e3)).into(),
                format!("{} s", number(Some(waits(m.worker)))).into(),
            ])
        };
        let widths = [6, 5, 6, 8, 5, 6].map(Constraint::Min);
        Table::new(members.iter().take(rows).map(row), widths)
            .header(Row::new(["worker", "step", "behind", "state", "lease", "waited"]).style(soft()))
            .block(block("Workers"))
    }

    fn servers(&self) -> Table<'_> {
        let facts = self.history.last();
        let row = |s: &facts::Server| {
            let holds = |shard: &facts::Shard| {
                let what = match () {
                    () if shard.leader == Some(s.id) => 'L',
                    () if shard.silent.contains(&s.id) => 'x',
                    () if shard.voters.contains(&s.id) => 'v',
                    () if shard.learners.contains(&s.id) => 'l',
                    () => '.',
                };
                let style = match what {
                    'L' => Style::new().fg(Color::Cyan).add_modifier(Modifier::BOLD),
                    'x' => bad(),
                    _ => soft(),
                };
                Span::styled(what.to_string(), style)
            };
            Row::new([
                Cell::from(format!("s{}", s.id)),
                s.address.clone().into(),
                state(&s.state),
                s.peak_rss_bytes.map_or("-".into(), table::bytes).into(),
                Line::from_iter(facts.shards.iter().map(holds)).into(),
                s.trouble.clone().into(),
            ])
        };
        let widths = [
            Constraint::Length(5),
            Constraint::Min(16),
            Constraint::Length(12),
            Constraint::Length(10),
            Constraint::Min(facts.shards.len().clamp(6, 80) as u16),
            Constraint::Min(10),
        ];
        let head = ["server", "address", "state", "memory", "shards", ""];
        Table::new(facts.servers.iter().map(row), widths)
            .header(Row::new(head).style(soft()))
            .block(block("Servers  (of each shard: L leads, v votes, l learns, x is silent)"))
    }

    fn happened(&self, area: Rect) -> Paragraph<'_> {
        let rows = usize::from(area.height.saturating_sub(1));
        // Evaluations are listed with the jobs; here they would displace rarer events.
        let rare = self.history.events.iter().rev().filter(|e| e.kind != "evaluation");
        let lines = rare.take(rows).map(|e| {
            let ago = self.history.last().at.saturating_sub(e.at) / 1000;
            Line::from_iter([
                Span::styled(format!("{ago:>5} s ago  {:<11}", e.kind), soft()),
                Span::raw(e.what.clone()),
            ])
        });
        Paragraph::new(lines.collect::<Vec<_>>()).block(block("What has happened"))
    }

    fn foot(&self) -> Paragraph<'_> {
        let asks = match &self.question {
            Question::None => self.said.clone(),
            Question::Mode => {
                let modes: Vec<String> = MODES.iter().map(|(key, mode)| format!("{key} {mode}")).collect();
                format!("To which mode?  {}", modes.join("  "))
            }
            Question::Drain => "Which server is to be emptied, or filled again? Its number".into(),
            Question::Fault => "Which server gets a fault, or is rid of it? Its number".into(),
            Question::Which(server) => {
                let all = FAULTS.iter().map(|(key, fault)| format!("{key} {}", fault.name()));
                format!("Which fault of s{server}?  {}", all.collect::<Vec<_>>().join("  "))
            }
            Question::Sure(_, what) => format!("{what}  y: yes, any other key: no"),
        };
        let facts = self.history.last();
        let workers = self.job().is_some_and(|j| j.most.is_some()).then_some("  +/- workers");
        let delete = self.job().is_some_and(has_ended).then_some("  x delete");
        let faults = facts.faults.is_some().then_some("  f fault");
        let keys = ["q end  up/down job  m mode  c checkpoint  s stop  d drain"];
        let keys: String = keys.into_iter().chain(workers).chain(delete).chain(faults).collect();
        let keys = Line::styled(keys, soft());
        Paragraph::new(vec![keys, Line::styled(asks, bold())]).wrap(Wrap { trim: true })
    }
}

/// Its first shard has no leader, so its data is stale.
fn is_lost(j: &Job) -> bool {
    j.stale && !has_ended(j)
}

fn has_ended(j: &Job) -> bool {
    !["running", "waiting"].contains(&j.state.as_str())
}

fn steps(j: &Job) -> u64 {
    j.members.iter().map(|m| m.clock).max().unwrap_or_default()
}

fn block<'a>(title: impl Into<Line<'a>>) -> Block<'a> {
    Block::new().borders(ratatui::widgets::Borders::TOP).border_style(soft()).title(title)
}

fn bold() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

fn soft() -> Style {
    Style::new().add_modifier(Modifier::DIM)
}

fn bad() -> Style {
    Style::new().fg(Color::Red).add_modifier(Modifier::BOLD)
}

/// The word, not only the colour, shows whether the state is good.
fn state(state: &str) -> Cell<'static> {
    let style = match state {
        "up" | "serving" | "running" | "finished" => Style::new().fg(Color::Green),
        "silent" | "unreachable" | "lost" | "no leader" => bad(),
        _ => Style::new(),
    };
    Cell::from(state.to_string()).style(style)
}

fn number(v: Option<f64>) -> String {
    match v {
        None => "-".into(),
        Some(v) if v.abs() >= 1e6 => format!("{:.2}M", v / 1e6),
        Some(v) if v.abs() >= 1e4 => format!("{:.1}k", v / 1e3),
        Some(v) if v.abs() >= 100.0 => format!("{v:.0}"),
        Some(v) => format!("{v:.4}"),
    }
}

#[cfg(test)]
mod tests {
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
        assert!(seen(&screen, (110, 40)).contains("nobody answers"));
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
        assert_eq!(
            press(&mut screen, "+y-y"),
            [Command::Act(Act::Workers { job: 2, workers: 1 })],
            "2 at most"
        );
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
}

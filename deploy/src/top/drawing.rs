//! The drawing of [`Screen`].

use super::{FAULTS, MODES, Question, Screen, has_ended};
use paraft_dashboard::{
    facts::{self, Job},
    history::Point,
};
use paraft_fleet::table;
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Borders, Cell, Paragraph, Row, Sparkline, Table, Wrap},
};

/// Lines of the question and of the keys.
const FOOT: u16 = 3;

impl Screen {
    /// Draws the whole screen.
    pub fn draw(&self, frame: &mut Frame) {
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
        let silent = self.silent.then(|| Span::styled("  no server answers", bad()));
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
                j.steps().to_string().into(),
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
        let last = |of: fn(&Point) -> Option<f64>| -> Vec<f64> {
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
        let front = job.map_or(0, Job::steps);
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

fn block<'a>(title: impl Into<Line<'a>>) -> Block<'a> {
    Block::new().borders(Borders::TOP).border_style(soft()).title(title)
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

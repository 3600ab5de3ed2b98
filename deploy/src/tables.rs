//! `paraft table`: the sparse tables of a running job: what they hold, their rows, exports for programs that serve them.

use crate::status;
use clap::{Args, Subcommand};
use paraft_checkpoint::export::{EXPORT_FILE, Export, ExportManifest, ExportWriter};
use paraft_common::{
    TableSpec,
    table::{MAX_PULLED_IDS, MAX_PUSH_BYTES, ROW_HEAD_WORDS},
};
use paraft_fleet::{
    ask,
    failure::Failure,
    out,
    rows::{TableAt, Takes},
    table,
    targets::FleetArg,
};
use paraft_worker::exit;
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::{Path, PathBuf},
};

/// Rows of an import that are read at a time.
const IMPORT_ROWS: u64 = 1 << 14;

/// What to do where a server or this program cannot say what has changed.
const ALL: &str = "export all rows: leave --since out";

#[derive(Args)]
pub struct TableArgs {
    #[command(subcommand)]
    command: Command,
}

/// A table of a job.
#[derive(Args)]
struct Named {
    /// The job's name, as `paraft status` shows it.
    job: String,
    /// The table's name.
    table: String,
    #[command(flatten)]
    fleet: FleetArg,
}

#[derive(Subcommand)]
enum Command {
    /// List a job's tables: rows, counts, memory.
    Ls {
        /// The job's name, as `paraft status` shows it.
        job: String,
        #[command(flatten)]
        fleet: FleetArg,
    },
    /// Show rows by their ids: values and, of those that training has made, updates and optimizer state.
    Get {
        #[command(flatten)]
        named: Named,
        /// The ids.
        #[arg(required = true, num_args = 1..)]
        ids: Vec<u64>,
        /// JSON, one object a row.
        #[arg(long)]
        json: bool,
    },
    /// Show the rows with the most updates, and their share of all updates.
    Top {
        #[command(flatten)]
        named: Named,
        /// How many.
        #[arg(short, long, default_value_t = 10)]
        n: usize,
        /// JSON, one object a row.
        #[arg(long)]
        json: bool,
    },
    /// Remove rows: their ids start again from their initial values.
    Evict {
        #[command(flatten)]
        named: Named,
        /// The ids.
        #[arg(required = true, num_args = 1..)]
        ids: Vec<u64>,
    },
    /// Write all rows to a folder, or what has changed since an earlier export, with the ids of removed rows. Training
    /// continues; each partition is of one moment.
    Export {
        #[command(flatten)]
        named: Named,
        /// The folder to make.
        #[arg(long, value_name = "FOLDER")]
        to: PathBuf,
        /// An earlier export: write only what has changed since.
        #[arg(long, value_name = "FOLDER")]
        since: Option<PathBuf>,
    },
    /// Write an export's rows, with their optimizer state, into a running job's table, and remove the rows that it says are
    /// removed. Rows with other ids stay.
    Import {
        #[command(flatten)]
        named: Named,
        /// The export.
        #[arg(long, value_name = "FOLDER")]
        from: PathBuf,
    },
}

/// Runs the command; returns the exit code.
///
/// # Errors
///
/// The fleet does not answer, or has no such job or table; or a folder cannot be read or written.
pub fn run(args: &TableArgs) -> Result<i32, Failure> {
    match &args.command {
        Command::Ls { job, fleet } => list(job, fleet),
        Command::Get { named, ids, json } => get(named, ids, *json),
        Command::Top { named, n, json } => top(named, *n, *json),
        Command::Evict { named, ids } => evict(named, ids),
        Command::Export { named, to, since } => export(named, to, since.as_deref()),
        Command::Import { named, from } => import(named, from),
    }
}

fn list(job: &str, fleet: &FleetArg) -> Result<i32, Failure> {
    let servers = fleet.to_ask()?.servers()?;
    let at = TableAt { servers: &servers, job, table: "" };
    at.shards()?; // the job is there
    let replies = ask::ask_all(&servers, false);
    let led = ask::led(replies.iter().flatten());
    let of: Vec<_> = led.into_values().filter(|s| s.job_name == job).collect();
    match status::tables(&of) {
        Some(tables) => out!("{tables}"),
        None => out!("job `{job}` has no tables"),
    }
    Ok(exit::OK)
}

/// A row as people see it.
struct Row {
    id: u64,
    updates: u32,
    touched: u32,
    weights: Vec<f32>,
    state: Vec<f32>,
}

impl Row {
    fn of(table: &TableSpec, bytes: &[u8]) -> Self {
        let words: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect();
        let bits = |at: usize| words[at].to_bits();
        let (head, behind) = (ROW_HEAD_WORDS, ROW_HEAD_WORDS + table.dtype.words(table.dim));
        let mut weights = vec![0.0; table.dim];
        table.dtype.get(&words[head..behind], &mut weights);
        Self {
            id: u64::from(bits(0)) | u64::from(bits(1)) << 32,
            updates: bits(2),
            touched: bits(3),
            weights,
            state: words[behind..].to_vec(),
        }
    }

    fn as_json(&self) -> Value {
        let Self { id, updates, touched, weights, state } = self;
        json!({"id": id, "updates": updates, "touched": touched, "weights": weights, "state": state})
    }

    fn values(&self) -> String {
        const SHOWN: usize = 8;
        let shown: Vec<_> = self.weights.iter().take(SHOWN).map(|v| format!("{v:.4}")).collect();
        let more = self.weights.len().saturating_sub(SHOWN);
        shown.join(" ") + &if more == 0 { String::new() } else { format!(" ... {more} more") }
    }
}

/// The rows of a shard, in memory.
#[derive(Default)]
struct Found(Vec<Row>);

impl Takes for Found {
    fn begin(&mut self) -> Result<(), Failure> {
        self.0.clear();
        Ok(())
    }

    fn rows(&mut self, table: &TableSpec, rows: &[u8]) -> Result<(), Failure> {
        self.0.extend(rows.chunks_exact(table.row_bytes() as usize).map(|row| Row::of(table, row)));
        Ok(())
    }

    fn removed(&mut self, _: &[u64]) -> Result<(), Failure> {
        Ok(())
    }
}

impl Named {
    fn at<'a>(&'a self, servers: &'a [String]) -> TableAt<'a> {
        TableAt { servers, job: &self.job, table: &self.table }
    }
}

fn get(named: &Named, ids: &[u64], as_json: bool) -> Result<i32, Failure> {
    let servers = named.fleet.to_ask()?.servers()?;
    let at = named.at(&servers);
    let (mut found, mut spec) = (BTreeMap::new(), None);
    for shard in at.shards()? {
        for ids in ids.chunks(MAX_PULLED_IDS) {
            let mut rows = Found::default();
            spec = Some(at.read(shard, ids, &HashMap::new(), &mut rows)?.table);
            found.extend(rows.0.into_iter().map(|row| (row.id, row)));
        }
    }
    let Some(spec) = spec else { return Err(nothing(named)) };
    let mut shown = table::plain(vec!["id", "updates", "values"]);
    for id in ids {
        let row = found.remove(id).unwrap_or_else(|| {
            let mut weights = vec![0.0; spec.dim];
            spec.initial(*id, &mut weights);
            Row { id: *id, updates: 0, touched: 0, weights, state: Vec::new() }
        });
        if as_json {
            out!("{}", row.as_json());
        } else {
            let updates =
                if row.updates == 0 { "0 (initial values)".into() } else { row.updates.to_string() };
            shown.add_row(vec![id.to_string(), updates, row.values()]);
        }
    }
    if !as_json {
        out!("{shown}");
    }
    Ok(exit::OK)
}

fn nothing(named: &Named) -> Failure {
    Failure::new(exit::UNAVAILABLE, format!("no shard of job `{}` has begun", named.job))
        .help("ask again when it trains")
}

/// The rows with the most updates of what is read.
struct Hottest {
    n: usize,
    rows: Vec<Row>,
    count: u64,
    updates: u64,
}

impl Hottest {
    fn cut(&mut self) {
        self.rows.sort_by_key(|row| (std::cmp::Reverse(row.updates), row.id));
        self.rows.truncate(self.n);
    }
}

impl Takes for Hottest {
    fn begin(&mut self) -> Result<(), Failure> {
        *self = Self { n: self.n, rows: Vec::new(), count: 0, updates: 0 };
        Ok(())
    }

    fn rows(&mut self, table: &TableSpec, rows: &[u8]) -> Result<(), Failure> {
        for row in rows.chunks_exact(table.row_bytes() as usize) {
            let row = Row::of(table, row);
            self.count += 1;
            self.updates += u64::from(row.updates);
            self.rows.push(row);
        }
        self.cut();
        Ok(())
    }

    fn removed(&mut self, _: &[u64]) -> Result<(), Failure> {
        Ok(())
    }
}

fn top(named: &Named, n: usize, as_json: bool) -> Result<i32, Failure> {
    let servers = named.fleet.to_ask()?.servers()?;
    let at = named.at(&servers);
    let mut all = Hottest { n, rows: Vec::new(), count: 0, updates: 0 };
    for shard in at.shards()? {
        let mut of = Hottest { n, rows: Vec::new(), count: 0, updates: 0 };
        at.read(shard, &[], &HashMap::new(), &mut of)?;
        (all.count, all.updates) = (all.count + of.count, all.updates + of.updates);
        all.rows.extend(of.rows);
        all.cut();
    }
    let share = |updates: u64| 100.0 * updates as f64 / all.updates.max(1) as f64;
    let mut shown = table::plain(vec!["id", "updates", "share", "values"]);
    for row in &all.rows {
        if as_json {
            out!("{}", row.as_json());
        } else {
            let share = format!("{:.2}%", share(u64::from(row.updates)));
            shown.add_row(vec![row.id.to_string(), row.updates.to_string(), share, row.values()]);
        }
    }
    if !as_json {
        let these = share(all.rows.iter().map(|row| u64::from(row.updates)).sum());
        out!("{shown}");
        out!("{} of {} rows have {these:.1}% of {} updates", all.rows.len(), all.count, all.updates);
    }
    Ok(exit::OK)
}

/// Which shard has each partition.
fn places(at: &TableAt<'_>) -> Result<(TableSpec, BTreeMap<u32, u32>), Failure> {
    let (mut places, mut spec) = (BTreeMap::new(), None);
    for shard in at.shards()? {
        // One id: its partition is all that is read.
        let read = at.read(shard, &[0], &HashMap::new(), &mut ())?;
        places.extend(read.partitions.iter().map(|partition| (*partition, shard)));
        spec = Some(read.table);
    }
    let complete = |spec: &TableSpec| places.len() == spec.partitions as usize;
    spec.filter(complete).map(|spec| (spec, places)).ok_or_else(|| {
        Failure::new(exit::UNAVAILABLE, format!("not all shards of job `{}` have begun", at.job))
            .help("ask again when it trains")
    })
}

/// Edits rows, each given with its id, partition by partition; returns how many were changed.
fn edit<'a>(
    at: &TableAt<'_>,
    (spec, places): &(TableSpec, BTreeMap<u32, u32>),
    put: bool,
    rows: impl Iterator<Item = (u64, &'a [u8])>,
) -> Result<u64, Failure> {
    let mut of: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
    let mut changed = 0;
    let send = |partition: u32, bytes: Vec<u8>| {
        at.edit(places.get(&partition).copied().unwrap_or_default(), partition, put, bytes)
    };
    for (id, row) in rows {
        let partition = spec.partition_of(id);
        let bytes = of.entry(partition).or_default();
        if bytes.len() + row.len() > MAX_PUSH_BYTES {
            changed += send(partition, std::mem::take(bytes))?;
        }
        bytes.extend_from_slice(row);
    }
    for (partition, bytes) in of {
        changed += if bytes.is_empty() { 0 } else { send(partition, bytes)? };
    }
    Ok(changed)
}

fn evict(named: &Named, ids: &[u64]) -> Result<i32, Failure> {
    let servers = named.fleet.to_change()?.servers()?;
    let at = named.at(&servers);
    let bytes: Vec<(u64, [u8; 8])> = ids.iter().map(|id| (*id, id.to_le_bytes())).collect();
    let rows = edit(&at, &places(&at)?, false, bytes.iter().map(|(id, bytes)| (*id, &bytes[..])))?;
    out!("{rows} of {} ids had a row, which is removed", ids.len());
    Ok(exit::OK)
}

/// The file of an export, while shards are read.
struct Exports(ExportWriter);

impl Takes for Exports {
    fn begin(&mut self) -> Result<(), Failure> {
        self.0.restart();
        Ok(())
    }

    fn rows(&mut self, _: &TableSpec, rows: &[u8]) -> Result<(), Failure> {
        Ok(self.0.rows(rows)?)
    }

    fn removed(&mut self, ids: &[u64]) -> Result<(), Failure> {
        self.0.removed(ids);
        Ok(())
    }
}

fn export(named: &Named, to: &Path, since: Option<&Path>) -> Result<i32, Failure> {
    let servers = named.fleet.to_ask()?.servers()?;
    let at = named.at(&servers);
    since.map(is_export).transpose()?;
    let before = since.map(Export::manifest).transpose()?;
    let from = |why: &str| {
        let folder = since.unwrap_or(to).join(EXPORT_FILE);
        Failure::new(exit::CONFIG, format!("{}: {why}", folder.display())).help(ALL)
    };
    let shards = at.shards()?;
    let mut into = Exports(ExportWriter::create(to)?);
    let (mut table, mut foundings, mut versions) = (None, BTreeMap::new(), BTreeMap::new());
    for shard in shards {
        let old = before.as_ref().map(|b| b.versions.clone()).unwrap_or_default();
        let read = at.read(shard, &[], &old.into_iter().collect(), &mut into);
        // The server may have forgotten which rows were removed since.
        let read =
            read.map_err(|e| if before.is_some() && e.code() == exit::CONFIG { e.help(ALL) } else { e })?;
        if let Some(before) = &before {
            let same = before.foundings.get(&shard) == Some(&read.founding);
            if before.job != named.job || before.table != read.table || !same {
                return Err(from(
                    "it is of another job or table, or of this job before it was founded again",
                ));
            }
        }
        into.0.keep();
        foundings.insert(shard, read.founding);
        versions.extend(read.versions);
        table = Some(read.table);
    }
    let Some(table) = table else { return Err(nothing(named)) };
    let manifest = ExportManifest {
        format: 0,
        job: named.job.clone(),
        table,
        foundings,
        versions,
        since: before.map(|b| b.versions),
        rows: 0,
        removed: 0,
        files: BTreeMap::new(),
    };
    let done = into.0.finish(manifest)?;
    let what = if done.since.is_some() { "changed rows" } else { "rows" };
    out!("{}: {} {what}, {} removed", to.display(), done.rows, done.removed);
    Ok(exit::OK)
}

fn is_export(folder: &Path) -> Result<(), Failure> {
    if fs::metadata(folder.join(EXPORT_FILE)).is_ok_and(|m| m.is_file()) {
        return Ok(());
    }
    let what = if folder.exists() { "is no export of a table" } else { "there is no such folder" };
    let why = format!("{}: {what}", folder.display());
    Err(Failure::new(exit::DATA, why).help("paraft table export makes one"))
}

fn import(named: &Named, from: &Path) -> Result<i32, Failure> {
    is_export(from)?;
    let export = Export::open(from)?;
    let servers = named.fleet.to_change()?.servers()?;
    let at = named.at(&servers);
    let there = places(&at)?;
    let of = &export.manifest.table;
    if of.kind_of_rows() != there.0.kind_of_rows() {
        let (here, there) = (of.kind_of_rows(), there.0.kind_of_rows());
        let why = format!("{}: has rows of {here}, and the table rows of {there}", from.display());
        return Err(Failure::new(exit::CONFIG, why));
    }
    let gone: Vec<(u64, [u8; 8])> = export.removed.iter().map(|id| (*id, id.to_le_bytes())).collect();
    let removed = edit(&at, &there, false, gone.iter().map(|(id, bytes)| (*id, &bytes[..])))?;
    let (mut written, row) = (0, of.row_bytes() as usize);
    for first in (0..export.rows.rows()).step_by(IMPORT_ROWS as usize) {
        let range = first..(first + IMPORT_ROWS).min(export.rows.rows());
        let (ids, bytes) = (export.rows.ids(range.clone())?, export.rows.read(range)?);
        written += edit(&at, &there, true, ids.into_iter().zip(bytes.chunks_exact(row)))?;
    }
    let rows = export.rows.rows();
    out!("{written} of {rows} rows written, {removed} removed");
    if written < rows {
        out!("{} had no room: the table is full and refuses new ids", rows - written);
    }
    Ok(exit::OK)
}

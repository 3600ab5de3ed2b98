//! `paraft init`: asks five questions and writes a job file.

use crate::short::toml;
use clap::Args;
use paraft_common::{Mode, config::check_name, kind::Kinds};
use paraft_fleet::{failure::Failure, out};
use paraft_worker::{Job, ModelConfig, SPARSE_KINDS, cli, exit};
use std::{
    fs::File,
    io::{self, BufRead, Write},
    path::{Path, PathBuf},
};

#[derive(Args)]
pub struct InitArgs {
    /// The job file to write.
    #[arg(default_value = "job.toml")]
    pub file: PathBuf,
}

/// The kinds of data, with the model that fits first.
const DATA: [(&str, &str); 4] =
    [("digits", "mlp"), ("csv", "mlp"), ("idx", "convnet"), ("text", "transformer")];

/// Asks on standard error, reads the answers from standard input, and writes the file; returns the exit code.
///
/// # Errors
///
/// The file exists or cannot be written; standard input ends early; or the answers make no job: its data cannot be read, say.
pub fn run(args: &InitArgs) -> Result<i32, Failure> {
    let file = &args.file;
    if file.exists() {
        return Err(Failure::new(exit::USAGE, format!("{} exists already", file.display()))
            .help("name another file: paraft init other.toml"));
    }
    let text = job_of(&mut io::stdin().lock(), file)?;
    let job = Job::parse(&text, file, &[])?;
    // Data that cannot be read, or that the model does not fit, is found here.
    cli::built_in(&job)?;
    let written = File::create_new(file).and_then(|mut f| f.write_all(text.as_bytes()));
    written.map_err(|e| Failure::write(file, e))?;
    out!("{} is written. Train it: paraft train {}", file.display(), file.display());
    Ok(exit::OK)
}

/// The text of the job file that the answers describe.
fn job_of(answers: &mut dyn BufRead, file: &Path) -> Result<String, Failure> {
    let stem = file.file_stem().and_then(|s| s.to_str()).filter(|s| check_name(s).is_ok());
    let kinds = DATA.map(|(kind, _)| kind);
    let data = ask(answers, &format!("Data: {}?", kinds.join(", ")), "digits", one_of(&kinds))?;
    let model = DATA.iter().find(|(kind, _)| *kind == data).map_or("mlp", |(_, model)| model);
    let path = if data == "digits" { None } else { Some(ask_path(answers, &data)?) };
    let task = if data == "csv" { ask_task(answers)? } else { "" };
    // Models of sparse tables take other data.
    let models: Vec<&str> =
        ModelConfig::KINDS.iter().copied().filter(|k| !SPARSE_KINDS.contains(k)).collect();
    let model = ask(answers, &format!("Model: {}?", models.join(", ")), model, one_of(&models))?;
    let workers = ask(answers, "Workers, each of them a process?", "2", number)?;
    let mode = "Mode: bsp (workers wait for each other at each step), ssp:4 (up to 4 steps apart), asp (they never wait)?";
    let mode = ask(answers, mode, "bsp", |mode| {
        mode.parse().map(|_: Mode| mode.to_string()).map_err(|e| format!("{e}"))
    })?;
    let epochs = ask(answers, "Epochs?", "10", number)?;
    let path = match path {
        Some(path) => format!("path = {}\n{task}", toml(path)?),
        None => String::new(),
    };
    let hidden = if matches!(&model[..], "mlp" | "autoencoder") { "hidden = [128, 64]\n" } else { "" };
    Ok(format!(
        "# Written by `paraft init`. All keys: docs/configuration.md\n\
         name = {}\n\n\
         [data]\nkind = {}\n{path}\n\
         [model]\nkind = {}\n{hidden}\n\
         [train]\nworkers = {workers}\nmode = {}\nbatch = 32\nepochs = {epochs}\n\n\
         [optimizer]\nkind = \"adam\"\nlr = 0.001\n",
        toml(stem.unwrap_or("job"))?,
        toml(data)?,
        toml(&model)?,
        toml(mode)?,
    ))
}

/// Asks until an answer is good. An empty line is the default.
fn ask<T>(
    answers: &mut dyn BufRead,
    question: &str,
    default: &str,
    read: impl Fn(&str) -> Result<T, String>,
) -> Result<T, Failure> {
    loop {
        match default {
            "" => eprint!("{question} "),
            default => eprint!("{question} [{default}] "),
        }
        let mut line = String::new();
        let n = answers
            .read_line(&mut line)
            .map_err(|e| Failure::new(exit::IO, format!("standard input: {e}")))?;
        if n == 0 {
            let why = "standard input ended before the last answer; nothing is written";
            return Err(
                Failure::new(exit::USAGE, why).help("answer each question; an empty line takes the default")
            );
        }
        let answer = if line.trim().is_empty() { default } else { line.trim() };
        match read(answer) {
            Ok(answer) => return Ok(answer),
            Err(why) => eprintln!("  {why}"),
        }
    }
}

/// The path of the data, as it stands in a job file. A relative one starts in the shell's folder, which need not be the file's.
fn ask_path(answers: &mut dyn BufRead, data: &str) -> Result<String, Failure> {
    let question = match data {
        "idx" => "The folder with MNIST's four files?",
        _ => "The file?",
    };
    ask(answers, question, "", |path| {
        let path = std::path::absolute(path).map_err(|_| "a path is needed".to_string())?;
        match (path.exists(), path.to_str()) {
            (false, _) => Err(format!("{} does not exist", path.display())),
            (true, None) => Err("the path is not UTF-8".into()),
            (true, Some(text)) => Ok(text.to_string()),
        }
    })
}

/// What the last column of a table is, as it stands in a job file.
fn ask_task(answers: &mut dyn BufRead) -> Result<&'static str, Failure> {
    let question = "The last column: a class, or a number to predict?";
    let word = ask(answers, question, "class", one_of(&["class", "number"]))?;
    Ok(if word == "number" { "task = \"regression\"\n" } else { "" })
}

fn one_of(words: &[&str]) -> impl Fn(&str) -> Result<String, String> {
    move |answer| match words.contains(&answer) {
        true => Ok(answer.to_string()),
        false => Err(format!("`{answer}` is none of {}", words.join(", "))),
    }
}

fn number(answer: &str) -> Result<u32, String> {
    answer.parse().ok().filter(|n| *n >= 1).ok_or_else(|| format!("`{answer}` is no number from 1"))
}

//! What `paraft --help` shows: the commands in groups, and an example for each.

use clap::{Command, builder::StyledStr};
use std::fmt::Write as _;

/// Columns of the help of all commands.
const WIDTH: usize = 100;
/// Where a command's description starts.
const INDENT: usize = 14;

/// Commands of one purpose.
pub struct Group {
    /// The heading.
    pub name: &'static str,
    /// Their names and examples. The first example is also the group's.
    pub commands: &'static [(&'static str, &'static str)],
}

/// Each command is in one group.
pub const GROUPS: [Group; 7] = [
    Group {
        name: "Train",
        commands: &[
            ("train", "paraft train job.toml --workers 4 --epochs 3"),
            ("launch", "paraft launch --workers 4 train.py --lr 0.1"),
            ("submit", "paraft submit job.toml --on slurm"),
            ("plan", "paraft plan job.toml --memory 24GiB"),
            ("demo", "paraft demo"),
            ("init", "paraft init job.toml"),
        ],
    },
    Group {
        name: "Compare",
        commands: &[
            ("compare", "paraft compare job.toml --modes bsp,asp"),
            ("sweep", "paraft sweep job.toml --space space.toml"),
            ("simulate", "paraft simulate job.toml --workers 64"),
        ],
    },
    Group {
        name: "Watch",
        commands: &[
            ("status", "paraft status --fleet runs/digits-1"),
            ("top", "paraft top --fleet runs/digits-1"),
            ("dashboard", "paraft dashboard --fleet runs/digits-1"),
            ("jobs", "paraft jobs --fleet localhost:7071"),
            ("logs", "paraft logs digits --fleet runs/digits-1 -f"),
            ("report", "paraft report runs/digits-1"),
            ("evaluate", "paraft evaluate runs/digits-1"),
        ],
    },
    Group {
        name: "Steer",
        commands: &[
            ("mode", "paraft mode digits asp --fleet runs/digits-1"),
            ("checkpoint", "paraft checkpoint save digits --fleet runs/digits-1"),
            ("table", "paraft table export clicks items --to items-1 --fleet runs/clicks-1"),
            ("pull", "paraft pull digits --to digits.safetensors --fleet runs/digits-1"),
            ("relay", "paraft relay digits --fleet host:7070"),
            ("feed", "paraft feed sglang http://localhost:30000 --job digits --to engines/digits"),
            ("stop", "paraft stop digits --fleet runs/digits-1"),
            ("delete", "paraft delete digits --fleet runs/digits-1"),
        ],
    },
    Group {
        name: "Operate",
        commands: &[
            ("server", "paraft server job.toml --id 0"),
            ("worker", "paraft worker job.toml --rank 0"),
            ("fleet", "paraft fleet up job.toml --on slurm"),
            ("drain", "paraft drain 2 --fleet job.toml"),
            ("forget", "paraft forget 2 --fleet job.toml"),
            ("data", "paraft data list paraft-data/localhost-7071"),
            ("certs", "paraft certs new authority"),
        ],
    },
    Group {
        name: "Measure",
        commands: &[
            ("verify", "paraft verify ledger --kills 5"),
            ("chaos", "paraft chaos --fleet runs/digits-1"),
            ("bench", "paraft bench wire --sizes 1M"),
            ("trace", "paraft trace runs/digits-1"),
            ("replay", "paraft replay runs/digits-1 --to weights.safetensors"),
            ("track", "paraft track runs/digits-1 --mlflow http://localhost:5000"),
        ],
    },
    Group {
        name: "This machine",
        commands: &[
            ("doctor", "paraft doctor"),
            ("env", "paraft env"),
            ("completions", "paraft completions bash"),
        ],
    },
];

/// Commands of a command, and their examples.
pub const INNER: [(&str, &str, &str); 38] = [
    ("fleet", "up", "paraft fleet up job.toml --on slurm"),
    ("fleet", "down", "paraft fleet down runs/digits-1"),
    ("fleet", "status", "paraft fleet status runs/digits-1"),
    ("fleet", "logs", "paraft fleet logs runs/digits-1 --lines 50"),
    ("fleet", "scale", "paraft fleet scale runs/digits-1 --workers 8"),
    ("checkpoint", "inspect", "paraft checkpoint inspect runs/digits-1"),
    ("checkpoint", "export", "paraft checkpoint export runs/digits-1 --to model.safetensors"),
    ("checkpoint", "save", "paraft checkpoint save digits --fleet runs/digits-1"),
    ("checkpoint", "list", "paraft checkpoint list --fleet runs/digits-1"),
    ("checkpoint", "diff", "paraft checkpoint diff runs/digits-1 runs/digits-2"),
    ("feed", "sglang", "paraft feed sglang http://localhost:30000 --job digits --to engines/digits"),
    ("feed", "vllm", "paraft feed vllm http://localhost:8000 --job digits --to engines/digits"),
    ("table", "ls", "paraft table ls clicks --fleet runs/clicks-1"),
    ("table", "get", "paraft table get clicks items 7 9999 --fleet runs/clicks-1"),
    ("table", "top", "paraft table top clicks items -n 20 --fleet runs/clicks-1"),
    ("table", "evict", "paraft table evict clicks items 7 --fleet runs/clicks-1"),
    ("table", "export", "paraft table export clicks items --to items-2 --since items-1"),
    ("table", "import", "paraft table import clicks items --from items-1 --fleet runs/clicks-2"),
    ("data", "list", "paraft data list paraft-data/localhost-7071"),
    ("data", "restore", "paraft data restore paraft-data/localhost-7071 shard-0.aside-1"),
    ("data", "delete", "paraft data delete paraft-data/localhost-7071 shard-0.aside-1"),
    ("data", "abandon", "paraft data abandon 2 --fleet localhost:7071 --accept-loss"),
    ("certs", "new", "paraft certs new authority"),
    ("certs", "issue", "paraft certs issue authority worker:digits"),
    ("certs", "renew", "paraft certs renew authority"),
    ("certs", "show", "paraft certs show authority"),
    ("verify", "ledger", "paraft verify ledger --kills 5"),
    ("verify", "sync", "paraft verify sync --steps 20"),
    ("bench", "train", "paraft bench train --epochs 1"),
    ("bench", "wire", "paraft bench wire --sizes 1M"),
    ("bench", "apply", "paraft bench apply --repeats 3"),
    ("bench", "table", "paraft bench table --rows 1000000 --repeats 3"),
    ("bench", "shard", "paraft bench shard --repeats 1"),
    ("bench", "resilience", "paraft bench resilience job.toml --repeats 3"),
    ("bench", "failover", "paraft bench failover --kills 10"),
    ("bench", "gpu", "paraft bench gpu --models mlp"),
    ("bench", "kernels", "paraft bench kernels --models mlp"),
    ("bench", "large", "paraft bench large --params 1000000"),
];

/// The example of a command, or of a command `inner` of it.
fn example(command: &str, inner: Option<&str>) -> Option<&'static str> {
    let of_group = GROUPS.iter().flat_map(|g| g.commands).find(|(name, _)| *name == command);
    match inner {
        None => of_group.map(|(_, example)| *example),
        Some(inner) => {
            INNER.iter().find(|(outer, name, _)| (*outer, *name) == (command, inner)).map(|(.., e)| *e)
        }
    }
}

/// Adds the groups to the help of `paraft`, and the examples to that of its commands.
pub fn with_help(cli: Command) -> Command {
    let template = template(&cli);
    cli.help_template(template).mut_subcommands(|command| {
        let outer = command.get_name().to_string();
        let command = command.mut_subcommands(|inner| {
            let example = example(&outer, Some(inner.get_name()));
            ending(inner, example)
        });
        let example = example(&outer, None);
        ending(command, example)
    })
}

/// The command with the example at the end of its help.
fn ending(command: Command, example: Option<&str>) -> Command {
    let Some(example) = example else { return command };
    let before = command.get_after_help().map(|said| format!("{said}\n\n")).unwrap_or_default();
    command.after_help(format!("{before}Example: {example}"))
}

/// clap knows no groups of commands, so the template has them as text.
fn template(cli: &Command) -> StyledStr {
    let heading = cli.get_styles().get_header();
    let mut text = String::from("{about-with-newline}\n{usage-heading} {usage}\n\n");
    for group in &GROUPS {
        let _ = writeln!(text, "{heading}{}:{heading:#}", group.name);
        for (name, _) in group.commands {
            let command = cli.find_subcommand(name);
            let about = command.and_then(Command::get_about).map(ToString::to_string);
            let _ =
                writeln!(text, "  {name:<width$}{}", folded(&about.unwrap_or_default()), width = INDENT - 2);
        }
        if let Some((_, example)) = group.commands.first() {
            let _ = writeln!(text, "  $ {example}\n");
        }
    }
    let _ = write!(text, "{heading}Options:{heading:#}\n{{options}}");
    text.into()
}

/// Lines of at most [`WIDTH`] columns; from the second on they start at [`INDENT`].
fn folded(text: &str) -> String {
    let (mut folded, mut column) = (String::new(), INDENT);
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if column > INDENT && column + 1 + length > WIDTH {
            let _ = write!(folded, "\n{:INDENT$}", "");
            column = INDENT;
        } else if column > INDENT {
            folded.push(' ');
            column += 1;
        }
        folded.push_str(word);
        column += length;
    }
    folded
}

#[cfg(test)]
#[path = "help_tests.rs"]
mod tests;

//! The flags of `paraft sweep`.

use super::search::Rule;
use clap::{Args, ValueEnum};
use paraft_fleet::targets::StandingArg;
use std::{net::SocketAddr, path::PathBuf};

/// How settings are searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Every point of the space, for all epochs.
    Grid,
    /// So many points, drawn with the seed, for all epochs.
    Random,
    /// Successive halving: all begin with few epochs, and of each rung the best of each `eta` continue.
    Halving,
    /// Likewise, but no trial waits for a full rung (Li et al. 2018).
    Asha,
}

impl Kind {
    /// The rule of the search.
    pub(super) fn rule(self) -> Rule {
        match self {
            Self::Grid | Self::Random => Rule::Once,
            Self::Halving => Rule::Halving,
            Self::Asha => Rule::Asha,
        }
    }
}

/// Which job, over which settings.
#[derive(Args)]
pub struct SweepArgs {
    /// The job file.
    pub job: PathBuf,
    /// The settings that are tried: docs/sweeps.md.
    #[arg(long, value_name = "FILE")]
    pub space: PathBuf,
    /// How they are searched.
    #[arg(long, value_enum, default_value_t = Kind::Asha)]
    pub search: Kind,
    /// Settings that are tried at most. Default: the whole grid, else 64.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub trials: Option<u32>,
    /// With halving and asha: epochs of the lowest rung; the highest is train.epochs.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub min_epochs: u64,
    /// With halving and asha: one of so many continues, with so many times the epochs.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=64))]
    pub eta: u32,
    /// Of what is drawn. Default: the job's.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Trials at a time. Default: as many as have cores of their own.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub parallel: Option<u32>,
    /// Let trials that go at the same time share cores.
    #[arg(long)]
    pub share_cores: bool,
    #[command(flatten)]
    pub(crate) standing: StandingArg,
    /// Overrides a key of the job file; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Where everything goes. A sweep that was ended continues in its folder. Default: runs/NAME-sweep-N, the first N that is free.
    #[arg(long)]
    pub run_dir: Option<PathBuf>,
    /// Serve the live page of the fleet here, with the sweep's trials, for example 127.0.0.1:8080 (port 0: any). A user with the token in its
    /// address may look and act; it is drawn, or in PARAFT_DASHBOARD_TOKEN
    #[arg(long, value_name = "ADDR")]
    pub dashboard: Option<SocketAddr>,
    /// Print one JSON object for each trial that has ended, and one for the best.
    #[arg(long)]
    pub json: bool,
}

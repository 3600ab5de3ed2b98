//! `paraft chaos`
use clap::Args;
#[derive(Args)]
pub struct ChaosArgs {}
pub fn run(_a: &ChaosArgs) -> Result<i32, crate::failure::Failure> {
    Ok(0)
}

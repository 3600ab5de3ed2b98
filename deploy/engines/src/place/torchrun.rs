//! torchrun's worker.

use super::{
    env::{Env, needs},
    task::Place,
};
use crate::error::EngineError;

pub(super) fn recognise(env: &Env<'_>) -> Result<Option<Place>, EngineError> {
    let engine = "torchrun";
    let Some(id) = env.text("TORCHELASTIC_RUN_ID") else { return Ok(None) };
    let of = |name: &str| env.must_number(engine, name);
    let port = env.beside_master()?.ok_or_else(|| needs(engine, "MASTER_PORT"))?;
    Ok(Some(Place {
        local_rank: of("LOCAL_RANK")?,
        local_tasks: of("LOCAL_WORLD_SIZE")?,
        host: of("GROUP_RANK")?,
        hosts: env.number("GROUP_WORLD_SIZE")?.unwrap_or(1),
        attempt: env.number("TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0),
        first: env.must(engine, "MASTER_ADDR")?,
        port,
        ..Place::alone(engine, id, of("RANK")?, of("WORLD_SIZE")?)
    }))
}

//! The workers, from their start to the end of the job, with failures and restarts.

use crate::{
    chance::{Chance, Draws},
    clock::nanos,
    error::SimError,
    speed::Speed,
    stream::Process,
    training::{Finished, train},
    world::World,
};
use paraft_common::WorkerId;
use paraft_record::{Event, event};
use std::sync::{Arc, atomic::Ordering::Relaxed};

/// A worker with all its restarts. `None`: it failed and was not restarted.
///
/// It fails only between its first weights and its last step: before, the others would wait for it for ever, and after, it
/// has nothing to lose.
pub(crate) async fn lives(world: Arc<World>, worker: WorkerId) -> Result<Option<Finished>, SimError> {
    let mut fails = Chance::new(world.seed, Draws::Fails(worker.0));
    let ranks = world.ranks();
    let speeds: Vec<Arc<Speed>> = (0..ranks).map(|at| Arc::new(Speed::new(&world, worker, at))).collect();
    loop {
        let processes: Vec<Arc<Process>> = (0..ranks).map(|at| Process::new(worker, at, ranks)).collect();
        let process = &processes[0];
        let lifetime = world.setup.mttf_s.map(|mean| fails.exponential(mean));
        tokio::select! {
            biased;
            finished = train(&world, &processes, &speeds) => return finished.map(Some),
            () = fails_after(&world, process, lifetime) => {}
        }
        world.failures.fetch_add(1, Relaxed);
        world.step_lead.lock().left(worker);
        for stream in process.ends(world.clock.now()) {
            world.servers.hang_up(&stream);
        }
        let reason = "failed, as the simulation has it".to_string();
        world.recording.write(&Event::Leave(event::Leave {
            wall: world.clock.seconds(),
            worker,
            rank: None,
            reason,
        }))?;
        let Some(restart) = world.setup.restart_s else { return Ok(None) };
        world.clock.sleep(nanos(restart)).await;
        if world.over.load(Relaxed) {
            return Ok(None);
        }
    }
}

async fn fails_after(world: &World, process: &Process, lifetime: Option<u64>) {
    let Some(lifetime) = lifetime else { return std::future::pending().await };
    process.begun().await;
    world.clock.sleep(lifetime).await;
    if process.is_finishing() {
        std::future::pending().await
    }
}

//! Who may do what: every request of every service, with every role and with none, over real connections; certificates that end and
//! change while pushes go on.

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, future::BoxFuture, stream};
use paraft_client::{WireKind, connect::lazy};
use paraft_common::Mode;
use paraft_lanes::Purpose;
use paraft_proto::{
    AbandonRequest, CheckpointRequest, DescribeRequest, DrainRequest, EditRowsRequest, EndJobRequest,
    ForgetRequest, FromShard, GroupHeartbeatRequest, HelloRequest, JoinGroupRequest, JoinRequest,
    NoteCheckpointsRequest, Open, PROTOCOL, PeerRequest, ReadRequest, ReadRowsRequest, ReadVersionRequest,
    ReportRequest, RoomRequest, RowsMessage, SaveRequest, StatusRequest, SubmitRequest, SwitchModeRequest,
    ToShard, VersionMessage, WithBulk, checkpoint_part, control_client::ControlClient, from_shard,
    rows_message, services, shards_client::ShardsClient, to_shard, version_message,
};
use paraft_tests::{
    closed::{closed, shows},
    fleet::{Fleet, FleetOptions},
    ledger::Ledger,
    wait,
};
use paraft_tls::{
    Access, Need,
    access::{DENIED, Expected},
    authority::Authority,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::Duration,
};
use tonic::{Code, Status, transport::Channel};

const DAY: Duration = Duration::from_secs(24 * 3600);
/// The job that the fleet trains.
const JOB: &str = "ledger";

/// Whether a request was heard, whatever then became of it.
type Heard = Result<bool>;

fn status<T>(answer: Result<T, Status>) -> Heard {
    match answer {
        Err(s) if s.code() == Code::PermissionDenied && s.message().contains(DENIED) => Ok(false),
        Err(s)
            if matches!(
                s.code(),
                Code::Unavailable | Code::Unknown | Code::Unimplemented | Code::Unauthenticated
            ) =>
        {
            Err(s.into())
        }
        _ => Ok(true),
    }
}

fn refused(kind: i32) -> Heard {
    Ok(kind != WireKind::Denied as i32)
}

/// One request of a method, of the job where it is about one.
fn ask(method: &'static str, channel: Channel, ledger: Ledger, founding: u64) -> BoxFuture<'static, Heard> {
    let mut control = ControlClient::new(channel.clone());
    let mut shards = ShardsClient::new(channel.clone());
    let job = JOB.to_string();
    Box::pin(async move {
        match method {
            "Control.Hello" => status(control.hello(HelloRequest {}).await),
            "Control.Report" => status(control.report(ReportRequest::default()).await),
            "Control.Join" => status(control.join(JoinRequest { address: "127.0.0.1:1".into() }).await),
            "Control.Drain" => status(control.drain(DrainRequest { server: 99, undo: true, token: 1 }).await),
            "Control.Forget" => status(control.forget(ForgetRequest { server: 99, token: 2 }).await),
            "Control.Abandon" => {
                status(control.abandon(AbandonRequest { shard: 63, accept_loss: false, token: 3 }).await)
            }
            "Control.NoteCheckpoints" => {
                let note = NoteCheckpointsRequest { job: founding, folder: "/c".into(), held: Vec::new() };
                status(control.note_checkpoints(note).await)
            }
            "Control.JoinGroup" => {
                status(control.join_group(JoinGroupRequest { job, ..JoinGroupRequest::default() }).await)
            }
            "Control.GroupHeartbeat" => {
                let beat = GroupHeartbeatRequest { job, ..GroupHeartbeatRequest::default() };
                status(control.group_heartbeat(beat).await)
            }
            "Control.Room" => status(control.room(RoomRequest { job: "no job".into() }).await),
            // Without a token it is refused, but heard.
            "Control.Submit" => {
                status(control.submit(SubmitRequest { name: job, ..SubmitRequest::default() }).await)
            }
            // The job that was founded with the fleet has no such name for it: heard, and nothing ends.
            "Control.EndJob" => status(control.end_job(EndJobRequest { job, delete: false, token: 4 }).await),
            "Control.Describe" => status(control.describe(DescribeRequest {}).await),
            "Shards.Status" => status(shards.status(StatusRequest::default()).await),
            "Shards.SwitchMode" => {
                let switch = SwitchModeRequest {
                    protocol: PROTOCOL,
                    shard: 0,
                    job,
                    mode: "no mode".into(),
                    number: 0,
                };
                match shards.switch_mode(switch).await {
                    Err(s) => status::<()>(Err(s)),
                    Ok(r) => refused(r.into_inner().refused.context("no mode")?.kind),
                }
            }
            // Heard, whether the ledger's page still counts as a worker that could write one or not.
            "Shards.Save" => match shards.save(SaveRequest { protocol: PROTOCOL, job }).await {
                Err(s) => status::<()>(Err(s)),
                Ok(r) => r.into_inner().refused.map_or(Ok(true), |r| refused(r.kind)),
            },
            "Shards.ReadRows" => {
                let read = ReadRowsRequest { protocol: PROTOCOL, job, ..ReadRowsRequest::default() };
                match shards.read_rows(read).await {
                    Err(s) => status::<()>(Err(s)),
                    Ok(rows) => match rows.into_inner().message().await {
                        Ok(Some(RowsMessage { kind: Some(rows_message::Kind::Refused(r)) })) => {
                            refused(r.kind)
                        }
                        Err(s) => status::<()>(Err(s)),
                        Ok(_) => Ok(true),
                    },
                }
            }
            "Shards.ReadVersion" => {
                let read = ReadVersionRequest { protocol: PROTOCOL, job, ..ReadVersionRequest::default() };
                match shards.read_version(read).await {
                    Err(s) => status::<()>(Err(s)),
                    Ok(version) => match version.into_inner().message().await {
                        Ok(Some(VersionMessage { kind: Some(version_message::Kind::Refused(r)) })) => {
                            refused(r.kind)
                        }
                        Err(s) => status::<()>(Err(s)),
                        Ok(_) => Ok(true),
                    },
                }
            }
            // Without a token it is refused, but heard.
            "Shards.EditRows" => {
                let edit = EditRowsRequest { protocol: PROTOCOL, job, ..EditRowsRequest::default() };
                match shards.edit_rows(edit).await {
                    Err(s) => status::<()>(Err(s)),
                    Ok(r) => refused(r.into_inner().refused.context("no token")?.kind),
                }
            }
            "Shards.Exchange" => {
                let open =
                    Open { protocol: PROTOCOL, job: ledger.job().to_toml()?, worker: 7, ..Open::default() };
                let open = ToShard { kind: Some(to_shard::Kind::Open(open)) };
                let says = stream::iter([WithBulk::from(open)]).chain(stream::pending());
                first(services::exchange(&channel, Box::pin(says)).await).await
            }
            "Shards.Read" => {
                let read = ReadRequest { protocol: PROTOCOL, job, ..ReadRequest::default() };
                first(services::read(&channel, read).await).await
            }
            "Shards.Checkpoint" => {
                let wants =
                    CheckpointRequest { protocol: PROTOCOL, job, step: 1, ..CheckpointRequest::default() };
                match services::checkpoint(&channel, wants).await {
                    Err(s) => status::<()>(Err(s)),
                    Ok(mut parts) => match parts.next().await {
                        Some(Ok(WithBulk { message, .. })) => match message.kind {
                            Some(checkpoint_part::Kind::Refused(r)) => refused(r.kind),
                            _ => Ok(true),
                        },
                        Some(Err(s)) => status::<()>(Err(s)),
                        None => Ok(true),
                    },
                }
            }
            "Peers.Call" => status(services::peer_call(&channel, PeerRequest::default().into()).await),
            "Peers.Append" => {
                let says = stream::iter([WithBulk::from(PeerRequest::default())]);
                match services::peer_appends(&channel, Box::pin(says)).await {
                    Err(s) => status::<()>(Err(s)),
                    Ok(mut answers) => match answers.next().await {
                        Some(Err(s)) => status::<()>(Err(s)),
                        _ => Ok(true),
                    },
                }
            }
            other => anyhow::bail!("a request that nobody asks here: {other}"),
        }
    })
}

async fn first(answers: Result<paraft_proto::Incoming<FromShard>, Status>) -> Heard {
    match answers {
        Err(s) => status::<()>(Err(s)),
        Ok(mut answers) => match answers.next().await {
            Some(Ok(WithBulk { message, .. })) => match message.kind {
                Some(from_shard::Kind::Refused(r)) => refused(r.kind),
                _ => Ok(true),
            },
            Some(Err(s)) => status::<()>(Err(s)),
            None => Ok(true),
        },
    }
}

/// All methods of the `.proto` files, and what they say of themselves there.
fn methods() -> Result<Vec<&'static str>> {
    let mut all = Vec::new();
    for file in ["control", "shard", "peer"] {
        let path = format!("{}/../proto/proto/{file}.proto", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(&path).context(path)?;
        let service = text.lines().find_map(|l| l.strip_prefix("service ")).context("no service")?;
        let service = service.trim_end_matches([' ', '{']).to_string();
        for line in text.lines().filter_map(|l| l.trim().strip_prefix("rpc ")) {
            let name = line.split('(').next().context("a name")?;
            all.push(&*format!("{service}.{name}").leak());
        }
    }
    Ok(all)
}

/// Roles: of the job, of another, and of the fleet.
const ROLES: [&str; 9] = [
    "admin",
    "peer",
    "submit:ledger",
    "worker:ledger",
    "reader:ledger",
    "submit:other",
    "worker:other",
    "reader:other",
    "worker:ledg*",
];

fn fleet() -> Result<(Fleet, u64)> {
    let fleet = Fleet::start(FleetOptions { closed: true, ..FleetOptions::default() })?;
    let ledger = Ledger::new(Mode::Asp, 1, 1000);
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    page.step()?;
    let founding =
        || fleet.describe().ok().and_then(|d| d.jobs.first().map(|j| (j.founding, j.name.clone())));
    let known = wait::until("the job to be reported", founding, |f| f.as_ref().is_some_and(|f| f.1 == JOB));
    Ok((fleet, known.map_or(0, |f| f.0)))
}

#[test]
fn each_request_is_open_to_the_roles_it_needs_and_no_others() -> Result<()> {
    closed();
    let (fleet, founding) = fleet()?;
    let address = fleet.at.addresses[0].clone();
    let all = methods()?;
    let ledger = Ledger::new(Mode::Asp, 1, 1000);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let mut asked = Vec::new();
    for role in ROLES {
        let access = closed().shows(&[role], DAY)?;
        for method in all.iter().copied() {
            // Each on a connection of its own: who is refused is held for a while.
            let (address, access) = (address.clone(), access.clone());
            asked.push(runtime.spawn(async move {
                let channel = lazy(&address, &access).map_err(anyhow::Error::msg)?;
                let heard =
                    tokio::time::timeout(Duration::from_secs(60), ask(method, channel, ledger, founding));
                anyhow::Ok((method, role, heard.await?.with_context(|| format!("{method} as {role}"))?))
            }));
        }
    }
    let mut heard: BTreeMap<&str, BTreeSet<&str>> = all.iter().map(|m| (*m, BTreeSet::new())).collect();
    for one in asked {
        let (method, role, was) = runtime.block_on(one)??;
        if was {
            heard.entry(method).or_default().insert(role);
        }
    }
    // What the table of the server says, for the job and for another, is what happens.
    for (path, need) in paraft_server::rpc::rights::NEEDS {
        let method = path.trim_start_matches("/paraft.v1.").replace('/', ".");
        let of = |role: &str| {
            role.parse::<paraft_tls::Role>().is_ok_and(|r| match need {
                Need::Any => true,
                need => r.is_enough_for(*need, Some(JOB)),
            })
        };
        let expected: BTreeSet<&str> = ROLES.into_iter().filter(|r| of(r)).collect();
        ensure!(
            heard.get(&*method) == Some(&expected),
            "{method}: heard from {:?}, not {expected:?}",
            heard.get(&*method)
        );
    }
    ensure!(heard.len() == paraft_server::rpc::rights::NEEDS.len(), "a method without a need");
    table(&heard)
}

/// The table of docs/security.md is what was heard. `PARAFT_WRITE_DOCS=1` writes it.
fn table(heard: &BTreeMap<&str, BTreeSet<&str>>) -> Result<()> {
    let columns = ["admin", "peer", "submit:ledger", "worker:ledger", "reader:ledger", "worker:other"];
    let mut text = String::from(
        "| request | admin | peer | submit | worker | reader | of another job |\n|---|---|---|---|---|---|---|\n",
    );
    for (method, roles) in heard {
        let mark = |c: &&str| if roles.contains(*c) { " yes |" } else { " |" };
        text += &format!("| {method} |{}\n", columns.iter().map(mark).collect::<String>());
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/security.md");
    let page = std::fs::read_to_string(&path)?;
    let (begin, end) = ("<!-- who may ask for what: made by a test -->\n", "<!-- end -->");
    let at = page.find(begin).context("no place for the table")? + begin.len();
    let to = at + page[at..].find(end).context("no end of the table")?;
    if std::env::var_os("PARAFT_WRITE_DOCS").is_some() {
        std::fs::write(&path, [&page[..at], &text, &page[to..]].concat())?;
    } else {
        ensure!(
            page[at..to] == text,
            "docs/security.md has another table; PARAFT_WRITE_DOCS=1 writes it:\n{text}"
        );
    }
    Ok(())
}

#[test]
fn nobody_without_a_certificate_of_the_fleet_is_heard_at_all() -> Result<()> {
    closed();
    let (fleet, _) = fleet()?;
    let address = &fleet.at.addresses[0];
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let other = Authority::new("other")?;
    let theirs = shows(&other, &["admin", "peer", "worker:*"], DAY)?;
    for (who, access, why) in [
        ("in plain text", Access::Insecure, "TLS"),
        ("without a certificate", Access::Closed, "--certs"),
        ("of another authority", theirs.clone(), "certificate"),
    ] {
        let said = runtime.block_on(async {
            let channel = lazy(address, &access).map_err(anyhow::Error::msg)?;
            anyhow::Ok(ControlClient::new(channel).describe(DescribeRequest {}).await)
        })?;
        let error = said.expect_err(who);
        let said = format!("{error:?}");
        let none = [Code::Unavailable, Code::Unknown, Code::PermissionDenied];
        ensure!(none.contains(&error.code()), "{who}: {said}");
        // The same over a lane.
        for purpose in [Purpose::Exchange, Purpose::Append] {
            let lane = runtime.block_on(async {
                let mut wire = access.dial(address, &Expected::SERVER).await?;
                paraft_lanes::dial(&mut wire, purpose).await
            });
            ensure!(lane.as_ref().is_err_and(|e| e.to_string().contains(why)), "{who}: {lane:?}");
        }
    }
    // Lanes ask for the same roles.
    for (role, taken) in
        [("worker:ledger", [true, false]), ("peer", [false, true]), ("reader:ledger", [false, false])]
    {
        let access = closed().shows(&[role], DAY)?;
        for (purpose, taken) in [Purpose::Exchange, Purpose::Append].into_iter().zip(taken) {
            let lane = runtime.block_on(async {
                let mut wire = access.dial(address, &Expected::SERVER).await?;
                paraft_lanes::dial(&mut wire, purpose).await
            });
            ensure!(lane.is_ok() == taken, "{role} {purpose:?}: {lane:?}");
        }
    }
    let denied = fleet.status(0, false)?.connections.context("counted")?.denied;
    ensure!(denied >= 6, "{denied} are counted");
    Ok(())
}

#[test]
fn what_is_told_is_of_the_jobs_that_a_role_is_for() -> Result<()> {
    closed();
    let (fleet, _) = fleet()?;
    let address = &fleet.at.addresses[0];
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    for (role, sees) in [("reader:ledger", true), ("worker:other", false), ("admin", true), ("peer", true)] {
        let access = closed().shows(&[role], DAY)?;
        let (all, here) = runtime.block_on(async {
            let channel = lazy(address, &access).map_err(anyhow::Error::msg)?;
            let all = ControlClient::new(channel.clone()).describe(DescribeRequest {}).await?.into_inner();
            let here = ShardsClient::new(channel).status(StatusRequest::default()).await?.into_inner();
            anyhow::Ok((all, here))
        })?;
        ensure!(all.servers.len() == 1, "{role}: servers are no secret of a job");
        let seen = [!all.jobs.is_empty(), !all.shards.is_empty(), !here.shards.is_empty()];
        ensure!(seen == [sees; 3], "{role} sees {seen:?}");
    }
    Ok(())
}

/// How often the threads for readers, of all servers in this process, have waited for a request.
fn waits_of_reader_threads() -> Result<u64> {
    let mut waits = 0;
    for task in std::fs::read_dir("/proc/self/task")? {
        let status = std::fs::read_to_string(task?.path().join("status")).unwrap_or_default();
        if status.starts_with("Name:\tparaft-readers\n") {
            let line = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
            waits += line.context("no count")?.trim().parse::<u64>()?;
        }
    }
    Ok(waits)
}

#[test]
fn who_may_only_read_is_served_by_threads_of_low_priority() -> Result<()> {
    const REQUESTS: u64 = 200;
    closed();
    let (fleet, _) = fleet()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let waits_for = |role: &str| {
        let access = closed().shows(&[role], DAY)?;
        runtime.block_on(async {
            let channel = lazy(&fleet.at.addresses[0], &access).map_err(anyhow::Error::msg)?;
            let mut control = ControlClient::new(channel);
            let before = waits_of_reader_threads()?;
            for _ in 0..REQUESTS {
                control.describe(DescribeRequest {}).await?;
            }
            Ok::<_, anyhow::Error>(waits_of_reader_threads()? - before)
        })
    };
    let (worker, reader) = (waits_for("worker:ledger")?, waits_for("reader:ledger")?);
    ensure!(
        reader >= REQUESTS / 2,
        "{reader} waits for {REQUESTS} requests of a reader, {worker} of a worker"
    );
    Ok(())
}

#[test]
fn a_worker_with_another_jobs_certificate_changes_nothing() -> Result<()> {
    closed();
    let (fleet, _) = fleet()?;
    let before = fleet.status(0, false)?.shards[0].clone();
    // This process's clients show what it shows; that of the worker is another's, by hand.
    let access = closed().shows(&["worker:other", "reader:other"], DAY)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let ledger = Ledger::new(Mode::Asp, 1, 1000);
    let channel =
        runtime.block_on(async { lazy(&fleet.at.addresses[0], &access) }).map_err(anyhow::Error::msg)?;
    for method in ["Shards.Exchange", "Shards.Read", "Shards.Checkpoint", "Shards.SwitchMode", "Shards.Save"]
    {
        ensure!(!runtime.block_on(ask(method, channel.clone(), ledger, 0))?, "{method}");
    }
    // A job without a name is the first one, whose name counts then.
    let read = ReadRequest { protocol: PROTOCOL, ..ReadRequest::default() };
    ensure!(!runtime.block_on(async { first(services::read(&channel, read).await).await })?, "by no name");
    let after = fleet.status(0, false)?.shards[0].clone();
    ensure!(after.members.iter().all(|m| m.worker != 7) && before.pushes == after.pushes);
    Ok(())
}

#[test]
fn a_certificate_that_has_ended_is_good_for_nothing() -> Result<()> {
    let closed = closed();
    let (fleet, _) = fleet()?;
    let access = closed.shows(&["worker:ledger"], Duration::from_secs(3))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let channel =
        runtime.block_on(async { lazy(&fleet.at.addresses[0], &access) }).map_err(anyhow::Error::msg)?;
    let describe = || runtime.block_on(ControlClient::new(channel.clone()).describe(DescribeRequest {}));
    describe().context("it is good still")?;
    wait::until("it to end", describe, |said| said.is_err()).err().context("it ended")?;
    for _ in 0..3 {
        ensure!(describe().is_err(), "it is good again");
    }
    Ok(())
}

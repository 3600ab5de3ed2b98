//! Refusals on the wire: one kind for each mistake, all listed in docs/protocol.md.

use paraft_common::{BucketId, JobId, ServerId, SessionId, ShardId, Step, WorkerId};
use paraft_proto::{Advice, Refusal, RefusalKind as K, Refused, WireKind};
use std::collections::{BTreeMap, BTreeSet};

/// One of each. A new variant does not compile in [`K::wire`], and the count of the wire's kinds shows that
/// it is missing here.
fn all() -> Vec<K> {
    let (shard, worker, bucket, step) = (ShardId(1), WorkerId(2), BucketId(3), Step(4));
    let text = || "why".to_string();
    vec![
        K::NotLeader { shard, leader: Some("h:1".into()), stopped: None },
        K::WrongShard { shard },
        K::Protocol { client: 1, server: 2 },
        K::BadJob(text()),
        K::OtherJob { running: "a".into(), asked: "b".into(), difference: None },
        K::NotOpened,
        K::AlreadyOpen,
        K::RankTaken(worker),
        K::UnknownSession { worker, session: SessionId(1) },
        K::WrongBucket { bucket, shard },
        K::BucketLength { bucket, expected: 4, got: 5 },
        K::BadPayload { bucket, why: text() },
        K::NotFinite { bucket, step },
        K::WrongStep { bucket, expected: step, got: step },
        K::FutureVersion { bucket, got: 2, current: 1 },
        K::NotInitialised,
        K::NoPart { shard, step },
        K::NoVersion { shard, step, reached: step },
        K::Overloaded("full".into()),
        K::StateLost(shard),
        K::Unavailable(text()),
        K::Unreadable(text()),
        K::NoKind,
        K::BadRate { bucket, option: "rate", got: -1.0, why: "why" },
        K::BadSeq { bucket },
        K::BadStep { message: "Pull", got: step },
        K::BadInitPart { bucket, part: 9, slots: 1 },
        K::BadInitStamp { bucket, version: 0, clock: -1.0 },
        K::BadVersions { field: "have", shard, buckets: 2, got: 1 },
        K::BadOnly,
        K::OnlyOfWhole { beside: "final" },
        K::BadNorm { step, got: -1.0 },
        K::NoChunks { message: "Acquire", why: "why" },
        K::BadRequest,
        K::BadMode("b".into()),
        K::BadSwitch("number".into()),
        K::OtherFounding(shard),
        K::NoRoom("too large".into()),
        K::NoJob { asked: "a".into(), there: Vec::new() },
        K::Denied(text() + " not"),
        K::NotControlLeader { leader: Some("h:1".into()) },
        K::NotAgreed(text()),
        K::BadName("name".into()),
        K::NameTaken { job: JobId(1), name: "a".into(), state: "running" },
        K::NoSuchJob { asked: "a".into(), there: Vec::new() },
        K::NoSuchServer(ServerId(1)),
        K::BadOrder("order".into()),
    ]
}

#[test]
fn each_mistake_has_a_kind_and_a_text_of_its_own() {
    let mut texts = BTreeSet::new();
    let mut kinds = BTreeSet::new();
    for kind in all() {
        let sent = Refused::from(Refusal { kind: kind.clone(), seq: 7 });
        assert_eq!((sent.kind(), sent.advice(), sent.seq), (kind.wire(), kind.advice(), 7));
        assert_ne!(sent.kind(), WireKind::Unspecified, "{kind:?}");
        assert!(kinds.insert(sent.kind), "two mistakes of one kind: {kind:?}");
        assert!(texts.insert(sent.message.clone()), "two mistakes with one text: {}", sent.message);
    }
    let known = (0..).take_while(|n| WireKind::try_from(*n).is_ok()).count();
    assert_eq!(kinds.len() + 1, known, "a kind that no refusal has, or a gap in their numbers");
}

#[test]
fn refusal_of_a_partition_names_its_table() {
    let of = K::NotFinite { bucket: BucketId(3), step: Step(4) };
    let named = K::OfTable { table: "items".into(), partition: 2, of: Box::new(of.clone()) };
    assert_eq!((named.wire(), named.advice()), (of.wire(), of.advice()));
    assert_eq!(named.to_string(), format!("partition 2 of table `items`: {of}"));
}

#[test]
fn the_page_about_the_protocol_has_every_kind_with_its_advice() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/protocol.md");
    let page = std::fs::read_to_string(page).expect("docs/protocol.md");
    let table = page.split("<!-- refusals").nth(1).expect("the table").lines().skip(3);
    let rows: BTreeMap<String, String> = table
        .take_while(|l| l.starts_with('|'))
        .map(|l| {
            let mut cells = l.split('|').map(|c| c.trim().trim_matches('`').to_string()).skip(1);
            (cells.next().unwrap_or_default(), cells.next().unwrap_or_default())
        })
        .collect();
    let expected: BTreeMap<String, String> = all()
        .iter()
        .map(|k| {
            let advice = match k.advice() {
                Advice::Retry => "retry",
                Advice::Redirect => "redirect",
                Advice::Fix => "fix",
                Advice::Stop => "stop",
                Advice::Lost => "lost",
                Advice::Unspecified => "",
            };
            let name = k.wire().as_str_name().trim_start_matches("REFUSAL_KIND_");
            (name.to_string(), advice.to_string())
        })
        .collect();
    assert_eq!(rows, expected);
}

//! The buckets of tensors, groups, stages and constraints, and the lists that give none.

use super::*;
use crate::constraint::Rule;

#[test]
fn buckets_cover_the_vector_once_and_never_mix_kinds() {
    let l = Layout::new(
        vec![TensorSpec::param("a", &[3, 5]), TensorSpec::param("b", &[4]), TensorSpec::buffer("m", &[6])],
        4,
    )
    .expect("valid");
    assert_eq!((l.len(), l.params_len()), (25, 19));
    let mut at = 0;
    for b in l.buckets() {
        assert_eq!(b.offset, at);
        assert_eq!(b.kind == TensorKind::Param, b.offset < 19);
        at += b.len;
    }
    assert_eq!(at, 25);
    assert_eq!(l.tensor_range(1), 15..19);
}

fn group(values: usize) -> ParamGroup {
    ParamGroup::new(values, 0.1, 0.0)
}

fn in_groups(
    tensors: Vec<TensorSpec>,
    groups: &[ParamGroup],
    bucket_len: usize,
) -> Result<Layout, LayoutError> {
    Layout::cut(tensors, Cuts { groups, ..Cuts::default() }, bucket_len)
}

#[test]
fn a_bucket_is_of_one_stage_and_of_one_group() {
    let tensors = || vec![TensorSpec::param("a", &[19])];
    let staged = |groups: &[ParamGroup], stages: &[usize]| {
        Layout::cut(tensors(), Cuts { groups, stages, ..Cuts::default() }, 4).expect("valid")
    };
    let of = |l: &Layout| l.buckets().iter().map(|b| (b.offset, b.len, b.group)).collect::<Vec<_>>();
    let l = staged(&[], &[6, 13]);
    assert_eq!(of(&l), [(0, 4, 0), (4, 2, 0), (6, 4, 0), (10, 4, 0), (14, 4, 0), (18, 1, 0)]);
    assert_eq!((l.stages(), l.buckets_in(0), l.buckets_in(1), l.buckets_in(2)), (2, 0..2, 2..6, 6..6));
    assert_eq!((0..6).map(|b| l.stage_of(BucketId(b))).collect::<Vec<_>>(), [0, 0, 1, 1, 1, 1]);
    let l = staged(&[group(8), group(11)], &[6, 2, 11]);
    assert_eq!(of(&l), [(0, 4, 0), (4, 2, 0), (6, 2, 0), (8, 4, 1), (12, 4, 1), (16, 3, 1)]);
    assert_eq!((l.buckets_in(1), l.buckets_in(2)), (2..3, 3..6));
    let one = Layout::new(tensors(), 4).expect("valid");
    assert_eq!((one.stages(), one.buckets_in(0)), (1, 0..5));
    assert_eq!(staged(&[], &[19]), one);
}

#[test]
fn wrong_stages_are_named() {
    let with = |stages: &[usize], more: usize| {
        let mut tensors = vec![TensorSpec::param("a", &[9])];
        tensors.extend((more > 0).then(|| TensorSpec::buffer("m", &[more])));
        Layout::cut(tensors, Cuts { stages, ..Cuts::default() }, 1)
    };
    assert_eq!(with(&[5, 0, 4], 0), Err(LayoutError::EmptyStage(1)));
    assert_eq!(with(&[5, 5], 0), Err(LayoutError::StagesLength { stages: 10, params: 9 }));
    assert_eq!(with(&[5, 4], 2), Err(LayoutError::StagedBuffers));
    assert_eq!(with(&[1; 1025], 0), Err(LayoutError::TooManyStages(1025)));
    assert!(with(&[usize::MAX, usize::MAX], 0).is_err());
}

#[test]
fn a_bucket_is_of_one_group_and_one_group_is_as_none() {
    let tensors = || vec![TensorSpec::param("a", &[19]), TensorSpec::buffer("m", &[6])];
    let l = in_groups(tensors(), &[group(6), group(1), group(12)], 4).expect("valid");
    let cut: Vec<_> = l.buckets().iter().map(|b| (b.offset, b.len, b.group)).collect();
    let params = [(0, 4, 0), (4, 2, 0), (6, 1, 1), (7, 4, 2), (11, 4, 2), (15, 4, 2)];
    assert_eq!(cut[..6], params);
    assert_eq!(cut[6..], [(19, 4, 0), (23, 2, 0)]);
    assert_eq!(in_groups(tensors(), &[group(19)], 4), Layout::new(tensors(), 4));
}

#[test]
fn bucket_has_whole_rows_of_a_constraint() {
    let rule = Rule::UnitNorm { row: 3 };
    let rows = |offset, values| Constraint { offset, values, rule };
    let cut = |constraints: &[Constraint], groups: &[ParamGroup], len| {
        let tensors = vec![TensorSpec::param("a", &[19]), TensorSpec::buffer("m", &[6])];
        Layout::cut(tensors, Cuts { groups, constraints, ..Cuts::default() }, len)
    };
    let of = |l: Layout| l.buckets().iter().map(|b| (b.offset, b.len)).collect::<Vec<_>>();
    let l = of(cut(&[rows(2, 9)], &[], 4).expect("valid"));
    assert_eq!(l, [(0, 2), (2, 3), (5, 3), (8, 3), (11, 4), (15, 4), (19, 4), (23, 2)]);
    let l = of(cut(&[rows(0, 18)], &[group(6), group(13)], 7).expect("valid"));
    assert_eq!(l, [(0, 6), (6, 6), (12, 6), (18, 1), (19, 6)]);
    // A bucket is longer than a job's where one row is.
    assert_eq!(of(cut(&[rows(0, 18)], &[], 2).expect("valid"))[..2], [(0, 3), (3, 3)]);
    assert_eq!(cut(&[rows(0, 18)], &[group(7), group(12)], 4), Err(LayoutError::CutRow(3)));
    assert!(matches!(cut(&[rows(9, 12)], &[], 4), Err(LayoutError::Constraint(_))));
    let row = MAX_BUCKET_LEN + 1;
    let long = Constraint { offset: 0, values: row, rule: Rule::UnitNorm { row } };
    let cuts = Cuts { constraints: &[long], ..Cuts::default() };
    assert_eq!(Layout::cut(vec![TensorSpec::param("a", &[row])], cuts, 4), Err(LayoutError::LongRow(row)));
    // Each value by itself can be cut anywhere.
    let clamp = Constraint { offset: 1, values: 5, rule: Rule::Clamp { min: Some(0.0), max: Some(1.0) } };
    assert_eq!(cut(&[clamp], &[], 4), cut(&[], &[], 4));
}

#[test]
fn wrong_groups_are_named() {
    let with = |groups: &[ParamGroup]| in_groups(vec![TensorSpec::param("a", &[9])], groups, 1);
    assert_eq!(with(&[group(5), group(0), group(4)]), Err(LayoutError::EmptyGroup(1)));
    assert_eq!(with(&[group(5), group(5)]), Err(LayoutError::GroupsLength { groups: 10, params: 9 }));
    let huge = with(&[group(usize::MAX), group(usize::MAX)]).expect_err("too many").to_string();
    assert!(huge.contains("the model has 9"), "{huge}");
    assert_eq!(with(&vec![group(1); 1025]), Err(LayoutError::TooManyGroups(1025)));
}

#[test]
fn wrong_tensors_are_named() {
    let e = Layout::new(vec![TensorSpec::param("a", &[0])], 4).expect_err("zero");
    assert!(e.to_string().contains("`a`"));
    let two = vec![TensorSpec::param("a", &[1]), TensorSpec::param("a", &[1])];
    assert_eq!(Layout::new(two, 4), Err(LayoutError::DuplicateName("a".into())));
    let many = |n| Layout::new(vec![TensorSpec::param("a", &[n])], 1);
    assert_eq!(many(MAX_BUCKETS).map(|l| l.buckets().len()), Ok(MAX_BUCKETS));
    assert_eq!(many((1 << 40) - 1), Err(LayoutError::TooManyBuckets((1 << 40) - 1)));
    let order = vec![TensorSpec::buffer("m", &[1]), TensorSpec::param("a", &[1])];
    assert_eq!(Layout::new(order, 4), Err(LayoutError::BufferBeforeParam("a".into())));
}

//! Tests of `place`.

use super::*;

fn places(size: usize, (stages, slices, meshes): (usize, usize, usize)) -> Vec<Place> {
    (0..size).map(|p| Place::new((p, size), ModelSplit { stages, slices, meshes })).collect()
}

#[test]
fn stages_go_round_the_ranks_that_there_are() {
    let of = |size: usize| -> Vec<Range<usize>> {
        places(size, (4, 1, 1)).into_iter().map(|p| p.stages).collect()
    };
    assert_eq!(of(4), [0..1, 1..2, 2..3, 3..4]);
    assert_eq!(of(3), [0..1, 1..2, 2..4]);
    assert_eq!(of(2), [0..2, 2..4]);
    assert_eq!(of(1), vec![Range { start: 0, end: 4 }]);
    for size in 1..5 {
        for (place, here) in places(size, (4, 1, 1)).iter().enumerate() {
            assert!(here.stages.clone().all(|s| here.of_stage(s, 4) == place), "{here:?}");
            assert_eq!(here.is_last(), here.stages.end == 4);
        }
    }
}

#[test]
fn slices_of_a_stage_are_neighbours_and_fewer_where_ranks_are() {
    let of = |size: usize| -> Vec<(Range<usize>, usize, usize)> {
        places(size, (2, 2, 1)).into_iter().map(|p| (p.stages, p.slice.at, p.slice.of)).collect()
    };
    assert_eq!(of(4), [(0..1, 0, 2), (0..1, 1, 2), (1..2, 0, 2), (1..2, 1, 2)]);
    assert_eq!(of(3), [(0..2, 0, 2), (0..2, 1, 2), (2..2, 0, 2)], "one waits");
    assert_eq!(of(2), [(0..2, 0, 2), (0..2, 1, 2)]);
    assert_eq!(of(1), [(0..2, 0, 1)]);
    let here = &places(4, (2, 2, 1))[3];
    assert_eq!((here.beside(0), here.is_last(), here.speaks(), here.ranks()), (1, true, false, 4));
}

#[test]
fn meshes_stand_behind_each_other_and_are_whole_or_not_there() {
    let of = |size: usize| -> Vec<(usize, Range<usize>, usize)> {
        places(size, (2, 2, 2)).into_iter().map(|p| (p.mesh, p.stages, p.slice.at)).collect()
    };
    let one = [(0, 0..1, 0), (0, 0..1, 1), (0, 1..2, 0), (0, 1..2, 1)];
    let two = [(1, 0..1, 0), (1, 0..1, 1), (1, 1..2, 0), (1, 1..2, 1)];
    assert_eq!(of(8), [&one[..], &two].concat());
    assert_eq!(of(7), [&one[..], &[(0, 2..2, 0), (0, 2..2, 1), (0, 2..2, 0)]].concat(), "three wait");
    assert_eq!(of(4), one);
    // With too few ranks for one mesh there is one.
    assert_eq!(of(3), [(0, 0..2, 0), (0, 0..2, 1), (0, 2..2, 0)]);
    let all = places(8, (2, 2, 2));
    let speak: Vec<usize> = (0..8).filter(|p| all[*p].speaks()).collect();
    assert_eq!((speak, all[5].speakers().collect()), (vec![0, 2], vec![0, 2]));
    assert_eq!((all[5].beside(1), all[5].in_mesh(0, 1), all[5].ranks()), (7, 3, 8));
    let alike: Vec<_> = all[7].alike().collect();
    assert_eq!(alike, [(2, 0, true), (3, 1, true), (6, 0, false), (7, 1, false)]);
    assert!(places(5, (2, 1, 3)).iter().skip(4).all(|p| p.stages.is_empty() && p.meshes == 2));
}

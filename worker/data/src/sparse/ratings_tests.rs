//! Tests of `ratings`.

use super::*;

fn read(text: &str, ids: Ids) -> Result<SparseBatch, String> {
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("ratings");
    std::fs::write(&path, text).expect("writes");
    read_ratings(&path, ids).map_err(|e| e.to_string())
}

#[test]
fn the_three_forms_of_movielens_are_read_alike() {
    let csv = "userId,movieId,rating,timestamp\r\n1,31,2.5,1260759144\r\n7,9018446744073709551,0,1\r\n";
    let tabs = "1\t31\t2.5\t881250949\n7\t9018446744073709551\t0\t1\n";
    let colons = "1::31::2.5::978300760\n7::9018446744073709551::0::1\n";
    let short = "user_id:token,item_id:token,rating:float\n1,31,2.5\n\n7,9018446744073709551,0.0";
    for text in [csv, tabs, colons, short] {
        let batch = read(text, Ids::Numbers).expect("reads");
        assert_eq!(batch.labels, [2.5, 0.0], "a rating of 0 is no gap");
        let [user, item] = &batch.fields[..] else { panic!("two fields") };
        assert_eq!((&user.offsets[..], &user.ids[..]), (&[0, 1, 2][..], &[1, 7][..]));
        assert_eq!(
            (&item.offsets[..], &item.ids[..]),
            (&[0, 1, 2][..], &[31, 9_018_446_744_073_709_551][..])
        );
    }
}

#[test]
fn texts_are_ids_by_their_hash() {
    let text = "A2SUAM1J3GNN3B,0001713353,5.0,1400457600\n\"A2SUAM1J3GNN3B\",1713353,1,1\nb.c,1e5,2\n";
    let batch = read(&text.replace(",2\n", ",2,1\n"), Ids::Texts).expect("reads");
    let [user, item] = &batch.fields[..] else { panic!("two fields") };
    assert_eq!(user.ids[..2], [xxh3_64(b"A2SUAM1J3GNN3B"); 2]);
    assert_ne!(item.ids[0], item.ids[1], "digits are a text like any other");
}

#[test]
fn ids_that_are_no_ids_are_refused_with_their_place() {
    let pandas =
        "id `1.0` is no whole number and no name; write ids as whole numbers; pandas writes 1 as 1.0";
    for ids in [Ids::Numbers, Ids::Texts] {
        let error = read("3,4,5\n3,1.0,5\n", ids).expect_err("a float");
        assert!(error.contains("line 2, column 3: ") && error.contains(pandas), "{error}");
        let error = read("nan,4,5\n", ids).expect_err("a gap");
        assert!(error.contains("line 1, column 1: id `nan`"), "{error}");
        assert!(read(",4,5\n", ids).expect_err("a gap").contains("column 1: id ``"));
    }
    for (text, expected) in [
        ("1,x,5\n", "line 1, column 3: id `x` is no whole number from 0 to"),
        ("-1,2,5\n", "line 1, column 1: id `-1` is no whole number"),
        ("1,18446744073709551616,5\n", "line 1, column 3: id `18446744073709551616`"),
        ("1,2,nan\n", "line 1, column 1: columns `1`, `2`, `nan`; order the columns"),
        ("1,2,5\n1,2,nan\n", "line 2, column 5: rating `nan` is no finite number"),
        ("1,2,5\n1,2,\n", "line 2, column 5: rating ``"),
        ("1,2\n", "line 1, column 1: 2 fields where user, item, rating and perhaps a time belong"),
        ("1;2;5\n", "line 1, column 1: 1 fields where user"),
        ("1,2,5,1\n1,2,5\n", "line 2, column 1: 3 fields where the first row has 4"),
        ("movieId,userId,rating\n1,2,5\n", "line 1, column 1: columns `movieId`, `userId`, `rating`; order"),
        ("userId,movieId,when\n1,2,5\n", "order the columns as user, item, rating"),
        ("userId,movieId,rating\n", "no sample"),
    ] {
        let error = read(text, Ids::Numbers).expect_err(expected);
        assert!(error.contains(expected), "{error}\nlacks: {expected}");
    }
}

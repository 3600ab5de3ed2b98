//! Tests of `exchange`.

use super::*;

#[test]
fn only_a_message_that_cannot_be_read_is_refused() {
    let refused = unreadable(&Status::invalid_argument("no protobuf"));
    assert_eq!(refused, Some(RefusalKind::Unreadable("no protobuf".into())));
    for status in [Status::unavailable("it is silent"), Status::cancelled("it ended"), Status::unknown("h2")]
    {
        assert_eq!(unreadable(&status), None, "{status:?}");
    }
}

//! Tests of `lane`.

use super::*;
use std::io;
use tonic::Code;

#[test]
fn a_peers_silence_or_end_is_no_mistake() {
    let reset = LaneError::Io(io::Error::from(io::ErrorKind::ConnectionReset));
    let cut_short = LaneError::Frame(FrameError::CutShort);
    for end in [LaneError::Silent(Duration::from_secs(3)), reset, cut_short] {
        assert_eq!(status(&end).code(), Code::Unavailable, "{end}");
    }
    for mistake in [FrameError::NotShared, FrameError::Malformed("no protobuf".into())] {
        let mistake = LaneError::Frame(mistake);
        assert_eq!(status(&mistake).code(), Code::InvalidArgument, "{mistake}");
    }
}

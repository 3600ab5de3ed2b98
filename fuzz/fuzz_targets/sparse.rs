#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| paraft_decoders::files::sparse(data));

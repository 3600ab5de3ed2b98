#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| paraft_decoders::store::small_file(data));

//! Compiles the .proto files with protox, so that no machine needs protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["proto/shard.proto", "proto/peer.proto", "proto/control.proto"];
    for f in files {
        println!("cargo:rerun-if-changed={f}");
    }
    let descriptors = protox::compile(files, ["proto"])?;
    // Payloads stay `Bytes`: slices of the receive buffer, not copies.
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}

//! Compiles the .proto files with protox, so that no machine needs protoc.

/// Methods whose messages carry bulk: `src/bulk` sends and reads them, since tonic's codecs would assemble each message.
const WITH_BULK: [&str; 4] = ["Exchange", "Read", "Checkpoint", "Call"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["proto/shard.proto", "proto/peer.proto", "proto/control.proto"];
    for f in files {
        println!("cargo:rerun-if-changed={f}");
    }
    let mut descriptors = protox::compile(files, ["proto"])?;
    for file in &mut descriptors.file {
        for service in &mut file.service {
            service.method.retain(|m| !WITH_BULK.contains(&m.name()));
        }
        file.service.retain(|s| !s.method.is_empty());
    }
    // Payloads stay `Bytes`: slices of the receive buffer, not copies.
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}

//! Compiles the protobuf definitions without needing `protoc`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(
        ["shoal", "node", "slices", "checkup", "cluster"].map(|name| format!("proto/{name}.proto")),
        ["proto"],
    )?;
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}

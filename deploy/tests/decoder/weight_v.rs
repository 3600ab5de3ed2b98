//! Reads `weight_v` folders as their format is described, as simply as can be: it has nothing of the writer.

use serde_json::Value;
use std::{collections::BTreeMap, fs, path::Path};

/// The bytes of each tensor.
pub type Tensors = BTreeMap<String, Vec<u8>>;

/// The metadata and the tensors of a file.
pub fn safetensors(path: &Path) -> (Value, Tensors) {
    let file = fs::read(path).expect("the format");
    let header = u64::from_le_bytes(file[..8].try_into().expect("the format")) as usize;
    let (json, data) = file[8..].split_at(header);
    let json: Value = serde_json::from_slice(json).expect("the format");
    let place = |v: &Value, i: usize| v["data_offsets"][i].as_u64().expect("the format") as usize;
    let tensors = json.as_object().expect("the format").iter().filter(|(name, _)| *name != "__metadata__");
    let tensors = tensors.map(|(name, v)| (name.clone(), data[place(v, 0)..place(v, 1)].to_vec())).collect();
    (json["__metadata__"].clone(), tensors)
}

/// The index of a folder.
pub fn index_of(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join("model.safetensors.index.json")).expect("the format"))
        .expect("the format")
}

/// The decoder: goes back to a full folder, applies the differences after it, checks each checksum.
pub fn decode(root: &Path, number: u64) -> Tensors {
    let folder = |n: u64| root.join(format!("weight_v{n:06}"));
    let is_delta = |n: u64| !index_of(&folder(n))["metadata"]["delta_encoding"].is_null();
    let full = (1..=number).rev().find(|n| !is_delta(*n)).expect("the format");
    let mut state = safetensors(&folder(full).join("model.safetensors")).1;
    for n in full + 1..=number {
        let metadata = index_of(&folder(n))["metadata"].clone();
        assert_eq!(metadata["version"], format!("{n:06}"));
        assert_eq!(metadata["base_version"], format!("{:06}", n - 1));
        assert_eq!(metadata["delta_encoding"], "overwrite");
        assert_eq!(metadata["compression_format"], "zstd");
        assert_eq!(metadata["checksum_format"], "blake3");
        let (checksums, changed) = safetensors(&folder(n).join("model.safetensors"));
        for (name, packed) in changed {
            // A frame that hides its length is refused by the readers of the format.
            let len =
                zstd::zstd_safe::get_frame_content_size(&packed).expect("the format").expect("the format");
            let bytes = zstd::decode_all(&packed[..]).expect("the format");
            assert_eq!(bytes.len() as u64, len);
            let word =
                |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("the format")) as usize;
            let (count, tensor) = (word(0), state.get_mut(&name).expect("the format"));
            assert_eq!(bytes.len(), 4 + 5 * count);
            for i in 0..count {
                tensor[word(4 + 4 * i)] = bytes[4 + 4 * count + i];
            }
            assert_eq!(
                blake3::hash(tensor).to_hex().as_str(),
                checksums[&name].as_str().expect("the format")
            );
        }
    }
    state
}

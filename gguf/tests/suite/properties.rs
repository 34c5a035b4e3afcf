//! Properties that hold for any file: what is written is read, cuts lose and invent nothing, damage never panics.

use cluster::LayerRange;
use gguf::cut::{CutOptions, plan_embedding, plan_slice};
use gguf::write::{Data, Writer};
use gguf::{Array, Gguf, ReadAt, TensorType, Value, model_shape};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::common::{Model, data, read};

fn value() -> impl Strategy<Value = Value> {
    let float = -1e30_f32..1e30;
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        float.clone().prop_map(Value::F32),
        float.prop_map(|x| Value::F64(x.into())),
        any::<bool>().prop_map(Value::Bool),
        vec(any::<u8>(), 0..40).prop_map(Value::String),
        array().prop_map(Value::Array),
    ]
}

fn array() -> impl Strategy<Value = Array> {
    let flat = prop_oneof![
        vec(any::<u8>(), 0..20).prop_map(Array::U8),
        vec(any::<i16>(), 0..20).prop_map(Array::I16),
        vec(any::<u32>(), 0..20).prop_map(Array::U32),
        vec(any::<i64>(), 0..20).prop_map(Array::I64),
        vec(-1e30_f32..1e30, 0..20).prop_map(Array::F32),
        vec(any::<bool>(), 0..20).prop_map(Array::Bool),
        vec(vec(any::<u8>(), 0..10), 0..10).prop_map(Array::String),
    ];
    prop_oneof![4 => flat.clone(), 1 => vec(flat, 0..4).prop_map(Array::Array)]
}

type TensorSpec = (TensorType, u64, Vec<u64>);

fn tensor() -> impl Strategy<Value = TensorSpec> {
    let kinds: Vec<TensorType> = TensorType::all().collect();
    (proptest::sample::select(kinds), 1_u64..4, vec(1_u64..4, 0..=3))
}

fn file(entries: &[(String, Value)], tensors: &[TensorSpec]) -> Vec<u8> {
    let mut writer = Writer::new();
    for (index, (key, value)) in entries.iter().enumerate() {
        writer.set(format!("{index}.{key}"), value.clone());
    }
    for (index, (kind, blocks, rest)) in tensors.iter().enumerate() {
        let dims: Vec<u64> = [&[kind.block_elements() * blocks], rest.as_slice()].concat();
        let bytes = kind.block_bytes() * blocks * rest.iter().product::<u64>();
        let data = Data::Bytes((0..bytes).map(|at| (at as u8) ^ (index as u8)).collect());
        writer.tensor(format!("t{index}"), *kind, &dims, data).unwrap();
    }
    writer.plan().unwrap().to_bytes().unwrap()
}

/// A model of any certified architecture, with per-block arrays, and cuts of it.
fn model(architecture: &str, n_layer: u32) -> Model {
    let mut model = Model::whole(architecture, n_layer);
    model.set("attention.sliding_window", 16);
    model.set("leading_dense_block_count", 1);
    model.set("feed_forward_length", Array::U32((0..n_layer).map(|block| 100 + block).collect()));
    if architecture == "gpt2" {
        model.tensor("position_embd.weight", TensorType::F32, &[64, 128]);
    }
    model
}

fn certified() -> Vec<&'static str> {
    let table = gguf::architectures::TABLE.iter();
    table.filter(|row| row.support == gguf::architectures::Support::Certified).map(|row| row.name).collect()
}

/// Reads, describes, cuts and writes, as far as the bytes allow.
fn use_all(bytes: Vec<u8>) {
    let Ok(gguf) = read(bytes) else { return };
    let Ok(shape) = model_shape(&gguf) else { return };
    for (start, end) in [(0, shape.n_layer()), (0, 1), (1, shape.n_layer())] {
        let Ok(range) = LayerRange::new(start, end) else { continue };
        if let Ok(plan) = plan_slice(&gguf, range, &CutOptions::default()) {
            plan.write_to(&mut std::io::sink(), &mut |_| {}).unwrap();
        }
    }
}

fn concatenated(model: &Gguf, ranges: &[LayerRange]) -> Vec<(String, Vec<u8>)> {
    let mut tensors = Vec::new();
    for range in ranges {
        let plan = plan_slice(model, *range, &CutOptions::default()).unwrap();
        let bytes = plan.to_bytes().unwrap();
        assert_eq!(bytes, plan.to_bytes().unwrap(), "the same input gives the same bytes");
        assert_eq!(bytes.len() as u64, plan.len());
        let slice = read(bytes).unwrap();
        for tensor in slice.tensors() {
            if let Some((block, rest)) = tensor.block() {
                let name = format!("blk.{}.{rest}", block + range.start());
                tensors.push((name, data(&slice, &tensor.name)));
            }
        }
    }
    tensors
}

proptest! {

    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn a_slice_read_from_any_offset_is_what_writing_it_gives(
        architecture in proptest::sample::select(certified()),
        at in any::<prop::sample::Index>(),
        length in any::<prop::sample::Index>(),
    ) {
        let gguf = model(architecture, 6).gguf();
        let options = CutOptions::default();
        let middle = plan_slice(&gguf, LayerRange::new(2, 4).unwrap(), &options);
        for plan in middle.into_iter().chain(plan_embedding(&gguf, &options)) {
            let whole = plan.to_bytes().unwrap();
            prop_assert_eq!(ReadAt::len(&plan), whole.len() as u64);
            prop_assert_eq!(plan.header(), &whole[..plan.header().len()]);
            let from = at.index(whole.len());
            let mut read = vec![0xAA; length.index(whole.len() - from + 1)];
            plan.read_exact_at(from as u64, &mut read).unwrap();
            prop_assert!(read == whole[from..from + read.len()]);
            let mut beyond = vec![0; whole.len() - from + 1];
            prop_assert!(plan.read_exact_at(from as u64, &mut beyond).is_err());
        }
    }

    #[test]
    fn what_is_written_is_read(
        entries in vec(("[a-z.]{1,20}", value()), 0..12),
        tensors in vec(tensor(), 0..8),
    ) {
        let bytes = file(&entries, &tensors);
        let gguf = read(bytes.clone()).unwrap();
        let found: Vec<Value> = gguf.metadata().map(|(_, value)| value.clone()).collect();
        let wanted: Vec<Value> = entries.into_iter().map(|(_, value)| value).collect();
        prop_assert_eq!(found, wanted);
        let mut again = Writer::new();
        gguf.metadata().for_each(|(key, value)| again.set(key, value.clone()));
        for tensor in gguf.tensors() {
            let data = Data::Copy { part: gguf.parts()[0].clone(), offset: tensor.offset };
            again.tensor(&*tensor.name, tensor.kind, &tensor.dims, data).unwrap();
        }
        prop_assert_eq!(again.plan().unwrap().to_bytes().unwrap(), bytes);
    }

    #[test]
    fn the_blocks_of_all_slices_are_the_blocks_of_the_model(
        architecture in proptest::sample::select(certified()),
        n_layer in 1_u32..14,
        stages in 1_u32..14,
    ) {
        let model = model(architecture, n_layer).gguf();
        let shape = model_shape(&model).unwrap();
        if let Ok(ranges) = shape.split(stages) {
            let blocks: Vec<(String, Vec<u8>)> = model
                .tensors()
                .iter()
                .filter(|tensor| tensor.block().is_some())
                .map(|tensor| (tensor.name.clone(), data(&model, &tensor.name)))
                .collect();
            prop_assert_eq!(concatenated(&model, &ranges), blocks);
        }
        let embedding = plan_embedding(&model, &CutOptions::default()).unwrap();
        prop_assert_eq!(embedding.to_bytes().unwrap().len() as u64, embedding.len());
    }

    #[test]
    fn no_damage_panics(
        architecture in proptest::sample::select(certified()),
        damage in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = model(architecture, 3).bytes();
        for (at, byte) in damage {
            // Mostly in the metadata and the tensor table, which end long before the data.
            let at = at.index(bytes.len().min(5000));
            bytes[at] = byte;
        }
        use_all(bytes);
    }

    #[test]
    fn no_bytes_panic(bytes in vec(any::<u8>(), 0..300)) {
        use_all(bytes.clone());
        use_all([b"GGUF\x03\0\0\0", bytes.as_slice()].concat());
    }
}

#[test]
fn no_single_damaged_byte_of_a_header_panics() {
    let bytes = model("gemma3", 2).bytes();
    let header = bytes.len() - gguf_data_bytes(&bytes);
    for at in 0..header {
        for byte in [0, 1, 0x7f, 0xff, bytes[at].wrapping_add(1)] {
            let mut damaged = bytes.clone();
            damaged[at] = byte;
            use_all(damaged);
        }
    }
}

/// Bytes from the first tensor's on.
fn gguf_data_bytes(bytes: &[u8]) -> usize {
    let gguf = read(bytes.to_vec()).unwrap();
    bytes.len() - gguf.tensors().iter().map(|tensor| tensor.offset).min().unwrap() as usize
}

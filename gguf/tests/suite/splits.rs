//! Field case 14: parts in any order are one model; a part that is missing, doubled, foreign or damaged is named.

use crate::common::{Model, N_EMBD, data};
use gguf::write::{Data, Writer};
use gguf::{Error, Gguf, Part, SplitError, TensorType, Value};

const NAMES: [&str; 3] =
    ["dir/m-00001-of-00003.gguf", "dir/m-00002-of-00003.gguf", "dir/m-00003-of-00003.gguf"];

/// Splits a model of two blocks into three files: vocabulary, block 0, block 1.
fn split() -> Vec<Vec<u8>> {
    let whole = Model::whole("llama", 2).gguf();
    let part_of = |name: &str| match name {
        name if name.starts_with("blk.0") => 1,
        name if name.starts_with("blk.1") => 2,
        _ => 0,
    };
    let make = |number: u16| {
        let mut writer = Writer::new();
        if number == 0 {
            whole.metadata().for_each(|(key, value)| writer.set(key, value.clone()));
        }
        writer.set("split.no", Value::U16(number));
        writer.set("split.count", Value::U16(3));
        writer.set("split.tensors.count", Value::I32(whole.tensors().len() as i32));
        for tensor in whole.tensors().iter().filter(|tensor| part_of(&tensor.name) == number) {
            let bytes = Data::Bytes(data(&whole, &tensor.name));
            writer.tensor(&*tensor.name, tensor.kind, &tensor.dims, bytes).unwrap();
        }
        writer.plan().unwrap().to_bytes().unwrap()
    };
    (0..3).map(make).collect()
}

fn parts(order: &[usize]) -> Vec<Part> {
    let all = split();
    order.iter().map(|&index| Part::new(NAMES[index], all[index].clone())).collect()
}

fn split_error(parts: Vec<Part>) -> SplitError {
    match Gguf::read(parts) {
        Err(Error::Split(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn parts_in_any_order_are_one_model() {
    let whole = Model::whole("llama", 2).gguf();
    for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
        let joined = Gguf::read(parts(&order)).unwrap();
        assert_eq!(joined.parts().iter().map(|part| &*part.name).collect::<Vec<_>>(), NAMES);
        assert!(joined.metadata().eq(whole.metadata()));
        assert_eq!(joined.tensors().len(), whole.tensors().len());
        for tensor in whole.tensors() {
            assert_eq!(data(&joined, &tensor.name), data(&whole, &tensor.name), "{}", tensor.name);
        }
        assert_eq!(gguf::model_shape(&joined).unwrap(), gguf::model_shape(&whole).unwrap());
    }
}

#[test]
fn a_missing_part_is_named() {
    let error = split_error(parts(&[2, 0]));
    let text =
        "dir/m-00001-of-00003.gguf is of a model of 3 parts, but part 2 (m-00002-of-00003.gguf) is missing";
    assert_eq!(error.to_string(), text);
    assert!(matches!(split_error(parts(&[1])), SplitError::Missing { .. }));
}

#[test]
fn a_part_given_twice_is_refused() {
    let error = split_error(parts(&[0, 1, 1, 2]));
    assert!(matches!(error, SplitError::Duplicated { number: 2, .. }), "{error}");
}

#[test]
fn a_part_of_another_model_is_refused() {
    let mut by_name = parts(&[0, 1, 2]);
    by_name[1].name = "dir/other-00002-of-00003.gguf".to_owned();
    assert!(matches!(split_error(by_name), SplitError::Foreign { .. }));

    let make = |number: u16, key: &str, value: Value, tensor: &str| {
        let mut writer = Writer::new();
        writer.set("split.no", Value::U16(number));
        writer.set("split.count", Value::U16(2));
        writer.set("split.tensors.count", Value::I32(2));
        writer.set(key, value);
        writer.tensor(tensor, TensorType::F32, &[N_EMBD], Data::Zeros).unwrap();
        Part::new(format!("part {number}"), writer.plan().unwrap().to_bytes().unwrap())
    };
    let name = |text: &str| Value::from(text);
    let by_metadata = vec![make(0, "general.name", name("a"), "x"), make(1, "general.name", name("b"), "y")];
    assert!(split_error(by_metadata).to_string().contains("general.name differs"));
    let by_tensor = vec![make(0, "general.name", name("a"), "x"), make(1, "other", name("b"), "x")];
    assert!(split_error(by_tensor).to_string().contains("tensor \"x\""));
    let by_count = vec![make(0, "split.count", Value::U16(3), "x"), make(1, "other", name("b"), "y")];
    assert!(split_error(by_count).to_string().contains("split.count differs"));
    let by_total = vec![
        make(0, "split.tensors.count", Value::I32(3), "x"),
        make(1, "split.tensors.count", Value::I32(3), "y"),
    ];
    assert!(matches!(split_error(by_total), SplitError::TensorCount { declared: 3, found: 2, .. }));
    let past_the_end = vec![make(0, "other", name("a"), "x"), make(7, "other", name("a"), "y")];
    assert!(matches!(split_error(past_the_end), SplitError::Number { number: 8, count: 2, .. }));
}

#[test]
fn a_damaged_part_is_named() {
    let all = split();
    let mut parts: Vec<Part> =
        NAMES.iter().zip(&all).map(|(name, bytes)| Part::new(*name, bytes.clone())).collect();
    parts[1] = Part::new(NAMES[1], all[1][..all[1].len() - 100].to_vec());
    let error = Gguf::read(parts).unwrap_err();
    assert!(error.to_string().starts_with(NAMES[1]), "{error}");
    assert!(error.to_string().contains("truncated"), "{error}");
}

#[test]
fn several_files_that_are_no_parts_are_refused() {
    let one = || Part::new("whole.gguf", Model::whole("llama", 1).bytes());
    assert!(matches!(split_error(vec![one(), one()]), SplitError::NotAPart { given: 2, .. }));
    assert_eq!(split_error(Vec::new()), SplitError::NoParts);
}

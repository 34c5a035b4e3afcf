//! Every way in which a file can be malformed gives an error that names the file, the offset and the field.

use crate::common::{Model, read};
use gguf::{Error, Fault};

/// A file, byte by byte.
#[derive(Default)]
struct Raw(Vec<u8>);

impl Raw {
    fn header(n_tensors: u64, n_entries: u64) -> Self {
        Self::default().bytes(b"GGUF").u32(3).u64(n_tensors).u64(n_entries)
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn u32(self, n: u32) -> Self {
        self.bytes(&n.to_le_bytes())
    }

    fn u64(self, n: u64) -> Self {
        self.bytes(&n.to_le_bytes())
    }

    fn string(self, text: &str) -> Self {
        self.u64(text.len() as u64).bytes(text.as_bytes())
    }

    fn tensor(self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        let named = self.string(name).u32(dims.len() as u32);
        dims.iter().fold(named, |raw, dim| raw.u64(*dim)).u32(kind).u64(offset)
    }

    /// The data section, after padding.
    fn data(mut self, size: usize) -> Vec<u8> {
        self.0.resize(self.0.len().next_multiple_of(32) + size, 0);
        self.0
    }
}

/// Expects an error at `offset` of a field whose name has `field` in it, and gives the fault.
fn fault(bytes: Vec<u8>, offset: u64, field: &str) -> Fault {
    match read(bytes) {
        Err(Error::Malformed { place, fault }) => {
            assert_eq!(place.file, "model.gguf");
            assert!(place.field.contains(field), "{} is not {field}", place.field);
            assert_eq!(place.offset, offset, "{fault}");
            fault
        }
        other => panic!("{other:?}"),
    }
}

/// Room for counts to be believable.
const ROOM: [u8; 256] = [0; 256];

#[test]
fn a_file_of_another_format_is_refused() {
    assert_eq!(fault(b"GGML\x03\0\0\0".to_vec(), 0, "magic"), Fault::Magic(*b"GGML"));
    let none = fault(Vec::new(), 0, "magic");
    assert_eq!(none, Fault::Truncated { needed: 4, remaining: 0 });
}

#[test]
fn only_versions_2_and_3_are_read() {
    for version in [0, 1, 4, 99] {
        let bytes = Raw::default().bytes(b"GGUF").u32(version).bytes(&ROOM).0;
        assert_eq!(fault(bytes, 4, "version"), Fault::Version(version));
    }
    let mut bytes = Model::whole("llama", 1).bytes();
    bytes[4] = 2;
    assert_eq!(read(bytes).unwrap().version(), 2);
}

#[test]
fn a_big_endian_file_is_refused_by_name() {
    let bytes = Raw::default().bytes(b"GGUF").bytes(&3_u32.to_be_bytes()).bytes(&ROOM).0;
    assert_eq!(fault(bytes, 4, "version"), Fault::BigEndian);
}

#[test]
fn counts_that_the_file_has_no_room_for_are_refused() {
    let bytes = Raw::header(u64::MAX, 0).bytes(&ROOM).0;
    assert!(matches!(fault(bytes, 8, "tensor count"), Fault::Count { count: u64::MAX, .. }));
    let bytes = Raw::header(0, 1000).bytes(&ROOM).0;
    assert!(matches!(fault(bytes, 16, "metadata count"), Fault::Count { count: 1000, .. }));
}

#[test]
fn strings_and_arrays_longer_than_the_file_are_refused() {
    let bytes = Raw::header(0, 1).string("k").u32(8).u64(u64::MAX).bytes(&ROOM).0;
    assert!(matches!(fault(bytes, 45, "value of \"k\""), Fault::Truncated { needed: u64::MAX, .. }));
    let bytes = Raw::header(0, 1).string("k").u32(9).u32(4).u64(1 << 40).bytes(&ROOM).0;
    assert!(matches!(fault(bytes, 41, "array length"), Fault::Count { count, .. } if count == 1 << 40));
    // Empty strings take eight bytes each.
    let bytes = Raw::header(0, 1).string("k").u32(9).u32(8).u64(33).bytes(&ROOM).0;
    assert!(matches!(fault(bytes, 41, "array length"), Fault::Count { most: 32, .. }));
}

#[test]
fn names_are_checked() {
    let bytes = Raw::header(0, 1).u64(0).bytes(&ROOM).0;
    assert_eq!(fault(bytes, 24, "key of metadata entry 0"), Fault::EmptyName);
    let bytes = Raw::header(0, 1).u64(70_000).bytes(&ROOM).0;
    assert!(matches!(fault(bytes, 24, "key"), Fault::LongName { length: 70_000, .. }));
    let bytes = Raw::header(0, 1).u64(2).bytes(&[0xff, 0xfe]).bytes(&ROOM).0;
    assert_eq!(fault(bytes, 24, "key"), Fault::Utf8);
    let bytes = Raw::header(1, 0).string(&"x".repeat(64)).bytes(&ROOM).0;
    assert!(matches!(fault(bytes, 24, "name of tensor 0"), Fault::LongName { most: 63, .. }));
}

#[test]
fn a_key_or_tensor_that_comes_twice_is_refused() {
    let bytes = Raw::header(0, 2).string("k").u32(0).bytes(&[1]).string("k").u32(0).bytes(&ROOM).0;
    assert_eq!(fault(bytes, 38, "key of \"k\""), Fault::Duplicate);
    let raw = Raw::header(2, 0).tensor("t", &[1], 0, 0);
    let at = raw.0.len() as u64;
    assert_eq!(fault(raw.tensor("t", &[1], 0, 32).data(64), at, "name of tensor"), Fault::Duplicate);
}

#[test]
fn unknown_types_are_refused() {
    let bytes = Raw::header(0, 1).string("k").u32(13).bytes(&ROOM).0;
    assert_eq!(fault(bytes, 33, "value type"), Fault::ValueType(13));
    let bytes = Raw::header(0, 1).string("k").u32(9).u32(77).u64(0).bytes(&ROOM).0;
    assert_eq!(fault(bytes, 37, "element type"), Fault::ValueType(77));
    let bytes = Raw::header(1, 0).tensor("t", &[32], 99, 0).data(64);
    assert_eq!(fault(bytes, 45, "type of tensor"), Fault::TensorType(99));
    let bytes = Raw::header(1, 0).tensor("t", &[32], 31, 0).data(64);
    assert_eq!(fault(bytes, 45, "type of tensor"), Fault::RemovedTensorType(31));
}

#[test]
fn a_bool_is_0_or_1() {
    let bytes = Raw::header(0, 1).string("k").u32(7).bytes(&[2]).bytes(&ROOM).0;
    assert_eq!(fault(bytes, 37, "value of \"k\""), Fault::Bool(2));
}

#[test]
fn arrays_nested_without_end_are_refused() {
    let mut raw = Raw::header(0, 1).string("k").u32(9);
    for _ in 0..100 {
        raw = raw.u32(9).u64(1);
    }
    assert_eq!(fault(raw.bytes(&ROOM).0, 33 + 4 + 4 * 12, "array of \"k\""), Fault::Depth(4));
}

#[test]
fn an_alignment_is_a_sane_power_of_two() {
    for alignment in [0, 1, 4, 33, 1 << 20, u32::MAX] {
        let bytes = Raw::header(0, 1).string("general.alignment").u32(4).u32(alignment).bytes(&ROOM).0;
        assert_eq!(fault(bytes, 24, "general.alignment"), Fault::Alignment(alignment.into()));
    }
    let bytes = Raw::header(0, 1).string("general.alignment").u32(10).u64(32).bytes(&ROOM).0;
    assert!(matches!(fault(bytes, 24, "general.alignment"), Fault::WrongType { found: "u64", .. }));
}

#[test]
fn shapes_are_checked() {
    let dimensions = |dims: &[u64], kind| Raw::header(1, 0).tensor("t", dims, kind, 0).data(256);
    assert_eq!(fault(dimensions(&[], 0), 33, "dimensions"), Fault::Dimensions(0));
    assert_eq!(fault(dimensions(&[1; 5], 0), 33, "dimensions"), Fault::Dimensions(5));
    assert_eq!(fault(dimensions(&[4, 0], 0), 45, "dimensions"), Fault::EmptyDimension(1));
    assert_eq!(fault(dimensions(&[1 << 40, 1 << 40], 0), 45, "dimensions"), Fault::Overflow);
    // The elements fit 63 bits, their bytes do not.
    assert_eq!(fault(dimensions(&[1 << 61, 1], 0), 33, "dimensions"), Fault::Overflow);
    let partial = Fault::PartialBlock { row: 33, block: 32, kind: "q4_0" };
    assert_eq!(fault(dimensions(&[33, 2], 2), 33, "dimensions"), partial);
}

#[test]
fn tensor_data_are_aligned_in_the_file_and_apart() {
    let misaligned = Raw::header(1, 0).tensor("t", &[8], 0, 8).data(64);
    let fault_of = Fault::Misaligned { offset: 8, alignment: 32 };
    assert_eq!(fault(misaligned, 49, "data offset of tensor \"t\""), fault_of);

    let truncated = Raw::header(1, 0).tensor("t", &[64], 0, 0).data(255);
    let outside = Fault::OutOfRange { start: 64, end: 320, length: 319 };
    assert_eq!(fault(truncated, 49, "data offset"), outside);

    let far = Raw::header(1, 0).tensor("t", &[8], 0, u64::MAX - 31).data(64);
    assert!(matches!(fault(far, 49, "data offset"), Fault::OutOfRange { .. }));

    let overlapping = Raw::header(2, 0).tensor("t", &[16], 0, 0).tensor("u", &[8], 0, 32).data(128);
    assert_eq!(fault(overlapping, 82, "tensor \"u\""), Fault::Overlap("t".to_owned()));
    let same = Raw::header(2, 0).tensor("t", &[8], 0, 0).tensor("u", &[8], 0, 0).data(128);
    assert!(matches!(fault(same, 82, "data offset"), Fault::Overlap(_)));
}

#[test]
fn a_file_cut_off_anywhere_is_an_error() {
    let bytes = Model::whole("llama", 2).bytes();
    for length in (0..bytes.len() - 64).step_by(7) {
        let error = read(bytes[..length].to_vec()).unwrap_err();
        assert!(error.to_string().starts_with("model.gguf, byte "), "{error}");
    }
}

#[test]
fn a_failing_disk_is_reported_with_what_was_read() {
    struct Broken;
    impl gguf::ReadAt for Broken {
        fn len(&self) -> u64 {
            1000
        }
        fn read_exact_at(&self, _: u64, _: &mut [u8]) -> std::io::Result<()> {
            Err(std::io::Error::other("the disk is gone"))
        }
    }
    let error = gguf::Gguf::read(vec![gguf::Part::new("a.gguf", Broken)]).unwrap_err();
    assert_eq!(error.to_string(), "a.gguf, byte 0: magic: reading failed: the disk is gone");
}

//! Any bytes as a blob of any form. What can be read is cut, put together and written again without loss; nothing may
//! panic, hang, or take memory that the bytes do not justify.
//!
//! The first byte is the form, the second the number of layers and where they are cut. The magic number is put in front of
//! the rest, so that counts are reached without a corpus.
#![no_main]

use bytes::Bytes;
use kv_blob::{Blob, CacheCount, CacheKind, CellForm, Form, Place, ValueForm};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let [kind, layers, rest @ ..] = input else { return };
    let form = form(*kind, *layers % 8);
    let bytes = [&0xaf14_3cd8_u32.to_le_bytes()[..], rest].concat();
    let blob = match Blob::read(bytes.into(), &form) {
        Ok(blob) => blob,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let (n, cut) = (form.layers.len(), usize::from(*layers >> 3) % (form.layers.len() + 1));
    let parts = [0..cut, cut..n].map(|range| travelled(&blob.part(range).expect("it has these layers")));
    assert_eq!(Blob::merge(parts).expect("parts of one blob"), blob);
    assert!(blob.layout().check(&blob.layout()).is_ok());
    if blob.first_position() == 0 {
        let rest = travelled(&blob.from(blob.tokens() / 2));
        assert_eq!(blob.before(rest.first_position()).followed_by(&rest).expect("they adjoin"), blob);
    }
    // As llama.cpp reads it again, if it is a whole sequence.
    if let Ok(prepared) = blob.prepare(&form, Place { slot: 1, streams: 2 }) {
        let bytes = Bytes::copy_from_slice(prepared.bytes());
        assert_eq!(Blob::read(bytes, &form).expect("what is written can be read"), blob);
    }
});

fn travelled(blob: &Blob) -> Blob {
    let bytes: Bytes = blob.pieces().expect("its own form fits").concat().into();
    Blob::read(bytes, &blob.form()).expect("what is written can be read")
}

fn form(kind: u8, layers: u8) -> Form {
    let bit = |at: u8| kind >> at & 1 == 1;
    let windows = |layer: u8| bit(0) && kind >> 3 >> (layer % 5) & 1 == 1;
    let cache = |layer| if windows(layer) { CacheKind::Window } else { CacheKind::Full };
    Form {
        layers: (0..layers).map(cache).collect(),
        caches: if bit(0) { CacheCount::Two } else { CacheCount::One },
        cells: if bit(1) { CellForm::Extended } else { CellForm::Plain },
        values: if bit(2) { ValueForm::Present } else { ValueForm::Absent },
    }
}

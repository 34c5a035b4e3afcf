//! Blobs of every form, made here byte by byte, are read, cut, put together and written again without loss; damaged ones are
//! refused, or are other blobs.

#![allow(clippy::unwrap_used, reason = "helpers of tests may, as tests may")]

use kv_blob::{Blob, BlobError, CacheCount, CacheKind, CellForm, Form, Place, ValueForm};
use proptest::prelude::*;

/// A blob as llama.cpp would write it, field by field.
#[derive(Debug, Clone)]
struct Made {
    form: Form,
    place: Place,
    tokens: u32,
    /// Positions that the sliding-window cache has.
    window: u32,
    transposed: bool,
    /// Rotates the order of the window's cells, as in a cache that has gone round.
    turn: usize,
}

impl Made {
    fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        word(&mut out, 0xaf14_3cd8);
        word(&mut out, self.place.slot);
        let full: Vec<u32> = (0..self.tokens).collect();
        self.cache(&mut out, CacheKind::Full, &full);
        if self.form.caches == CacheCount::Two {
            let mut window: Vec<u32> = (self.tokens.saturating_sub(self.window)..self.tokens).collect();
            let turn = self.turn % window.len().max(1);
            window.rotate_left(turn);
            self.cache(&mut out, CacheKind::Window, &window);
        }
        out
    }

    fn cache(&self, out: &mut Vec<u8>, kind: CacheKind, positions: &[u32]) {
        word(out, self.place.streams);
        for stream in 0..self.place.streams {
            if (self.place.streams > 1 && stream != self.place.slot) || positions.is_empty() {
                word(out, 0);
            } else {
                self.cells(out, kind, positions);
            }
        }
    }

    fn cells(&self, out: &mut Vec<u8>, kind: CacheKind, positions: &[u32]) {
        word(out, positions.len() as u32);
        for position in positions {
            word(out, *position);
            word(out, 1);
            if self.form.cells == CellForm::Extended {
                (1..=3).for_each(|number| word(out, position * 7 + number));
            }
            word(out, self.place.slot);
        }
        let layers: Vec<u32> = (0..)
            .zip(&self.form.layers)
            .filter(|(_, layer)| self.form.caches == CacheCount::One || **layer == kind)
            .map(|(layer, _)| layer)
            .collect();
        word(out, u32::from(self.transposed));
        word(out, layers.len() as u32);
        [0, 0].iter().for_each(|rotation| word(out, *rotation));
        for layer in &layers {
            word(out, 1);
            out.extend(key_bytes(*layer).to_le_bytes());
            for position in positions {
                (0..key_bytes(*layer)).for_each(|byte| out.push(content(*layer, *position, byte)));
            }
        }
        if self.form.values == ValueForm::Absent {
            return;
        }
        for layer in &layers {
            word(out, 1);
            if self.transposed {
                word(out, 2);
                word(out, 3);
                for element in 0..3 {
                    for position in positions {
                        (0..2)
                            .for_each(|byte| out.push(content(*layer, *position, 100 + element * 2 + byte)));
                    }
                }
            } else {
                out.extend(6_u64.to_le_bytes());
                for position in positions {
                    (0..6).for_each(|byte| out.push(content(*layer, *position, 100 + byte)));
                }
            }
        }
    }
}

fn word(out: &mut Vec<u8>, number: u32) {
    out.extend(number.to_le_bytes());
}

/// Layers need not be alike.
fn key_bytes(layer: u32) -> u64 {
    4 + u64::from(layer % 3)
}

fn content(layer: u32, position: u32, byte: u64) -> u8 {
    (layer * 31 + position * 7 + byte as u32 * 3) as u8
}

fn any_form() -> impl Strategy<Value = Form> {
    let kinds = prop_oneof![Just(CacheKind::Full), Just(CacheKind::Window)];
    (proptest::collection::vec(kinds, 1..7), any::<[bool; 3]>()).prop_map(
        |(mut layers, [two, extended, values])| {
            // A second cache is there for some layer; the first may be without.
            layers[0] = CacheKind::Window;
            let full = vec![CacheKind::Full; layers.len()];
            Form {
                layers: if two { layers } else { full },
                caches: if two { CacheCount::Two } else { CacheCount::One },
                cells: if extended { CellForm::Extended } else { CellForm::Plain },
                values: if values { ValueForm::Present } else { ValueForm::Absent },
            }
        },
    )
}

fn any_made() -> impl Strategy<Value = Made> {
    let place = (1_u32..6).prop_flat_map(|streams| (0..streams, Just(streams)));
    (any_form(), place, 1_u32..40, 1_u32..12, any::<bool>(), any::<usize>()).prop_map(
        |(form, (slot, streams), tokens, window, transposed, turn)| Made {
            form,
            place: Place { slot, streams },
            tokens,
            window,
            transposed,
            turn,
        },
    )
}

fn read(bytes: Vec<u8>, form: &Form) -> Result<Blob, BlobError> {
    Blob::read(bytes.into(), form)
}

/// What arrives of a blob that travels.
fn travelled(blob: &Blob) -> Blob {
    read(blob.pieces().unwrap().concat(), &blob.form()).unwrap()
}

fn prepared(blob: &Blob, made: &Made) -> Vec<u8> {
    blob.prepare(&made.form, made.place).unwrap().bytes().to_vec()
}

fn cuts_of(layers: usize, picks: &[bool]) -> Vec<std::ops::Range<usize>> {
    let mut cuts = vec![0];
    cuts.extend((1..layers).filter(|layer| picks[layer % picks.len()]));
    cuts.push(layers);
    cuts.windows(2).map(|pair| pair[0]..pair[1]).collect()
}

proptest! {
    #[test]
    fn what_is_read_is_written_byte_for_byte(mut made in any_made()) {
        made.turn = 0;
        let bytes = made.bytes();
        let blob = read(bytes.clone(), &made.form).unwrap();
        prop_assert_eq!((blob.tokens(), blob.n_layers()), (made.tokens, made.form.layers.len()));
        prop_assert_eq!(prepared(&blob, &made), bytes);
        prop_assert_eq!(travelled(&blob), blob.clone());
        prop_assert!(blob.layout().bytes(made.tokens) >= blob.data_bytes());
    }

    #[test]
    fn cells_in_any_order_are_the_same_blob(made in any_made()) {
        let sorted = Made { turn: 0, ..made.clone() };
        prop_assert_eq!(read(made.bytes(), &made.form), read(sorted.bytes(), &made.form));
    }

    #[test]
    fn a_blob_cut_anywhere_and_put_together_is_itself(made in any_made(), picks in any::<[bool; 5]>()) {
        let whole = read(made.bytes(), &made.form).unwrap();
        let cuts = cuts_of(made.form.layers.len(), &picks);
        let merged = Blob::merge(cuts.into_iter().map(|range| travelled(&whole.part(range).unwrap()))).unwrap();
        prop_assert_eq!(&merged, &whole);
        prop_assert_eq!(prepared(&merged, &made), prepared(&whole, &made));
    }

    #[test]
    fn a_recut_blob_is_what_the_other_cut_would_have_given(
        made in any_made(), one in any::<[bool; 5]>(), other in any::<[bool; 5]>(),
    ) {
        let whole = read(made.bytes(), &made.form).unwrap();
        let n = made.form.layers.len();
        let merged = Blob::merge(cuts_of(n, &one).into_iter().map(|range| whole.part(range).unwrap())).unwrap();
        for range in cuts_of(n, &other) {
            prop_assert_eq!(merged.part(range.clone()).unwrap(), whole.part(range).unwrap());
        }
    }

    #[test]
    fn positions_cut_in_two_and_put_together_are_the_blob(made in any_made(), at in any::<u32>()) {
        let whole = read(made.bytes(), &made.form).unwrap();
        let rest = travelled(&whole.from(at % made.tokens));
        let from = rest.first_position();
        prop_assert!(from <= at % made.tokens);
        let before = whole.before(from);
        prop_assert_eq!(before.tokens(), from);
        prop_assert_eq!(before.followed_by(&rest).unwrap(), whole);
        if from > 0 {
            prop_assert!(rest.prepare(&made.form, made.place).is_err(), "a sequence starts at 0");
        }
    }

    /// A slice without sliding windows has one cache, and so has one whose window is wider than any context, but as
    /// the second of two.
    #[test]
    fn layers_with_every_position_go_into_either_cache(made in any_made()) {
        let (n, tokens) = (made.form.layers.len(), made.tokens);
        let of = |kind, caches| Made {
            form: Form { layers: vec![kind; n], caches, ..made.form.clone() },
            window: tokens,
            turn: 0,
            ..made.clone()
        };
        let plain = of(CacheKind::Full, CacheCount::One);
        let wide = of(CacheKind::Window, CacheCount::Two);
        let blob = read(wide.bytes(), &wide.form).unwrap();
        prop_assert_eq!(&blob, &read(plain.bytes(), &plain.form).unwrap());
        prop_assert_eq!(prepared(&blob, &plain), plain.bytes());
        prop_assert_eq!(prepared(&blob, &wide), wide.bytes());
    }

    #[test]
    fn a_blank_blob_is_as_large_as_a_computed_one(made in any_made()) {
        let blob = read(made.bytes(), &made.form).unwrap();
        let form = blob.form();
        let first = |layer: usize| match form.layers[layer] {
            CacheKind::Full => 0,
            CacheKind::Window => made.tokens.saturating_sub(made.window),
        };
        let blank = Blob::blank(&blob.layout(), first, made.tokens);
        prop_assert_eq!((blank.form(), blank.layout()), (blob.form(), blob.layout()));
        prop_assert_eq!(travelled(&blank), blank.clone());
        prop_assert_eq!(prepared(&blank, &made).len(), made.bytes().len());
    }

    #[test]
    fn every_truncation_and_extension_is_refused(made in any_made(), at in any::<usize>()) {
        let mut bytes = made.bytes();
        let short = bytes[..at % bytes.len()].to_vec();
        prop_assert!(read(short, &made.form).is_err());
        bytes.push(0);
        let long = matches!(read(bytes, &made.form), Err(BlobError::Long { extra: 1, .. }));
        prop_assert!(long);
    }

    #[test]
    fn damaged_bytes_are_refused_or_are_another_blob(
        made in any_made(),
        damage in proptest::collection::vec((any::<usize>(), any::<u8>()), 1..5),
        other in any_form(),
    ) {
        let mut bytes = made.bytes();
        for (at, byte) in damage {
            // Half of it where the counts are.
            let range = if byte % 2 == 0 { bytes.len() } else { bytes.len().min(80) };
            bytes[at % range] = byte;
        }
        for form in [&made.form, &other] {
            match read(bytes.clone(), form) {
                Ok(blob) => prop_assert_eq!(travelled(&blob), blob),
                Err(error) => prop_assert!(!error.to_string().is_empty()),
            }
        }
    }
}

fn plain(layers: usize) -> Made {
    Made {
        form: Form {
            layers: vec![CacheKind::Full; layers],
            caches: CacheCount::One,
            cells: CellForm::Plain,
            values: ValueForm::Present,
        },
        place: Place { slot: 1, streams: 3 },
        tokens: 5,
        window: 0,
        transposed: false,
        turn: 0,
    }
}

/// The bytes with the word at `at` replaced.
fn with_word(made: &Made, at: usize, number: u32) -> Vec<u8> {
    let mut bytes = made.bytes();
    bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
    bytes
}

#[test]
fn refusals_name_what_was_read_and_where() {
    let made = plain(2);
    let refusal = |at, number| read(with_word(&made, at, number), &made.form).unwrap_err().to_string();
    assert_eq!(refusal(0, 7), "the blob begins with 0x00000007, not with 0xaf143cd8");
    assert_eq!(refusal(8, 300), "the blob counts 300 sequences, llama.cpp has at most 256");
    // After magic, sequence, streams and the empty first stream: the count of the second's cells.
    assert!(
        refusal(16, u32::MAX).starts_with("the blob ends in the cells: at byte 20 it needs 51539607540 more")
    );
    assert_eq!(refusal(20, u32::MAX), "a position is -1, but none is negative");
    assert_eq!(refusal(20, 9), "5 cells begin at position 1 and end at 9: they do not follow each other");
    assert_eq!(refusal(24, 2), "a cell's number of sequences at byte 24 is 2, but must be 1");
    let layers = 20 + 5 * 12 + 4;
    assert_eq!(refusal(layers, 3), format!("the number of layers at byte {layers} is 3, but must be 2"));
}

#[test]
fn a_huge_row_is_refused_without_room_for_it() {
    let made = plain(1);
    let row = 20 + 5 * 12 + 16 + 4;
    let mut bytes = made.bytes();
    bytes[row..row + 8].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(matches!(read(bytes, &made.form), Err(BlobError::Short { what: "keys", .. })));
    let mut bytes = made.bytes();
    bytes[row..row + 8].copy_from_slice(&0_u64.to_le_bytes());
    assert!(matches!(read(bytes, &made.form), Err(BlobError::Field { .. })));
}

#[test]
fn an_empty_slot_has_no_blob() {
    let made = Made { tokens: 0, ..plain(3) };
    assert_eq!(read(made.bytes(), &made.form).unwrap_err(), BlobError::Empty);
}

#[test]
fn layers_that_lack_early_positions_do_not_go_into_a_full_cache() {
    let form =
        Form { layers: vec![CacheKind::Full, CacheKind::Window], caches: CacheCount::Two, ..plain(2).form };
    let made = Made { form, window: 2, ..plain(2) };
    let blob = read(made.bytes(), &made.form).unwrap();
    assert_eq!(blob.form(), made.form);
    let refusal = blob.prepare(&plain(2).form, made.place).unwrap_err();
    assert_eq!(refusal.to_string(), "layer 1 begins at position 3, but its cache at 0");
}

#[test]
fn what_is_not_of_one_sequence_is_not_put_together() {
    let (one, other) = (plain(1), Made { tokens: 6, ..plain(1) });
    let parts = [&one, &other].map(|made| read(made.bytes(), &made.form).unwrap());
    let refusal = Blob::merge(parts).unwrap_err().to_string();
    assert_eq!(refusal, "parts of one blob differ in positions: 0..5 and 0..6");
    let transposed = Made { transposed: true, ..plain(1) };
    let parts = [&one, &transposed].map(|made| read(made.bytes(), &made.form).unwrap());
    assert!(
        Blob::merge(parts).unwrap_err().to_string().contains("whether values are transposed: false and true")
    );
    assert_eq!(Blob::merge([]).unwrap_err(), BlobError::Nothing);
}

#[test]
fn layouts_that_differ_are_refused_with_both_sides_named() {
    let own = read(plain(3).bytes(), &plain(3).form).unwrap().layout();
    let transposed = Made { transposed: true, ..plain(3) };
    let got = read(transposed.bytes(), &transposed.form).unwrap().layout();
    assert_eq!(
        own.check(&got).unwrap_err().to_string(),
        "parts of one blob differ in whether values are transposed: true and false"
    );
    let mut wide = plain(3).bytes();
    // The size of the first layer's keys, of which there are five rows.
    let at = 20 + 5 * 12 + 16 + 4;
    wide[at] += 1;
    wide.splice(at + 8..at + 8, [0; 5]);
    let got = read(wide, &plain(3).form).unwrap().layout();
    assert_eq!(
        own.check(&got).unwrap_err().to_string(),
        "keys of layer 0 is rows of 5 bytes of type 1, but here it is rows of 4 bytes of type 1"
    );
    assert!(own.check(&got.part(0..2)).unwrap_err().to_string().contains("number of layers: 2 and 3"));
    own.check(&own.clone()).unwrap();
}

#[test]
fn no_blob_is_written_for_a_slot_or_layers_that_are_not_there() {
    let made = plain(1);
    let blob = read(made.bytes(), &made.form).unwrap();
    let refusal = blob.prepare(&made.form, Place { slot: 3, streams: 3 }).unwrap_err();
    assert_eq!(refusal, BlobError::NoSuchSlot { slot: 3, slots: 3 });
    assert!(blob.prepare(&plain(2).form, made.place).unwrap_err().to_string().contains("1 layers"));
    assert!(blob.part(0..2).is_err());
    // One cache for all has every slot.
    blob.prepare(&made.form, Place { slot: 3, streams: 1 }).unwrap();
}

//! Any bytes as what strangers send before they are members: a join token's text, a request for a certificate, and the
//! messages of the Join service. Nothing may panic, hang, or take memory that the bytes do not justify.
//!
//! The first byte says which. Where its highest bit is set, a token's bytes are sealed with the right checksum first, so that
//! what lies behind it is reached.
#![no_main]

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use libfuzzer_sys::fuzz_target;
use prost::Message;
use protocol::certify::CheckedRequest;
use protocol::fingerprint::Fingerprint;
use protocol::membership::{Admission, Heartbeat, Newcomer};
use protocol::token::JoinToken;
use protocol::v1;

fuzz_target!(|input: &[u8]| {
    let Some((&first, rest)) = input.split_first() else { return };
    match first % 5 {
        0 => token(rest, first & 0x80 != 0),
        1 => drop(CheckedRequest::check(rest)),
        2 => drop(v1::Newcomer::decode(rest).map(|newcomer| Newcomer::check(Some(newcomer)))),
        3 => drop(v1::Admission::decode(rest).map(Admission::check)),
        _ => drop(v1::Heartbeat::decode(rest).map(Heartbeat::check)),
    }
});

fn token(bytes: &[u8], sealed: bool) {
    let text = if sealed {
        let check = &Fingerprint::of(bytes).0[..4];
        format!("shoal1-{}", URL_SAFE_NO_PAD.encode([bytes, check].concat()))
    } else {
        String::from_utf8_lossy(bytes).into_owned()
    };
    // A token that is taken is the only one with that text.
    if let Ok(token) = text.parse::<JoinToken>() {
        assert_eq!(token.to_text(), text.trim());
    }
}

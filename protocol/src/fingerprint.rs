//! Fingerprints: SHA-256 of a certificate or a public key, and what people compare of two of them.

use std::fmt;

use sha2::{Digest, Sha256};
use thiserror::Error;

/// Bytes of a pairing code: 128 bits, too many to be found by trying.
const CODE_BYTES: usize = 16;

/// Letters between two dashes of a pairing code.
const CODE_GROUP: usize = 4;

/// SHA-256 of something public.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(pub [u8; 32]);

/// A text that is no fingerprint.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is no fingerprint: 64 hexadecimal digits")]
pub struct BadFingerprint(String);

impl Fingerprint {
    /// Of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// As [`fmt::Display`] writes it.
    pub fn parse(text: &str) -> Result<Self, BadFingerprint> {
        let bad = || BadFingerprint(text.chars().take(80).collect());
        let bytes = from_hex(text).ok_or_else(bad)?;
        bytes.try_into().map(Self).map_err(|_| bad())
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What a node and whoever approves it see alike, unless somebody is between them: made of the node's key and of the CA that
/// the node was shown.
pub fn pairing_code(key: &Fingerprint, ca: &Fingerprint) -> String {
    let mut digest = Sha256::new();
    digest.update(b"shoal pairing 1");
    digest.update(key.0);
    digest.update(ca.0);
    let text = hex(&digest.finalize()[..CODE_BYTES]);
    let groups: Vec<&str> =
        (0..text.len()).step_by(CODE_GROUP).map(|start| &text[start..start + CODE_GROUP]).collect();
    groups.join("-")
}

/// Lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes of hexadecimal digits, if that is what they are.
pub fn from_hex(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_survives_its_text() {
        let fingerprint = Fingerprint::of(b"x");
        assert_eq!(Fingerprint::parse(&fingerprint.to_string()), Ok(fingerprint));
        for text in ["", "ab", &"g".repeat(64), &"a".repeat(63), &"é".repeat(32), &"+1".repeat(32)] {
            assert!(Fingerprint::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_pairing_code_tells_of_another_key_and_of_another_ca() {
        let [a, b, c] = [b"a", b"b", b"c"].map(|bytes| Fingerprint::of(bytes));
        let code = pairing_code(&a, &b);
        assert_eq!(code.len(), 8 * 4 + 7, "{code}");
        assert_ne!(code, pairing_code(&c, &b));
        assert_ne!(code, pairing_code(&a, &c));
    }
}

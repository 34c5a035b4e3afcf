//! Join tokens: what somebody who may add hosts to a cluster hands to a host. A token says where the orchestrator is, by which
//! CA it is recognised, and proves that whoever has it was invited. Knows nothing of where tokens are kept.
//!
//! The text is `shoal1-` and, in base64url: the token's id, its secret, the CA's fingerprint, when it expires, the addresses,
//! and the first bytes of the SHA-256 of all of it, so that a token that was cut off in copying is told from a wrong one.

use std::fmt;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use thiserror::Error;
use tokio_rustls::rustls::crypto;

use crate::fingerprint::{Fingerprint, from_hex, hex};
use crate::node::Address;

/// What every token begins with; another number will stand in another form's place.
const PREFIX: &str = "shoal1-";

/// Bytes of the checksum.
const CHECK: usize = 4;

/// Addresses in a token: people paste it.
pub const MOST_ADDRESSES: usize = 16;

/// Characters of the longest text that is looked at.
const LONGEST: usize = 8192;

/// Which token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenId(pub [u8; 6]);

/// What proves that a host was invited: 128 bits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TokenSecret(pub [u8; 16]);

/// An invitation to a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// Which.
    pub id: TokenId,
    /// The proof.
    pub secret: TokenSecret,
    /// Of the cluster's CA.
    pub ca: Fingerprint,
    /// Seconds since 1970.
    pub expires: u64,
    /// Where the orchestrator may be reached, the likeliest first.
    pub addresses: Vec<Address>,
}

/// Why a text is no token.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum BadToken {
    #[error("it is no join token: those begin with \"{PREFIX}\"; `shoal token create` makes one")]
    Prefix,
    #[error("it was damaged or cut off in copying: copy the whole token")]
    Damaged,
    #[error("it is no join token of a form that this shoal knows: {0}")]
    Form(&'static str),
}

/// The operating system gave no random bytes.
#[derive(Debug, Error)]
#[error("the system gives no random bytes")]
pub struct NoRandomness;

/// Fills an array with what nobody can guess.
pub fn random<const N: usize>() -> Result<[u8; N], NoRandomness> {
    let mut bytes = [0; N];
    crypto::ring::default_provider().secure_random.fill(&mut bytes).map_err(|_| NoRandomness)?;
    Ok(bytes)
}

impl TokenId {
    /// As [`fmt::Display`] writes it.
    pub fn parse(text: &str) -> Option<Self> {
        from_hex(text)?.try_into().map(Self).ok()
    }
}

impl fmt::Display for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl TokenSecret {
    /// What is kept of it: who reads that cannot join with it.
    pub fn hash(&self) -> Fingerprint {
        Fingerprint::of(&self.0)
    }
}

impl fmt::Debug for TokenSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenSecret(…)")
    }
}

impl JoinToken {
    /// The text to hand over. Addresses beyond [`MOST_ADDRESSES`] are left out.
    pub fn to_text(&self) -> String {
        let addresses = &self.addresses[..self.addresses.len().min(MOST_ADDRESSES)];
        let mut bytes = Vec::with_capacity(128);
        bytes.extend(self.id.0);
        bytes.extend(self.secret.0);
        bytes.extend(self.ca.0);
        bytes.extend(self.expires.to_be_bytes());
        // Both fit: there are few addresses, and none is longer than a DNS name and a port.
        bytes.push(addresses.len() as u8);
        for address in addresses.iter().map(ToString::to_string) {
            bytes.extend((address.len() as u16).to_be_bytes());
            bytes.extend(address.bytes());
        }
        let check = Fingerprint::of(&bytes);
        bytes.extend(&check.0[..CHECK]);
        format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes))
    }
}

impl FromStr for JoinToken {
    type Err = BadToken;

    fn from_str(text: &str) -> Result<Self, BadToken> {
        let coded = text.trim().strip_prefix(PREFIX).ok_or(BadToken::Prefix)?;
        if coded.len() > LONGEST {
            return Err(BadToken::Form("it is too long"));
        }
        let bytes = URL_SAFE_NO_PAD.decode(coded).map_err(|_| BadToken::Damaged)?;
        let (body, check) = bytes.split_at(bytes.len().saturating_sub(CHECK));
        if check.is_empty() || Fingerprint::of(body).0[..CHECK] != *check {
            return Err(BadToken::Damaged);
        }
        let mut body = Reader(body);
        let token = Self {
            id: TokenId(body.array()?),
            secret: TokenSecret(body.array()?),
            ca: Fingerprint(body.array()?),
            expires: u64::from_be_bytes(body.array()?),
            addresses: body.addresses()?,
        };
        if body.0.is_empty() { Ok(token) } else { Err(BadToken::Form("something follows the addresses")) }
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], BadToken> {
        let (taken, rest) = self.0.split_at_checked(n).ok_or(BadToken::Form("it ends too early"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], BadToken> {
        self.take(N)?.try_into().map_err(|_| BadToken::Form("it ends too early"))
    }

    fn addresses(&mut self) -> Result<Vec<Address>, BadToken> {
        let [count] = self.array()?;
        if !(1..=MOST_ADDRESSES).contains(&usize::from(count)) {
            return Err(BadToken::Form("it has no address, or too many"));
        }
        (0..count).map(|_| self.address()).collect()
    }

    fn address(&mut self) -> Result<Address, BadToken> {
        let length = u16::from_be_bytes(self.array()?);
        let text = std::str::from_utf8(self.take(length.into())?);
        let text = text.map_err(|_| BadToken::Form("an address is no text"))?;
        Address::parse(text).map_err(|_| BadToken::Form("an address is none"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn token(addresses: &[&str]) -> JoinToken {
        JoinToken {
            id: TokenId([1, 2, 3, 4, 5, 6]),
            secret: TokenSecret([7; 16]),
            ca: Fingerprint([9; 32]),
            expires: 1_800_000_000,
            addresses: addresses.iter().map(|address| Address::parse(address).unwrap()).collect(),
        }
    }

    #[test]
    fn a_token_says_what_it_is_and_never_prints_its_secret() {
        let token = token(&["10.0.0.1:8471", "[fd00::1]:8471"]);
        let text = token.to_text();
        assert!(text.starts_with("shoal1-") && text.len() < 200, "{text}");
        assert_eq!(text.parse::<JoinToken>(), Ok(token.clone()));
        assert_eq!(format!(" {text}\n").parse::<JoinToken>(), Ok(token.clone()), "as it is pasted");
        assert!(!format!("{token:?}").contains("7, 7"), "{token:?}");
        assert_eq!(TokenId::parse(&token.id.to_string()), Some(token.id));
    }

    #[test]
    fn what_is_no_token_is_refused_with_the_reason() {
        let text = token(&["desk:1"]).to_text();
        let refusal = |text: &str| text.parse::<JoinToken>().unwrap_err();
        assert_eq!(refusal("K10abc::server:1"), BadToken::Prefix);
        assert_eq!(refusal(""), BadToken::Prefix);
        assert_eq!(refusal(&text[..text.len() - 3]), BadToken::Damaged);
        assert_eq!(refusal("shoal1-"), BadToken::Damaged);
        assert_eq!(refusal(&format!("shoal1-{}", "A".repeat(9000))), BadToken::Form("it is too long"));
        assert!(
            matches!(refusal(&token(&[]).to_text()), BadToken::Form(reason) if reason.contains("no address"))
        );
    }

    #[test]
    fn random_bytes_differ() {
        assert_ne!(random::<16>().unwrap(), random::<16>().unwrap());
    }

    prop_compose! {
        fn tokens()(
            id in any::<[u8; 6]>(),
            secret in any::<[u8; 16]>(),
            ca in any::<[u8; 32]>(),
            expires in any::<u64>(),
            addresses in proptest::collection::vec(("[a-z0-9.-]{1,60}", 1_u16..), 1..=MOST_ADDRESSES),
        ) -> JoinToken {
            let address = |(host, port): &(String, u16)| Address::parse(&format!("{host}:{port}")).unwrap();
            let addresses = addresses.iter().map(address).collect();
            JoinToken { id: TokenId(id), secret: TokenSecret(secret), ca: Fingerprint(ca), expires, addresses }
        }
    }

    proptest! {
        #[test]
        fn every_token_survives_its_text(token in tokens()) {
            prop_assert_eq!(token.to_text().parse::<JoinToken>(), Ok(token));
        }

        #[test]
        fn one_wrong_character_is_noticed(token in tokens(), at in any::<prop::sample::Index>(), to in "[A-Za-z0-9_-]") {
            let text = token.to_text();
            let at = PREFIX.len() + at.index(text.len() - PREFIX.len());
            let mut other = text.clone();
            other.replace_range(at..=at, &to);
            // Where the last character's unused bits are all that differs, nothing is wrong; base64 refuses those.
            prop_assert!(other == text || other.parse::<JoinToken>().is_err());
        }

        #[test]
        fn any_text_is_a_token_or_refused(text in "\\PC{0,80}", bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut sealed = bytes.clone();
            sealed.extend(&Fingerprint::of(&bytes).0[..CHECK]);
            let sealed = format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(sealed));
            for text in [text.clone(), format!("{PREFIX}{text}"), sealed] {
                if let Ok(token) = text.parse::<JoinToken>() {
                    prop_assert_eq!(token.to_text(), text.trim());
                }
            }
        }
    }
}

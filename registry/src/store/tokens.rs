//! Tokens. Of a secret, only its hash is kept.

use protocol::token::{TokenId, TokenSecret};
use rusqlite::{OptionalExtension, Row, Transaction};
use subtle::ConstantTimeEq;
use thiserror::Error;

use super::{Result, Store, events};
use crate::error::RegistryError;
use crate::event::EventKind;
use crate::member::TokenRecord;
use crate::timestamp::Timestamp;

/// A token that lets nobody in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(crate) enum TokenRefusal {
    /// Unknown, or with another secret: nobody learns which.
    #[error("the token is not one of this cluster")]
    Wrong,
    #[error("the token expired at {0}: ask for a new one")]
    Expired(Timestamp),
    #[error("the token was revoked at {0}: ask for a new one")]
    Revoked(Timestamp),
}

impl Store {
    /// Keeps a new token.
    pub(crate) fn add_token(&self, token: &TokenRecord, secret: &TokenSecret) -> Result<()> {
        self.change(|transaction| {
            let sql = "INSERT INTO tokens (id, secret_hash, made, expires) VALUES (?1, ?2, ?3, ?4)";
            let TokenRecord { id, made, expires, .. } = token;
            transaction.execute(sql, (id.0, secret.hash().0, made.0 as i64, expires.0 as i64))?;
            let text = format!("token {id} was made; it expires at {expires}");
            events::add(transaction, EventKind::TokenMade, None, &text)
        })
    }

    /// All tokens, the newest first.
    pub(crate) fn tokens(&self) -> Result<Vec<TokenRecord>> {
        let connection = self.lock();
        let mut query = connection
            .prepare("SELECT id, made, expires, revoked, uses FROM tokens ORDER BY made DESC, id")?;
        let tokens = query.query_map([], read)?.collect::<rusqlite::Result<_>>()?;
        Ok(tokens)
    }

    /// From now on it lets nobody in.
    pub(crate) fn revoke_token(&self, id: TokenId, now: Timestamp) -> Result<()> {
        self.change(|transaction| {
            let sql = "UPDATE tokens SET revoked = ?2 WHERE id = ?1 AND revoked IS NULL";
            let changed = transaction.execute(sql, (id.0, now.0 as i64))?;
            let sql = "SELECT 1 FROM tokens WHERE id = ?1";
            let known = transaction.query_row(sql, [id.0], |_| Ok(())).optional()?;
            known.ok_or_else(|| RegistryError::NoToken(id.to_string()))?;
            if changed == 0 {
                return Ok(());
            }
            events::add(transaction, EventKind::TokenRevoked, None, &format!("token {id} was revoked"))
        })
    }

    /// Whether a token lets its bearer in.
    pub(crate) fn check_token(
        &self,
        id: TokenId,
        secret: &TokenSecret,
        now: Timestamp,
    ) -> Result<std::result::Result<(), TokenRefusal>> {
        let connection = self.lock();
        let mut query = connection
            .prepare("SELECT id, made, expires, revoked, uses, secret_hash FROM tokens WHERE id = ?1")?;
        let found = query.query_row([id.0], |row| Ok((read(row)?, row.get::<_, [u8; 32]>(5)?))).optional()?;
        // The same work for an unknown token as for a known one.
        let hash = found.as_ref().map_or([0; 32], |(_, hash)| *hash);
        let right = bool::from(hash.ct_eq(&secret.hash().0));
        Ok(match found {
            Some((token, _)) if right => usable(&token, now),
            _ => Err(TokenRefusal::Wrong),
        })
    }
}

/// Counts a host that joined with a token.
pub(super) fn used(transaction: &Transaction<'_>, id: TokenId) -> Result<()> {
    transaction.execute("UPDATE tokens SET uses = uses + 1 WHERE id = ?1", [id.0])?;
    Ok(())
}

fn usable(token: &TokenRecord, now: Timestamp) -> std::result::Result<(), TokenRefusal> {
    match token.revoked {
        Some(at) => Err(TokenRefusal::Revoked(at)),
        None if token.expires <= now => Err(TokenRefusal::Expired(token.expires)),
        None => Ok(()),
    }
}

fn read(row: &Row<'_>) -> rusqlite::Result<TokenRecord> {
    Ok(TokenRecord {
        id: TokenId(row.get(0)?),
        made: Timestamp(row.get::<_, i64>(1)?.unsigned_abs()),
        expires: Timestamp(row.get::<_, i64>(2)?.unsigned_abs()),
        revoked: row.get::<_, Option<i64>>(3)?.map(|at| Timestamp(at.unsigned_abs())),
        uses: row.get(4)?,
    })
}

/// What the database shows of a secret, for tests.
#[cfg(test)]
fn hash_of(store: &Store, id: TokenId) -> protocol::fingerprint::Fingerprint {
    let sql = "SELECT secret_hash FROM tokens WHERE id = ?1";
    protocol::fingerprint::Fingerprint(store.lock().query_row(sql, [id.0], |row| row.get(0)).unwrap())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TestStore;

    const NOW: Timestamp = Timestamp(1_800_000_000);
    const SECRET: TokenSecret = TokenSecret([3; 16]);

    fn token(number: u8) -> TokenRecord {
        let (made, expires) = (NOW, Timestamp(NOW.0 + 100));
        TokenRecord { id: TokenId([number; 6]), made, expires, revoked: None, uses: 0 }
    }

    // Field case 31.
    #[test]
    fn case_31_a_token_that_is_wrong_expired_or_revoked_is_refused_with_the_reason() {
        let store = TestStore::new();
        for number in [1, 2] {
            store.add_token(&token(number), &SECRET).unwrap();
        }
        let check = |number, secret, at| store.check_token(TokenId([number; 6]), &secret, at).unwrap();
        assert_eq!(check(1, SECRET, NOW), Ok(()));
        assert_eq!(check(1, TokenSecret([4; 16]), NOW), Err(TokenRefusal::Wrong));
        assert_eq!(check(9, SECRET, NOW), Err(TokenRefusal::Wrong));
        let late = Timestamp(NOW.0 + 100);
        assert_eq!(check(1, SECRET, late), Err(TokenRefusal::Expired(late)));
        assert_eq!(
            check(1, TokenSecret([4; 16]), late),
            Err(TokenRefusal::Wrong),
            "nothing is told to a guess"
        );
        store.revoke_token(TokenId([1; 6]), Timestamp(NOW.0 + 5)).unwrap();
        store.revoke_token(TokenId([1; 6]), Timestamp(NOW.0 + 9)).unwrap();
        assert_eq!(check(1, SECRET, NOW), Err(TokenRefusal::Revoked(Timestamp(NOW.0 + 5))));
        assert_eq!(check(2, SECRET, NOW), Ok(()), "another token was revoked");
        let unknown = store.revoke_token(TokenId([9; 6]), NOW).unwrap_err();
        assert!(unknown.is_unknown_name(), "{unknown}");
        let revoked = store.events_after(0, 100).unwrap();
        assert_eq!(revoked.iter().filter(|event| event.kind == EventKind::TokenRevoked).count(), 1);
    }

    #[test]
    fn a_secret_is_not_kept() {
        let store = TestStore::new();
        store.add_token(&token(1), &SECRET).unwrap();
        assert_eq!(hash_of(&store, TokenId([1; 6])), SECRET.hash());
        let bytes = [
            std::fs::read(store.path()).unwrap(),
            std::fs::read(store.path().with_extension("db-wal")).unwrap(),
        ];
        assert!(!bytes.concat().windows(16).any(|window| window == SECRET.0));
    }
}

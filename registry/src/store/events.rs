//! Events, of which the newest are kept.

use std::time::{SystemTime, UNIX_EPOCH};

use rusqlite::Transaction;
use serde_json::Value;

use super::{Result, Store, content};
use crate::event::{Event, EventKind};

/// Years of a quiet cluster. Whoever makes events on purpose drives out others, and fills no disk.
const MOST: u32 = 10_000;

impl Store {
    /// Tells of something.
    pub(crate) fn tell(&self, kind: EventKind, node: Option<&str>, text: &str) -> Result<()> {
        self.change(|transaction| add(transaction, kind, node, text))
    }

    /// The same with numbers for programs.
    pub(crate) fn tell_with(&self, kind: EventKind, text: &str, facts: &Value) -> Result<()> {
        self.change(|transaction| {
            add(transaction, kind, None, text)?;
            let sql = "UPDATE events SET facts = ?1 WHERE id = (SELECT max(id) FROM events)";
            transaction.execute(sql, [facts.to_string()])?;
            Ok(())
        })
    }

    /// Events with ids above one, the oldest first.
    pub(crate) fn events_after(&self, id: u64, limit: u32) -> Result<Vec<Event>> {
        let connection = self.lock();
        let sql = "SELECT id, at, kind, node, text, facts FROM events WHERE id > ?1 ORDER BY id LIMIT ?2";
        let mut query = connection.prepare(sql)?;
        let rows = query.query_map((i64::try_from(id).unwrap_or(i64::MAX), limit), |row| {
            let (id, at): (i64, i64) = (row.get(0)?, row.get(1)?);
            let (kind, facts): (String, Option<String>) = (row.get(2)?, row.get(5)?);
            Ok((id.unsigned_abs(), at.unsigned_abs(), kind, row.get(3)?, row.get(4)?, facts))
        })?;
        rows.map(|row| {
            let (id, at_ms, kind, node, text, facts) = row?;
            let kind = kind.parse().map_err(|error| content("an event", error))?;
            let facts = facts.map(|facts| serde_json::from_str(&facts)).transpose();
            let facts = facts.map_err(|error| content("an event", error))?;
            Ok(Event { id, at_ms, kind, node, text, facts })
        })
        .collect()
    }

    /// The id of the newest event, 0 if there is none.
    pub(crate) fn last_event(&self) -> Result<u64> {
        let sql = "SELECT coalesce(max(id), 0) FROM events";
        Ok(self.lock().query_row(sql, [], |row| row.get::<_, i64>(0))?.unsigned_abs())
    }
}

/// The same as a part of a change.
pub(super) fn add(
    transaction: &Transaction<'_>,
    kind: EventKind,
    node: Option<&str>,
    text: &str,
) -> Result<()> {
    let at = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64);
    let sql = "INSERT INTO events (at, kind, node, text) VALUES (?1, ?2, ?3, ?4)";
    transaction.execute(sql, (at, kind.as_str(), node, text))?;
    let sql = "DELETE FROM events WHERE id <= (SELECT max(id) FROM events) - ?1";
    transaction.execute(sql, [MOST])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TestStore;

    #[test]
    fn events_come_in_order_from_where_one_left_off() {
        let store = TestStore::new();
        assert_eq!(store.last_event().unwrap(), 0);
        for number in 0..5 {
            store.tell(EventKind::NodeHere, Some("a"), &number.to_string()).unwrap();
        }
        let texts = |after, limit| -> Vec<String> {
            store.events_after(after, limit).unwrap().into_iter().map(|event| event.text).collect()
        };
        assert_eq!(texts(0, 100), ["0", "1", "2", "3", "4"]);
        let third = store.events_after(0, 3).unwrap().last().unwrap().id;
        assert_eq!(texts(third, 100), ["3", "4"]);
        assert_eq!(store.last_event().unwrap(), third + 2);
        assert!(texts(u64::MAX, 1).is_empty());
    }

    #[test]
    fn an_event_keeps_its_numbers() {
        let store = TestStore::new();
        let facts = serde_json::json!({ "gain_s": 1.5 });
        store.tell(EventKind::NodeHere, None, "without").unwrap();
        store.tell_with(EventKind::Adapted, "with", &facts).unwrap();
        let kept = store.events_after(0, 10).unwrap();
        assert_eq!((kept[0].facts.as_ref(), kept[1].facts.as_ref()), (None, Some(&facts)));
    }

    #[test]
    fn old_events_make_room() {
        let store = TestStore::new();
        let many = format!(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {}) \
             INSERT INTO events (at, kind, text) SELECT 0, 'node_here', '' FROM n",
            MOST + 50
        );
        store.lock().execute_batch(&many).unwrap();
        store.tell(EventKind::NodeAway, None, "last").unwrap();
        let kept = store.events_after(0, u32::MAX).unwrap();
        assert_eq!((kept.len(), kept.last().unwrap().text.as_str()), (MOST as usize, "last"));
    }
}

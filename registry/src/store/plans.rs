//! Plans, which of them is desired, and the count of epochs.

use rusqlite::{OptionalExtension, Row, Transaction};

use super::events::add;
use super::{Result, Store, content};
use crate::error::RegistryError;
use crate::event::EventKind;
use crate::plan::{DeploymentRecord, NewPlan, PlanRecord};
use crate::timestamp::Timestamp;

/// Plans that are kept. A cluster whose nodes come and go makes one each time.
const MOST_PLANS: u32 = 1000;

/// The setting with the number of epochs that were given away.
const EPOCHS: &str = "epochs";

const PLAN: &str = "SELECT id, made, model, origin, plan FROM plans";

const DEPLOYMENT: &str = "SELECT id, at, plan, reason FROM deployments";

impl Store {
    /// Keeps a plan and gives its id.
    pub(crate) fn add_plan(&self, plan: &NewPlan<'_>, told: &str) -> Result<u64> {
        self.change(|transaction| {
            let sql = "INSERT INTO plans (made, model, origin, plan) VALUES (?1, ?2, ?3, ?4)";
            let made = Timestamp::now().0 as i64;
            transaction.execute(sql, (made, plan.model, plan.origin.as_str(), plan.plan))?;
            let id = transaction.last_insert_rowid().unsigned_abs();
            add(transaction, EventKind::PlanMade, None, &format!("plan {id} ({}): {told}", plan.origin))?;
            forget_old(transaction)?;
            Ok(id)
        })
    }

    /// All plans, the newest first.
    pub(crate) fn plans(&self) -> Result<Vec<PlanRecord>> {
        let connection = self.lock();
        let mut query = connection.prepare(&format!("{PLAN} ORDER BY id DESC"))?;
        let rows = query.query_map([], plan_row)?;
        rows.map(|row| read_plan(row?)).collect()
    }

    /// One of them.
    pub(crate) fn plan(&self, id: u64) -> Result<PlanRecord> {
        let sql = format!("{PLAN} WHERE id = ?1");
        let row = self.lock().query_row(&sql, [i64::try_from(id).unwrap_or(-1)], plan_row).optional()?;
        read_plan(row.ok_or(RegistryError::NoPlan(id))?)
    }

    /// Lets a plan be desired from now on, and gives the number of that decision.
    pub(crate) fn deploy(&self, plan: u64, reason: &str) -> Result<u64> {
        self.change(|transaction| {
            let id = i64::try_from(plan).unwrap_or(-1);
            let known = "SELECT 1 FROM plans WHERE id = ?1";
            let known = transaction.query_row(known, [id], |_| Ok(())).optional()?;
            known.ok_or(RegistryError::NoPlan(plan))?;
            let sql = "INSERT INTO deployments (at, plan, reason) VALUES (?1, ?2, ?3)";
            transaction.execute(sql, (Timestamp::now().0 as i64, id, reason))?;
            let deployment = transaction.last_insert_rowid().unsigned_abs();
            add(transaction, EventKind::PlanDesired, None, &format!("plan {plan} is desired: {reason}"))?;
            Ok(deployment)
        })
    }

    /// The newest decisions first, at most so many.
    pub(crate) fn deployments(&self, limit: u32) -> Result<Vec<DeploymentRecord>> {
        let connection = self.lock();
        let mut query = connection.prepare(&format!("{DEPLOYMENT} ORDER BY id DESC LIMIT ?1"))?;
        let rows = query.query_map([limit], |row| {
            let (id, at, plan): (i64, i64, i64) = (row.get(0)?, row.get(1)?, row.get(2)?);
            Ok(DeploymentRecord {
                id: id.unsigned_abs(),
                at: Timestamp(at.unsigned_abs()),
                plan: plan.unsigned_abs(),
                reason: row.get(3)?,
            })
        })?;
        rows.map(|row| Ok(row?)).collect()
    }

    /// Takes so many epochs, which nobody is given again, and gives the first.
    pub(crate) fn take_epochs(&self, count: u64) -> Result<u64> {
        self.change(|transaction| {
            let sql = "SELECT value FROM settings WHERE name = ?1";
            let taken: Option<String> = transaction.query_row(sql, [EPOCHS], |row| row.get(0)).optional()?;
            let taken = taken.map_or(Ok(0), |text| text.parse::<u64>());
            let taken = taken.map_err(|error| content("the count of epochs", error))?;
            let sql = "INSERT INTO settings (name, value) VALUES (?1, ?2) \
                       ON CONFLICT (name) DO UPDATE SET value = excluded.value";
            transaction.execute(sql, (EPOCHS, taken.saturating_add(count).to_string()))?;
            Ok(taken + 1)
        })
    }
}

/// Those that are or were desired of late stay.
fn forget_old(transaction: &Transaction<'_>) -> Result<()> {
    let recent = "SELECT plan FROM (SELECT plan FROM deployments ORDER BY id DESC LIMIT 100)";
    let old = format!("id <= (SELECT max(id) FROM plans) - ?1 AND id NOT IN ({recent})");
    let forgotten = format!("SELECT id FROM plans WHERE {old}");
    transaction.execute(&format!("DELETE FROM deployments WHERE plan IN ({forgotten})"), [MOST_PLANS])?;
    transaction.execute(&format!("DELETE FROM plans WHERE {old}"), [MOST_PLANS])?;
    Ok(())
}

type PlanRow = (i64, i64, String, String, String);

fn plan_row(row: &Row<'_>) -> rusqlite::Result<PlanRow> {
    Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?))
}

fn read_plan((id, made, model, origin, plan): PlanRow) -> Result<PlanRecord> {
    let origin = origin.parse().map_err(|error| content("a plan", error))?;
    Ok(PlanRecord { id: id.unsigned_abs(), made: Timestamp(made.unsigned_abs()), model, origin, plan })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::PlanOrigin;
    use crate::testing::TestStore;

    fn new(plan: &str) -> NewPlan<'_> {
        NewPlan { model: "ab", origin: PlanOrigin::Given, plan }
    }

    #[test]
    fn plans_are_kept_as_they_were_given_and_one_is_desired_at_a_time() {
        let store = TestStore::new();
        let ids = ["{}", "{\"a\": 1}"].map(|plan| store.add_plan(&new(plan), "two replicas").unwrap());
        let kept = store.plans().unwrap();
        assert_eq!(kept.iter().map(|plan| plan.id).collect::<Vec<_>>(), [ids[1], ids[0]]);
        assert_eq!((kept[0].plan.as_str(), kept[0].origin), ("{\"a\": 1}", PlanOrigin::Given));
        assert_eq!(store.plan(ids[0]).unwrap(), kept[1]);
        assert!(store.deployments(1).unwrap().is_empty());
        for (plan, reason) in [(ids[0], "first"), (ids[1], "second"), (ids[0], "back")] {
            store.deploy(plan, reason).unwrap();
        }
        let history = store.deployments(2).unwrap();
        assert_eq!(
            history.iter().map(|one| (one.plan, one.reason.as_str())).collect::<Vec<_>>(),
            [(ids[0], "back"), (ids[1], "second")]
        );
        for nobody in [0, 77, u64::MAX] {
            assert!(store.deploy(nobody, "x").unwrap_err().is_unknown_name());
            assert!(store.plan(nobody).unwrap_err().is_unknown_name());
        }
        let kinds = store.events_after(0, 100).unwrap();
        let kinds: Vec<&str> = kinds.iter().map(|event| event.kind.as_str()).collect();
        assert_eq!(kinds, ["plan_made", "plan_made", "plan_desired", "plan_desired", "plan_desired"]);
    }

    #[test]
    fn old_plans_make_room_and_those_that_were_desired_of_late_do_not() {
        let store = TestStore::new();
        let first = store.add_plan(&new("{}"), "x").unwrap();
        let second = store.add_plan(&new("{}"), "x").unwrap();
        store.deploy(first, "x").unwrap();
        let many = format!(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {MOST_PLANS}) \
             INSERT INTO plans (made, model, origin, plan) SELECT 0, 'ab', 'given', '' FROM n"
        );
        store.lock().execute_batch(&many).unwrap();
        store.add_plan(&new("{}"), "x").unwrap();
        assert!(store.plan(first).is_ok());
        assert!(store.plan(second).is_err());
    }

    #[test]
    fn an_epoch_is_given_once_whoever_asks() {
        let ours = TestStore::new();
        let theirs = Store::open(ours.path()).unwrap();
        assert_eq!(ours.take_epochs(64).unwrap(), 1);
        assert_eq!(theirs.take_epochs(1).unwrap(), 65);
        assert_eq!(ours.take_epochs(64).unwrap(), 66);
    }
}

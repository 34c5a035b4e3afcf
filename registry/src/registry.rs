//! The registry as others use it: one handle over the folder's keys and database, and over who is there.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use protocol::fingerprint::{Fingerprint, hex};
use protocol::node::Address;
use protocol::tls::{ClusterCa, TlsIdentity};
use protocol::token::{JoinToken, TokenId, TokenSecret, random};
use protocol::trust::{self, Audience};
use subtle::ConstantTimeEq;
use tokio::sync::watch;
use uuid::Uuid;

use crate::error::RegistryError;
use crate::event::{Event, EventKind};
use crate::member::{MemberState, NodeRecord, TokenRecord};
use crate::plan::{DeploymentRecord, NewPlan, PlanRecord};
use crate::presence::{Presence, Present, PresentNodes};
use crate::store::Store;
use crate::timestamp::Timestamp;

const DATABASE: &str = "cluster.db";
const ADMIN_KEY: &str = "admin-key";
const LOCK: &str = ".lock";

type Result<T> = std::result::Result<T, RegistryError>;

/// Who is a member. Clones are handles of the same one.
#[derive(Debug, Clone)]
pub struct Registry(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    ca: ClusterCa,
    fingerprint: Fingerprint,
    admin_key: String,
    store: Store,
    presence: Presence,
}

/// A node as it is known, and as it is there.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    /// What is kept.
    pub record: NodeRecord,
    /// What it says now, if it is there.
    pub present: Option<Present>,
}

impl Registry {
    /// Opens the folder, and founds the cluster if it is new.
    pub fn open(folder: &Path) -> Result<Self> {
        trust::make_private(folder)?;
        // Two commands that open a new folder at once found one cluster.
        let _lock = lock(&folder.join(LOCK))?;
        let ca = trust::open_or_found(folder)?;
        let admin_key = admin_key(&folder.join(ADMIN_KEY))?;
        let store = Store::open(&folder.join(DATABASE))?;
        let fingerprint = ca.fingerprint()?;
        Ok(Self(Arc::new(Inner { ca, fingerprint, admin_key, store, presence: Presence::new() })))
    }

    /// Opens the folder of a cluster that was founded; none is founded by looking for one.
    pub fn open_existing(folder: &Path) -> Result<Self> {
        if !folder.join(DATABASE).exists() {
            return Err(RegistryError::NoCluster(folder.to_owned()));
        }
        Self::open(folder)
    }

    /// Of the cluster's CA.
    pub fn fingerprint(&self) -> Fingerprint {
        self.0.fingerprint
    }

    /// Whether it is what the admin API asks for.
    pub fn is_admin_key(&self, given: &str) -> bool {
        // Of hashes, so that the time tells nothing, not even the length.
        Fingerprint::of(given.as_bytes()).0.ct_eq(&Fingerprint::of(self.0.admin_key.as_bytes()).0).into()
    }

    /// What the admin API asks for.
    pub fn admin_key(&self) -> &str {
        &self.0.admin_key
    }

    /// An identity of a process that has the CA's key at hand. It does not expire: whoever could steal it could as well
    /// steal the key.
    pub fn own_identity(&self, name: &str) -> Result<TlsIdentity> {
        Ok(self.0.ca.issue(name)?)
    }

    /// Makes a token; its text is had here and never again.
    pub fn make_token(&self, life: Duration, addresses: Vec<Address>) -> Result<JoinToken> {
        let (id, secret) = (TokenId(random()?), TokenSecret(random()?));
        let made = Timestamp::now();
        let expires = made.after(life);
        self.0.store.add_token(&TokenRecord { id, made, expires, revoked: None, uses: 0 }, &secret)?;
        Ok(JoinToken { id, secret, ca: self.0.fingerprint, expires: expires.0, addresses })
    }

    /// All tokens, the newest first.
    pub fn tokens(&self) -> Result<Vec<TokenRecord>> {
        self.0.store.tokens()
    }

    /// Lets a token admit nobody any more.
    pub fn revoke_token(&self, id: &str) -> Result<()> {
        let token = TokenId::parse(id).ok_or_else(|| RegistryError::NoToken(id.to_owned()))?;
        self.0.store.revoke_token(token, Timestamp::now())
    }

    /// All nodes that are or were known, by name.
    pub fn members(&self) -> Result<Vec<Member>> {
        let present = self.0.presence.watch().borrow().clone();
        let member = |record: NodeRecord| Member { present: present.get(&record.id).cloned(), record };
        Ok(self.0.store.nodes()?.into_iter().map(member).collect())
    }

    /// A node, named by its name, its id or the start of that.
    pub fn member(&self, node: &str) -> Result<Member> {
        let id = self.find(node)?;
        let record = self.0.store.node(&id)?.ok_or_else(|| RegistryError::NoNode(node.to_owned()))?;
        Ok(Member { present: self.0.presence.watch().borrow().get(&id).cloned(), record })
    }

    /// To be told when a node comes, goes or changes.
    pub fn watch_presence(&self) -> watch::Receiver<PresentNodes> {
        self.0.presence.watch()
    }

    /// Makes a node a member that waits for it; named by its name, its id or the start of that.
    pub fn approve(&self, node: &str) -> Result<NodeRecord> {
        self.0.store.approve(&self.find(node)?)
    }

    /// Makes a node no member any more.
    pub fn remove(&self, node: &str) -> Result<NodeRecord> {
        self.0.store.remove(&self.find(node)?)
    }

    /// Events with ids above one, the oldest first.
    pub fn events_after(&self, id: u64, limit: u32) -> Result<Vec<Event>> {
        self.0.store.events_after(id, limit)
    }

    /// The id of the newest event.
    pub fn last_event(&self) -> Result<u64> {
        self.0.store.last_event()
    }

    /// Tells of something that is not about one node.
    pub fn tell(&self, kind: EventKind, text: &str) -> Result<()> {
        self.0.store.tell(kind, None, text)
    }

    /// The same with numbers for programs.
    pub fn tell_with(&self, kind: EventKind, text: &str, facts: &serde_json::Value) -> Result<()> {
        self.0.store.tell_with(kind, text, facts)
    }

    /// Keeps a plan and gives its id; `told` says in short what is in it.
    pub fn add_plan(&self, plan: &NewPlan<'_>, told: &str) -> Result<u64> {
        self.0.store.add_plan(plan, told)
    }

    /// All plans, the newest first.
    pub fn plans(&self) -> Result<Vec<PlanRecord>> {
        self.0.store.plans()
    }

    /// One of them.
    pub fn plan(&self, id: u64) -> Result<PlanRecord> {
        self.0.store.plan(id)
    }

    /// Lets a plan be desired from now on, and gives the number of that decision.
    pub fn deploy(&self, plan: u64, reason: &str) -> Result<u64> {
        self.0.store.deploy(plan, reason)
    }

    /// Which plans were desired, the newest decision first, at most so many.
    pub fn deployments(&self, limit: u32) -> Result<Vec<DeploymentRecord>> {
        self.0.store.deployments(limit)
    }

    /// Takes so many epochs, which nobody is given again, also after a restart; gives the first.
    pub fn take_epochs(&self, count: u64) -> Result<u64> {
        self.0.store.take_epochs(count)
    }

    /// Where the orchestrator was reached when it last ran.
    pub fn addresses(&self) -> Result<Vec<Address>> {
        self.0.store.addresses()
    }

    pub(crate) fn ca(&self) -> &ClusterCa {
        &self.0.ca
    }

    pub(crate) fn store(&self) -> &Store {
        &self.0.store
    }

    pub(crate) fn presence(&self) -> &Presence {
        &self.0.presence
    }

    /// Does something that may wait for the disk, away from the threads of connections.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let registry = self.clone();
        let done = tokio::task::spawn_blocking(move || work(&registry)).await;
        done.unwrap_or_else(|error| Err(RegistryError::CutOff(error.to_string())))
    }

    fn find(&self, node: &str) -> Result<Uuid> {
        let nodes = self.0.store.nodes()?;
        let live = |record: &&NodeRecord| record.state != MemberState::Left;
        if let Some(named) = nodes.iter().filter(live).find(|record| record.name.0 == node) {
            return Ok(named.id);
        }
        let is_start = |record: &&NodeRecord| !node.is_empty() && record.id.to_string().starts_with(node);
        let found: Vec<Uuid> = nodes.iter().filter(is_start).map(|record| record.id).collect();
        match found[..] {
            [id] => Ok(id),
            [] => Err(RegistryError::NoNode(node.to_owned())),
            _ => Err(RegistryError::SeveralNodes {
                start: node.to_owned(),
                ids: found.iter().map(Uuid::to_string).collect(),
            }),
        }
    }
}

/// Held until the returned file is dropped.
fn lock(path: &Path) -> Result<std::fs::File> {
    let failed = |source| RegistryError::Folder { doing: "locking", path: path.to_owned(), source };
    let file = std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(path);
    let file = file.map_err(failed)?;
    fs4::FileExt::lock(&file).map_err(failed)?;
    Ok(file)
}

fn admin_key(path: &Path) -> Result<String> {
    if !path.exists() {
        trust::write_new(path, &format!("{}\n", hex(&random::<32>()?)), Audience::Owner)?;
    }
    Ok(trust::read_text(path)?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Asking, Verdict};
    use crate::testing::newcomer;

    #[test]
    fn a_cluster_is_founded_once_and_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state/cluster");
        assert!(Registry::open_existing(&path).unwrap_err().to_string().contains("no cluster"));
        assert!(!path.exists());
        let first = Registry::open(&path).unwrap();
        let token = first.make_token(Duration::from_secs(60), Vec::new()).unwrap();
        let again = Registry::open(&path).unwrap();
        assert_eq!(again.fingerprint(), first.fingerprint());
        assert_eq!(again.admin_key(), first.admin_key());
        assert_eq!(again.tokens().unwrap()[0].id, token.id);
        assert_eq!(token.ca, first.fingerprint());
        assert!(first.admin_key().len() == 64 && again.revoke_token("x").unwrap_err().is_unknown_name());
        assert!(again.is_admin_key(first.admin_key()) && !again.is_admin_key("") && !again.is_admin_key("x"));
        assert!(again.revoke_token(&token.id.to_string()).is_ok());
    }

    #[cfg(unix)]
    #[test]
    fn nobody_else_can_read_the_keys() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster");
        Registry::open(&path).unwrap();
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path), 0o700);
        assert_eq!((mode(&path.join("ca-key.pem")), mode(&path.join(ADMIN_KEY))), (0o600, 0o600));
    }

    #[test]
    fn many_processes_that_found_a_cluster_at_once_found_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let open = || Registry::open(folder.path()).unwrap().fingerprint();
        let fingerprints: Vec<Fingerprint> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..6).map(|_| scope.spawn(open)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(fingerprints.iter().all(|fingerprint| *fingerprint == fingerprints[0]));
    }

    #[test]
    fn a_node_is_named_by_its_name_or_the_start_of_its_id() {
        let folder = tempfile::tempdir().unwrap();
        let registry = Registry::open(folder.path()).unwrap();
        let ask = |id: u128, name: &str| {
            let asked = registry.store().ask(
                &newcomer(id, name),
                &Fingerprint([1; 32]),
                Asking::WithCode("c"),
                Timestamp::now(),
            );
            assert_eq!(asked.unwrap(), Verdict::Pending);
        };
        ask(0x1111_0000_0000_0000_0000_0000_0000_0001, "desk");
        ask(0x1122_0000_0000_0000_0000_0000_0000_0002, "mac");
        assert_eq!(registry.approve("desk").unwrap().name.0, "desk");
        assert_eq!(registry.approve("1122").unwrap().name.0, "mac");
        assert!(registry.approve("11").unwrap_err().to_string().contains("several"));
        for nobody in ["", "nobody", "3"] {
            assert!(registry.remove(nobody).unwrap_err().is_unknown_name());
        }
        assert_eq!(registry.remove("mac").unwrap().state, MemberState::Left);
    }
}

//! What a group of devices is worth in each role, remembered. Groups are named by the classes of their devices, so that
//! two groups that can do the same are laid out once.

use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use cluster::Role;
use rustc_hash::FxHashMap;

use crate::chain::Chain;
use crate::diagnose::has_room;
use crate::instance::{Buffers, Instance};
use crate::layout::Layouter;
use crate::settings::{Settings, SlotRule};
use crate::sim::SimReplica;

/// Tokens per chunk when prefill runs between decode steps: a longer one would stall generation for longer.
pub const MIXED_CHUNK: u32 = 512;

/// One role of one group, with what it adds to a plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct GroupOption {
    pub role: Role,
    pub rule: SlotRule,
    pub slots: u16,
    /// Prompt tokens per second, all stages busy.
    pub ps: f64,
    /// Generated tokens per second, all slots busy.
    pub ds: f64,
}

/// A group in one role.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DraftGroup {
    /// Classes of its devices, rising.
    pub classes: Box<[u16]>,
    pub option: GroupOption,
}

/// A plan, up to which of several like devices goes where.
pub(crate) type Draft = Vec<DraftGroup>;

/// A group in a role, laid out on given devices.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Replica {
    pub role: Role,
    pub chain: Chain,
    pub sim: SimReplica,
}

type Options = Arc<[GroupOption]>;
type ReplicaKey = (Box<[usize]>, Role, SlotRule);

/// Which options a search looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Roles {
    /// Prefill and decode, as in the paper.
    Apart,
    /// Also replicas that do both.
    AlsoMixed,
}

pub(crate) struct Evaluator<'a> {
    layouter: Layouter<'a>,
    rules: &'static [SlotRule],
    roles: Roles,
    options: RwLock<FxHashMap<Box<[u16]>, Options>>,
    /// What laying out the groups in `options` took.
    spent: AtomicU64,
    replicas: RwLock<FxHashMap<ReplicaKey, Option<Arc<Replica>>>>,
}

impl<'a> Evaluator<'a> {
    pub(crate) fn new(inst: &'a Instance, settings: &Settings, roles: Roles) -> Self {
        Self {
            layouter: Layouter { inst, encoding: settings.encoding },
            rules: match settings.slots {
                SlotRule::MostTokens => &[SlotRule::MostTokens],
                SlotRule::Largest => &[SlotRule::Largest],
                SlotRule::Either => &[SlotRule::MostTokens, SlotRule::Largest],
            },
            roles,
            options: RwLock::default(),
            spent: AtomicU64::new(0),
            replicas: RwLock::default(),
        }
    }

    pub(crate) fn inst(&self) -> &'a Instance {
        self.layouter.inst
    }

    /// The roles a group of devices of these classes can take; empty if it cannot hold the model.
    pub(crate) fn options(&self, classes: &[u16]) -> Options {
        let known = self.options.read().unwrap_or_else(PoisonError::into_inner).get(classes).cloned();
        known.unwrap_or_else(|| {
            let found: Options = self.evaluate(&self.representatives(classes)).into();
            let mut options = self.options.write().unwrap_or_else(PoisonError::into_inner);
            let known = options.entry(classes.into());
            if matches!(known, Entry::Vacant(_)) {
                self.spent.fetch_add(self.layouter.work(classes.len()), Ordering::Relaxed);
            }
            known.or_insert(found).clone()
        })
    }

    /// What laying out all groups asked for so far took, in steps: the same on any number of threads, since a group counts
    /// once, whoever lays it out.
    pub(crate) fn spent(&self) -> u64 {
        self.spent.load(Ordering::Relaxed)
    }

    /// About what laying out a group of so many devices takes, in steps.
    pub(crate) fn work(&self, devices: usize) -> u64 {
        self.layouter.work(devices)
    }

    /// The first devices of each class.
    pub(crate) fn representatives(&self, classes: &[u16]) -> Vec<usize> {
        let mut taken = 0;
        let of = classes.iter().enumerate().map(|(i, &class)| {
            taken = if i > 0 && classes[i - 1] == class { taken + 1 } else { 0 };
            self.inst().classes[usize::from(class)][taken]
        });
        of.collect()
    }

    /// A plan with devices for classes.
    pub(crate) fn realise(&self, draft: &[DraftGroup]) -> Option<Vec<Arc<Replica>>> {
        let mut used = vec![0; self.inst().classes.len()];
        draft
            .iter()
            .map(|group| {
                let devices: Vec<usize> = group
                    .classes
                    .iter()
                    .map(|&class| {
                        let class = usize::from(class);
                        used[class] += 1;
                        self.inst().classes[class][used[class] - 1]
                    })
                    .collect();
                self.replica(&devices, group.option.role, group.option.rule)
            })
            .collect()
    }

    /// A group of devices laid out for a role.
    pub(crate) fn replica(&self, devices: &[usize], role: Role, rule: SlotRule) -> Option<Arc<Replica>> {
        let key = (devices.into(), role, rule);
        if let Some(known) = self.replicas.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return known.clone();
        }
        let chain = match role {
            Role::Prefill => {
                self.layouter.prefill(devices).map(|(chain, rate)| (with_places(self.inst(), chain), rate))
            }
            Role::Decode => self.layouter.decode(devices, rule, Buffers::Decode),
            Role::Mixed => self.layouter.decode(devices, rule, Buffers::Both),
        };
        let replica = chain.map(|(chain, _)| Arc::new(replica(self.inst(), role, chain)));
        let mut replicas = self.replicas.write().unwrap_or_else(PoisonError::into_inner);
        replicas.entry(key).or_insert(replica).clone()
    }

    fn evaluate(&self, devices: &[usize]) -> Vec<GroupOption> {
        let mut found = Vec::new();
        if let Some((chain, ps)) = self.layouter.prefill(devices) {
            let slots = chain.slots as u16;
            found.push(GroupOption { role: Role::Prefill, rule: SlotRule::MostTokens, slots, ps, ds: 0.0 });
        }
        for &rule in self.rules {
            if let Some((chain, ds)) = self.layouter.decode(devices, rule, Buffers::Decode) {
                let option = GroupOption { role: Role::Decode, rule, slots: chain.slots as u16, ps: 0.0, ds };
                // Two rules often agree.
                if found.iter().all(|o| (o.role, o.slots, o.ds) != (Role::Decode, option.slots, ds)) {
                    found.push(option);
                }
            }
        }
        if self.roles == Roles::AlsoMixed {
            found.extend(self.mixed(devices));
        }
        found
    }

    /// The group doing both, its time shared between the phases as the workload needs it.
    pub(crate) fn mixed(&self, devices: &[usize]) -> Option<GroupOption> {
        let rule = self.rules[0];
        let (chain, ds) = self.layouter.decode(devices, rule, Buffers::Both)?;
        let work = &self.inst().work;
        let prompt = chain.prefill(self.inst(), mixed_chunk(self.inst())).of(work.prompt).slowest;
        let rate = 1.0 / (prompt + work.output / ds);
        let (ps, ds) = (work.prompt * rate, work.output * rate);
        Some(GroupOption { role: Role::Mixed, rule, slots: chain.slots as u16, ps, ds })
    }
}

fn mixed_chunk(inst: &Instance) -> f64 {
    f64::from(MIXED_CHUNK).min(inst.prefill_chunk)
}

/// Prompts that a prefill replica may have for each of its stages, if there is room: one is computed there, another is handed over, which
/// takes as long, and a third waits for somebody to take it.
const PLACES: usize = 3;

/// A chain that prefills, with room for prompts that wait to be taken over.
fn with_places(inst: &Instance, chain: Chain) -> Chain {
    let more = (chain.slots + 1..=PLACES * chain.len()).rev();
    let most = more.into_iter().find(|&slots| has_room(inst, (&chain, Buffers::Prefill), slots));
    Chain { slots: most.unwrap_or(chain.slots), ..chain }
}

/// The times of a chain in a role.
pub(crate) fn replica(inst: &Instance, role: Role, chain: Chain) -> Replica {
    let chunk = if role == Role::Mixed { mixed_chunk(inst) } else { inst.prefill_chunk };
    let sim = SimReplica {
        role,
        slots: chain.slots,
        stages: chain.len(),
        prefill: chain.prefill(inst, chunk),
        tpot: chain.tpot(inst),
    };
    Replica { role, chain, sim }
}

/// Prompt and generated tokens per second of a whole plan.
pub(crate) fn totals(draft: &[DraftGroup]) -> (f64, f64) {
    draft.iter().fold((0.0, 0.0), |(ps, ds), group| (ps + group.option.ps, ds + group.option.ds))
}

//! What all replicas of a deployment have in common, and what follows for one of them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use cluster::{DeviceProfile, ModelHash, NodeId};
use deploy::Chain;
use futures::future::try_join_all;
use node::agent::{Epochs, RemoteReplica, Whereabouts, WorkerSettings};
use node::links::{RingNews, RingNodes};
use node::{Folders, Layout, NodeClient, ReplicaPlan, ReplicaRequest};
use protocol::node::{Address, Build};
use protocol::rows::RowEncoding;
use protocol::tls::TlsIdentity;
use registry::Registry;
use tokio::sync::mpsc;

use super::super::ServeArgs;
use super::super::slices::{self, OwnParts};
use crate::commands::model;

/// How long nodes keep stages loaded while this process is away: to start it again takes seconds, to have somebody do so minutes. Their
/// memory is not lost meanwhile: they make room for other stages.
const KEEP: Duration = Duration::from_secs(120);

/// What they have in common.
pub(super) struct Ground {
    pub(super) args: ServeArgs,
    pub(super) folders: Folders,
    pub(super) identity: TlsIdentity,
    pub(super) build: Build,
    pub(super) model_hash: ModelHash,
    pub(super) epochs: Epochs,
    pub(super) profiles: Vec<DeviceProfile>,
    pub(super) registry: Registry,
    /// The port at which nodes get their parts of the model.
    pub(super) parts: OwnParts,
    /// Where it is told of links.
    pub(super) news: mpsc::Sender<(usize, RingNews)>,
}

impl Ground {
    /// What a replica will hold.
    pub(super) fn plan(&self, chain: &Chain) -> Result<ReplicaPlan> {
        let cuts = chain.stages.iter().skip(1).map(|place| place.layers.start()).collect();
        let request = ReplicaRequest {
            layout: Layout::Cuts(cuts),
            gpu_layers: chain.stages.iter().map(|place| place.gpu_blocks).collect(),
            slots: chain.slots,
            memory_costs: self.profiles.iter().find_map(|profile| profile.memory),
            ..self.args.request(0)
        };
        Ok(ReplicaPlan::new(model::open(&self.args.model, &self.folders)?, &request)?)
    }

    /// Connects to a replica's nodes, which must be there. Why they cannot be used, if they cannot.
    pub(super) async fn connect(&self, chain: &Chain) -> Result<Vec<NodeClient>, String> {
        let names: BTreeSet<&NodeId> = chain.nodes().collect();
        let connecting = names.into_iter().map(|name| async move {
            let there =
                address_of(&self.registry, name).ok_or_else(|| format!("node {name} is not there"))?;
            let client = NodeClient::connect(&there, &self.identity, &self.build).await;
            client.map(|client| (name, client)).map_err(|error| error.to_string())
        });
        let clients = try_join_all(connecting).await?;
        let client_of =
            |name: &NodeId| clients.iter().find(|(of, _)| *of == name).map(|(_, client)| client.clone());
        Ok(chain.nodes().filter_map(client_of).collect())
    }

    /// The replica, to be run on these nodes.
    pub(super) fn remote(
        &self,
        plan: ReplicaPlan,
        nodes: &[NodeClient],
        encoding: RowEncoding,
    ) -> RemoteReplica {
        RemoteReplica {
            settings: self.settings(&plan, nodes, encoding),
            plan,
            model_hash: self.model_hash,
            nodes: nodes.to_vec(),
            identity: self.identity.clone(),
            memory_check: self.args.memory_check(),
            profiles: self.profiles.clone(),
            // Others come and go: each stage takes turns, as if there were always one. Alone, that costs two system calls a step.
            beside: nodes.to_vec(),
            sources: self.parts.sources(slices::present(&self.registry)),
            epochs: self.epochs.clone(),
            whereabouts: Some(self.whereabouts()),
        }
    }

    /// Whom to ask about the links between a replica's stages.
    pub(super) fn ring_nodes(&self, clients: Vec<NodeClient>) -> RingNodes {
        RingNodes { clients, identity: self.identity.clone() }
    }

    fn settings(&self, plan: &ReplicaPlan, nodes: &[NodeClient], encoding: RowEncoding) -> WorkerSettings {
        let hosts: BTreeSet<&NodeId> = nodes.iter().map(NodeClient::name).collect();
        let slots = plan.load().slots;
        let settings = self.args.settings(plan.stages().len() as u32, hosts.len() as u32, (slots, encoding));
        WorkerSettings { keep: KEEP, ..settings }
    }

    /// A node that was started again may be reached elsewhere.
    fn whereabouts(&self) -> Whereabouts {
        let registry = self.registry.clone();
        Arc::new(move |node| address_of(&registry, node))
    }
}

/// Where a node that is there is reached.
fn address_of(registry: &Registry, node: &NodeId) -> Option<Address> {
    let presence = registry.watch_presence();
    let here = presence.borrow();
    here.values().find(|present| present.facts.name == *node)?.reached.address().cloned()
}

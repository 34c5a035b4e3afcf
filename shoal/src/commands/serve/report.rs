//! What `shoal serve` says: words and a table on stderr, or events as JSON lines on stdout.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use cluster::{Bytes, LayerRange, ModelShape, ReplicaState, StageMemory, StageReport};
use comfy_table::{CellAlignment, Table, presets};
use node::links::RingNews;
use serde::Serialize;

use super::links;
use crate::output;

/// What does not change during a run.
pub(super) struct Facts {
    /// Name of the model in the API.
    pub(super) model: String,
    url: String,
    is_public: bool,
    architecture: String,
    n_layer: u32,
    n_ctx: u32,
    numbering: Numbering,
}

/// How replicas are told from each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Numbering {
    /// There are so many from the beginning to the end.
    Fixed(usize),
    /// They come and go.
    Changing,
}

impl Facts {
    /// Of replicas of a model that is called so, whose slots hold so many tokens.
    pub(super) fn new(
        (model, shape): (String, &ModelShape),
        address: SocketAddr,
        n_ctx: u32,
        numbering: Numbering,
    ) -> Self {
        Self {
            model,
            url: format!("http://{}", reachable(address)),
            is_public: !address.ip().is_loopback(),
            architecture: shape.architecture.clone(),
            n_layer: shape.n_layer(),
            n_ctx,
            numbering,
        }
    }

    /// The replica's number, where there are several.
    fn number(&self, replica: usize) -> Option<usize> {
        match self.numbering {
            Numbering::Fixed(1) => None,
            Numbering::Fixed(_) | Numbering::Changing => Some(replica),
        }
    }

    /// How people call it.
    fn name(&self, replica: usize) -> String {
        self.number(replica).map_or("the replica".to_owned(), |number| format!("replica {number}"))
    }
}

/// An address to open: where the server listens on all, the loopback one.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Event<'a> {
    Starting {
        url: &'a str,
        model: &'a str,
    },
    Ready {
        url: &'a str,
        model: &'a str,
        architecture: &'a str,
        n_layer: u32,
        slots: u32,
        n_ctx: u32,
        /// Where there are several.
        #[serde(skip_serializing_if = "Option::is_none")]
        replica: Option<usize>,
        stages: Vec<StageEntry>,
    },
    Down {
        #[serde(skip_serializing_if = "Option::is_none")]
        replica: Option<usize>,
        reason: &'a str,
    },
    Links {
        #[serde(skip_serializing_if = "Option::is_none")]
        replica: Option<usize>,
        #[serde(flatten)]
        survey: links::Survey,
    },
}

/// A stage in the table. Sizes in bytes.
#[derive(Serialize)]
struct StageEntry {
    stage: u32,
    layers: LayerRange,
    gpu_layers: u32,
    /// Which node runs it; none where this process does.
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<String>,
    threads: u32,
    pid: u32,
    /// By llama.cpp's own account of what it allocated.
    estimated: StageMemory,
    estimated_bytes: Bytes,
    /// What the operating system says.
    resident_bytes: Bytes,
    /// Of the resident memory from `estimated_bytes`.
    difference_percent: f64,
    /// Before the start, from the model's description alone: what the memory check went by.
    predicted: StageMemory,
    predicted_bytes: Bytes,
}

impl StageEntry {
    fn new(report: &StageReport, predicted: StageMemory) -> Self {
        let estimated_bytes = report.estimated.total();
        let difference = report.resident.mib() - estimated_bytes.mib();
        Self {
            stage: report.stage.0,
            layers: report.layers,
            gpu_layers: report.gpu_layers,
            node: report.node.as_ref().map(|node| node.0.clone()),
            threads: report.threads,
            pid: report.pid,
            estimated: report.estimated,
            estimated_bytes,
            resident_bytes: report.resident,
            difference_percent: difference / estimated_bytes.mib().max(f64::MIN_POSITIVE) * 100.0,
            predicted,
            predicted_bytes: predicted.total(),
        }
    }
}

/// For whom events are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Audience {
    /// People, on stderr.
    People,
    /// Programs, as JSON lines on stdout.
    Programs,
}

/// Says what happens.
pub(super) struct Reporter<'a> {
    facts: &'a Facts,
    audience: Audience,
    replicas: BTreeMap<usize, Told>,
    /// Whether it was said where the model is served.
    is_introduced: bool,
}

/// A replica that is told of.
struct Told {
    slots: u32,
    /// Of each stage.
    predicted: Vec<StageMemory>,
    serves: Serves,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Serves {
    NotYet,
    Now,
    NoLonger,
}

impl<'a> Reporter<'a> {
    pub(super) fn new(facts: &'a Facts, audience: Audience) -> Self {
        Self { facts, audience, replicas: BTreeMap::new(), is_introduced: false }
    }

    /// A replica of so many slots will be told of, whose stages should take so much memory.
    pub(super) fn expect(&mut self, replica: usize, slots: u32, predicted: &[StageMemory]) {
        let predicted = predicted.to_vec();
        self.replicas.insert(replica, Told { slots, predicted, serves: Serves::NotYet });
    }

    /// A replica is no more.
    pub(super) fn forget(&mut self, replica: usize) {
        self.replicas.remove(&replica);
    }

    /// The API listens and says that it is not ready.
    pub(super) fn starting(&self) -> io::Result<()> {
        let Facts { url, model, is_public, .. } = self.facts;
        match self.audience {
            Audience::Programs => return output::print_json_line(&Event::Starting { url, model }),
            Audience::People if *is_public => {
                output::note(
                    "note: anyone who can reach this address can use the model: the API asks for no key",
                )?;
            }
            Audience::People => {}
        }
        Ok(())
    }

    /// A replica's state may be another. Says so once per change between serving and not.
    pub(super) fn changed(
        &mut self,
        replica: usize,
        state: &ReplicaState,
        reports: &[StageReport],
    ) -> io::Result<()> {
        match (state, self.replicas.get(&replica).map(|told| told.serves)) {
            (ReplicaState::Ready { .. }, Some(Serves::NotYet | Serves::NoLonger)) => {
                self.ready(replica, reports)
            }
            (ReplicaState::Down { reason }, Some(Serves::Now)) => self.down(replica, reason),
            _ => Ok(()),
        }
    }

    /// The links between a replica's stages were measured.
    pub(super) fn links(&self, replica: usize, news: &RingNews) -> io::Result<()> {
        let number = self.facts.number(replica);
        match self.audience {
            Audience::Programs => {
                output::print_json_line(&Event::Links { replica: number, survey: news.into() })
            }
            Audience::People => {
                let of = number.map_or(String::new(), |number| format!("replica {number}: "));
                links::in_words(news).map_or(Ok(()), |words| output::note(&(of + &words)))
            }
        }
    }

    fn ready(&mut self, replica: usize, reports: &[StageReport]) -> io::Result<()> {
        let Some(told) = self.replicas.get_mut(&replica) else { return Ok(()) };
        let before = std::mem::replace(&mut told.serves, Serves::Now);
        let (facts, slots) = (self.facts, told.slots);
        let zipped = reports.iter().zip(&told.predicted);
        let stages: Vec<_> = zipped.map(|(report, &memory)| StageEntry::new(report, memory)).collect();
        let Facts { url, model, architecture, n_ctx, n_layer, .. } = facts;
        if self.audience == Audience::Programs {
            let (n_layer, n_ctx) = (*n_layer, *n_ctx);
            return output::print_json_line(&Event::Ready {
                url,
                model,
                architecture,
                n_layer,
                slots,
                n_ctx,
                replica: facts.number(replica),
                stages,
            });
        }
        if before == Serves::NoLonger {
            return output::note(&format!("{} serves again", facts.name(replica)));
        }
        match facts.numbering {
            Numbering::Fixed(all) if all > 1 => output::note(&format!("replica {replica} of {all} serves:"))?,
            Numbering::Changing => output::note(&format!("replica {replica}, of {slots} slots, serves:"))?,
            Numbering::Fixed(_) => {}
        }
        output::note(&table(&stages))?;
        self.introduce(slots)
    }

    /// Says where the model is served, once.
    fn introduce(&mut self, slots: u32) -> io::Result<()> {
        let Facts { url, model, architecture, n_ctx, n_layer, numbering, .. } = self.facts;
        let all_serve = self.replicas.values().all(|told| told.serves != Serves::NotYet);
        let kind = match numbering {
            Numbering::Fixed(1) => format!("{slots} slots of {n_ctx} tokens"),
            Numbering::Fixed(all) => format!("{all} replicas of {slots} slots of {n_ctx} tokens"),
            Numbering::Changing => format!("slots of {n_ctx} tokens"),
        };
        if self.is_introduced || !(all_serve || *numbering == Numbering::Changing) {
            return Ok(());
        }
        self.is_introduced = true;
        output::note(&format!(
            "{model} ({architecture}, {n_layer} blocks, {kind}) is served at {url}/v1\nCtrl-C stops it"
        ))
    }

    fn down(&mut self, replica: usize, reason: &str) -> io::Result<()> {
        if let Some(told) = self.replicas.get_mut(&replica) {
            told.serves = Serves::NoLonger;
        }
        match self.audience {
            Audience::Programs => {
                output::print_json_line(&Event::Down { replica: self.facts.number(replica), reason })
            }
            Audience::People => output::note(&format!("{} is down: {reason}", self.facts.name(replica))),
        }
    }
}

fn table(stages: &[StageEntry]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header([
        "stage",
        "node",
        "layers",
        "on GPU",
        "threads",
        "weights",
        "KV cache",
        "compute",
        "runtime",
        "estimated",
        "resident",
        "difference",
    ]);
    for stage in stages {
        let StageMemory { weights, cache, compute, runtime } = stage.estimated;
        table.add_row([
            stage.stage.to_string(),
            stage.node.clone().unwrap_or_else(|| "here".to_owned()),
            stage.layers.to_string(),
            stage.gpu_layers.to_string(),
            stage.threads.to_string(),
            weights.to_string(),
            cache.to_string(),
            compute.to_string(),
            runtime.to_string(),
            stage.estimated_bytes.to_string(),
            stage.resident_bytes.to_string(),
            format!("{:+.1} %", stage.difference_percent),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use cluster::{NodeId, StageIndex};

    use super::*;

    #[test]
    fn the_table_sets_what_was_estimated_against_what_is_resident() {
        let report = StageReport {
            stage: StageIndex(1),
            layers: LayerRange::new(10, 20).unwrap(),
            gpu_layers: 0,
            node: Some(NodeId("desk".into())),
            pid: 1,
            threads: 2,
            estimated: StageMemory {
                weights: Bytes::from_mib(70),
                cache: Bytes::from_mib(20),
                compute: Bytes::from_mib(5),
                runtime: Bytes::from_mib(5),
            },
            resident: Bytes::from_mib(110),
        };
        let text = table(&[StageEntry::new(&report, StageMemory::default())]);
        for part in ["10..20", "desk", "70.0 MiB", "100.0 MiB", "110.0 MiB", "+10.0 %"] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
    }

    #[test]
    fn the_url_can_be_opened_where_the_server_listens_on_all_addresses() {
        assert_eq!(reachable(([0, 0, 0, 0], 80).into()).to_string(), "127.0.0.1:80");
        assert_eq!(reachable("[::]:80".parse().unwrap()).to_string(), "[::1]:80");
        assert_eq!(reachable(([10, 0, 0, 1], 80).into()).to_string(), "10.0.0.1:80");
    }
}

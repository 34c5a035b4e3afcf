//! How many routing decisions one core makes: requests that come to 16 replicas with 2,000 in flight, each bound, seated,
//! started, counted for its first token and let go.

#![allow(missing_docs, reason = "criterion makes a function")]

use std::hint::black_box;
use std::time::Duration;

use cluster::Epoch;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use orchestrator::desk::{Company, Desk, Leaving, Order, PredictedRates, PromptPrefix, Ticket};
use orchestrator::router::PolicyName;

const REPLICAS: u64 = 16;
const IN_FLIGHT: usize = 2000;

/// A desk whose slots and lines are full.
struct Busy {
    desk: Desk,
    tickets: Vec<Ticket>,
    prefixes: Vec<PromptPrefix>,
    now: Duration,
    turn: usize,
}

impl Busy {
    fn new(policy: PolicyName) -> Self {
        let mut desk = Desk::new(policy.policy(1), IN_FLIGHT);
        for replica in 0..REPLICAS {
            // Unequal slots, as planned replicas have.
            let replica = desk.add(4 + (replica % 5) as u32 * 8, PredictedRates::default());
            desk.serve(replica, Some(Epoch(1)), Duration::ZERO);
        }
        let prompt = |i: i32| -> Vec<i32> {
            (0..1024).map(|token| if token < 512 { i % 16 } else { i + token }).collect()
        };
        let prefixes = (0..64).map(|i| PromptPrefix::of(&prompt(i))).collect();
        let mut busy = Self { desk, tickets: Vec::new(), prefixes, now: Duration::ZERO, turn: 0 };
        for _ in 0..IN_FLIGHT {
            busy.arrive();
        }
        busy
    }

    fn arrive(&mut self) {
        self.turn += 1;
        self.now += Duration::from_micros(500);
        let order = Order {
            prompt: 200 + (self.turn % 37) as u32 * 50,
            most_output: 512,
            prefix: self.prefixes[self.turn % self.prefixes.len()].clone(),
            company: Company::Any,
        };
        if let Ok(arrival) = self.desk.arrive(order, self.now) {
            self.tickets.push(arrival.ticket);
        }
    }

    /// One request ends, wherever it is, and another comes.
    fn decide(&mut self) {
        let leaves = self.tickets.swap_remove(self.turn * 7919 % self.tickets.len());
        self.desk.started(leaves, 3);
        self.desk.token(leaves, self.now);
        self.desk.token(leaves, self.now);
        self.desk.leave(leaves, Leaving::Done, self.now);
        self.arrive();
        black_box(self.desk.take_moved());
    }
}

fn decisions(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decisions");
    group.throughput(Throughput::Elements(1));
    for policy in PolicyName::ALL {
        let mut busy = Busy::new(policy);
        group.bench_function(BenchmarkId::from_parameter(policy), |bencher| bencher.iter(|| busy.decide()));
        assert_eq!(busy.tickets.len(), IN_FLIGHT);
    }
    group.finish();
}

criterion_group!(benches, decisions);
criterion_main!(benches);

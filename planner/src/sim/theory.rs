//! The simulator against queueing theory.

use cluster::Role;

use super::*;
use crate::rng::Rng;

/// Poisson arrivals of `rate` per second, with lengths drawn by `prompt` and `output`.
fn poisson(
    n: usize,
    rate: f64,
    prompt: impl Fn(&mut Rng) -> f64,
    output: impl Fn(&mut Rng) -> f64,
) -> Vec<Request> {
    let mut rng = Rng::new(11);
    let mut at = 0.0;
    (0..n)
        .map(|_| {
            at += rng.exponential() / rate;
            Request { at, prompt: prompt(&mut rng), output: output(&mut rng) }
        })
        .collect()
}

fn run(replicas: Vec<SimReplica>, requests: &[Request]) -> Report {
    let cluster = SimCluster::without_handover(replicas);
    simulate(&cluster, requests, &mut ShortestWork, Bounds::default()).unwrap()
}

fn mean_wait(report: &Report) -> f64 {
    report.served.iter().map(Served::wait).sum::<f64>() / report.served.len() as f64
}

fn assert_close(found: f64, expected: f64, tolerance: f64) {
    assert!((found / expected - 1.0).abs() < tolerance, "{found} instead of {expected}");
}

/// A single prefill server of one second per token; what it hands out is done at once.
fn one_server() -> Vec<SimReplica> {
    vec![
        SimReplica::simple(Role::Prefill, 0, 1.0, vec![1.0, 1.0]),
        SimReplica::simple(Role::Decode, 1, 1.0, vec![1.0, 1.0]),
    ]
}

#[test]
fn waits_agree_with_m_d_1() {
    for rho in [0.5, 0.8] {
        let report = run(one_server(), &poisson(1_000_000, rho, |_| 1.0, |_| 1.0));
        assert_close(mean_wait(&report), rho / (2.0 * (1.0 - rho)), 0.02);
    }
}

#[test]
fn waits_agree_with_m_m_1() {
    for rho in [0.5, 0.8] {
        let report = run(one_server(), &poisson(2_000_000, rho, Rng::exponential, |_| 1.0));
        assert_close(mean_wait(&report), rho / (1.0 - rho), 0.02);
    }
}

/// Erlang's C formula: the mean wait in an M/M/c queue with service rate 1.
fn erlang_c(servers: usize, load: f64) -> f64 {
    let c = servers as f64;
    let mut term = 1.0;
    let mut sum = 0.0;
    for k in 0..servers {
        sum += term;
        term *= load / (k as f64 + 1.0);
    }
    let waiting = term * c / (c - load);
    waiting / (sum + waiting) / (c - load)
}

#[test]
fn waits_agree_with_m_m_c() {
    for (slots, load) in [(2, 1.5), (4, 3.0), (8, 6.8)] {
        let replicas = vec![
            SimReplica::simple(Role::Prefill, 0, 0.0, vec![1.0, 1.0]),
            SimReplica::simple(Role::Decode, slots, 1.0, vec![1.0; slots + 1]),
        ];
        let report = run(replicas, &poisson(2_000_000, load, |_| 1.0, |rng| 1.0 + rng.exponential()));
        assert_close(mean_wait(&report), erlang_c(slots, load), 0.02);
    }
}

#[test]
fn a_shared_rate_agrees_with_processor_sharing() {
    // M/M/1 with processor sharing: mean time in the system is 1 / (1 − ρ), whatever the lengths' distribution.
    let slots = 200;
    let shared: Vec<f64> = (0..=slots).map(|n| n.max(1) as f64).collect();
    let replicas = vec![
        SimReplica::simple(Role::Prefill, 0, 0.0, vec![1.0, 1.0]),
        SimReplica::simple(Role::Decode, slots, 1.0, shared),
    ];
    let report = run(replicas, &poisson(1_000_000, 0.7, |_| 1.0, |_| 2.0));
    let mean = report.served.iter().map(|s| s.finish - s.arrival).sum::<f64>() / 1e6;
    assert_close(mean, 1.0 / 0.3, 0.02);
}

/// A cluster of every role, with hand-over, near saturation.
fn mixed_cluster() -> SimCluster {
    let tpot = |base: f64, slots: usize| (0..=slots).map(|n| base * (1.0 + 0.2 * n as f64)).collect();
    let replicas = vec![
        SimReplica::simple(Role::Prefill, 0, 0.002, vec![0.1; 2]),
        SimReplica::simple(Role::Prefill, 0, 0.004, vec![0.1; 2]),
        SimReplica::simple(Role::Decode, 6, 0.004, tpot(0.02, 6)),
        SimReplica::simple(Role::Mixed, 4, 0.003, tpot(0.03, 4)),
        SimReplica::simple(Role::Decode, 3, 0.004, tpot(0.01, 3)),
    ];
    SimCluster::new(replicas, vec![Handover::linear(0.0005, 0.001); 25])
}

fn busy_requests(n: usize) -> Vec<Request> {
    poisson(n, 1.2, |rng| rng.log_normal(400.0, 0.4), |rng| 1.0 + rng.log_normal(200.0, 0.5).round())
}

#[test]
fn every_request_is_served_once_in_order_of_its_phases() {
    let requests = busy_requests(20_000);
    for policy in [&mut ShortestWork as &mut dyn Policy, &mut ShortestCount, &mut RoundRobin::default()] {
        let report = simulate(&mixed_cluster(), &requests, policy, Bounds::default()).unwrap();
        assert_eq!(report.served.len(), requests.len());
        for served in &report.served {
            let times = [
                served.arrival,
                served.prefill_start,
                served.first_token,
                served.slot,
                served.decode_start,
                served.finish,
            ];
            assert!(times.windows(2).all(|pair| pair[0] <= pair[1] + 1e-9), "{served:?}");
        }
    }
}

#[test]
fn time_in_the_system_adds_up_to_littles_law() {
    let report =
        simulate(&mixed_cluster(), &busy_requests(20_000), &mut ShortestWork, Bounds::default()).unwrap();
    let by_request: f64 = report.served.iter().map(|s| s.finish - s.arrival).sum();
    assert_close(report.request_seconds, by_request, 1e-9);
}

#[test]
fn prefill_queues_are_first_in_first_out() {
    let report =
        simulate(&mixed_cluster(), &busy_requests(20_000), &mut ShortestWork, Bounds::default()).unwrap();
    for replica in 0..5 {
        let starts: Vec<f64> =
            report.served.iter().filter(|s| s.prefilled_by == replica).map(|s| s.prefill_start).collect();
        assert!(starts.windows(2).all(|pair| pair[0] <= pair[1]), "replica {replica}");
    }
}

#[test]
fn slots_are_given_in_the_order_of_first_tokens() {
    let report =
        simulate(&mixed_cluster(), &busy_requests(20_000), &mut ShortestWork, Bounds::default()).unwrap();
    let mut handed: Vec<(f64, f64)> = report
        .served
        .iter()
        .filter(|s| s.prefilled_by != s.decoded_by)
        .map(|s| (s.first_token, s.slot))
        .collect();
    handed.sort_by(|a, b| a.0.total_cmp(&b.0));
    assert!(handed.windows(2).all(|pair| pair[0].1 <= pair[1].1 + 1e-9));
}

#[test]
fn no_server_idles_while_work_waits_for_it() {
    // One server and a decoder that never fills: the server is busy from the first arrival to its last token but for
    // the times when nothing waits, so busy time is total work.
    let requests = poisson(10_000, 0.9, |rng| rng.log_normal(1.0, 0.5), |_| 1.0);
    let report = run(one_server(), &requests);
    let work: f64 = requests.iter().map(|r| r.prompt).sum();
    assert_close(report.replicas[0].prefilling, work, 1e-9);
    // Each request starts when it comes or when the one before it is done.
    for pair in report.served.windows(2) {
        let expected = pair[1].arrival.max(pair[0].first_token);
        assert!((pair[1].prefill_start - expected).abs() < 1e-6, "{pair:?}");
    }
}

#[test]
fn decoded_tokens_are_the_tokens_asked_for() {
    let requests = busy_requests(20_000);
    let cluster = mixed_cluster();
    let report = simulate(&cluster, &requests, &mut ShortestWork, Bounds::default()).unwrap();
    // Without a mixed replica, time with n running times n tokens per step must add up to all tokens.
    let decode_only =
        SimCluster::without_handover(vec![cluster.replicas()[0].clone(), cluster.replicas()[2].clone()]);
    let alone = simulate(&decode_only, &requests, &mut ShortestWork, Bounds::default()).unwrap();
    let made: f64 = alone.replicas[1]
        .decoding
        .iter()
        .enumerate()
        .skip(1)
        .map(|(n, s)| s * n as f64 / decode_only.replicas()[1].tpot(n))
        .sum();
    assert_close(made, requests.iter().map(|r| r.output - 1.0).sum(), 1e-6);
    assert!(report.events > 60_000);
}

#[test]
fn one_seed_gives_one_result() {
    let once = || simulate(&mixed_cluster(), &busy_requests(5_000), &mut ShortestWork, Bounds::default());
    assert_eq!(once(), once());
}

#[test]
fn a_broken_bound_ends_a_simulation() {
    let bounds = Bounds { most: 0.01, ..Bounds::default() };
    assert_eq!(simulate(&mixed_cluster(), &busy_requests(5_000), &mut ShortestWork, bounds), None);
}

#[test]
fn queues_over_time_are_noted_when_asked_for() {
    let bounds = Bounds { samples: 50, ..Bounds::default() };
    let report = simulate(&mixed_cluster(), &busy_requests(2_000), &mut ShortestWork, bounds).unwrap();
    assert_eq!(report.queues.len(), 50);
    assert!(report.queues.iter().any(|q| q.1 + q.2 > 0));
}

#[test]
fn a_cluster_that_cannot_decode_serves_nothing() {
    let only = vec![SimReplica::simple(Role::Prefill, 0, 1.0, vec![1.0, 1.0])];
    let cluster = SimCluster::without_handover(only);
    assert_eq!(simulate(&cluster, &busy_requests(1), &mut ShortestWork, Bounds::default()), None);
}

#[test]
fn a_clock_that_has_run_for_years_still_moves_on() {
    // A request a year: a second token is nearer than the clock's next number at times. Earlier such a run never ended.
    let year = 3.2e7;
    let requests: Vec<Request> = (0..500)
        .map(|i| Request { at: f64::from(i) * 1e4 * year, prompt: 300.0 + f64::from(i), output: 200.0 })
        .collect();
    let report = simulate(&mixed_cluster(), &requests, &mut ShortestWork, Bounds::default()).unwrap();
    assert!(report.served.iter().all(|served| served.finish >= served.arrival));
}

#[test]
fn a_replica_that_never_answers_serves_nothing() {
    let never = vec![SimReplica::simple(Role::Mixed, 2, 1.0, vec![f64::INFINITY; 3])];
    let cluster = SimCluster::without_handover(never);
    assert_eq!(simulate(&cluster, &busy_requests(3), &mut ShortestWork, Bounds::default()), None);
}

fn two_at_once(output: f64) -> Vec<Request> {
    vec![Request { at: 0.0, prompt: 100.0, output }, Request { at: 0.0, prompt: 100.0, output }]
}

#[test]
fn a_request_keeps_its_place_at_a_prefill_replica_until_it_is_taken_over() {
    let replicas = |places: usize| {
        vec![
            SimReplica::simple(Role::Prefill, places, 0.01, vec![1.0; 2]),
            SimReplica::simple(Role::Decode, 1, 0.01, vec![1.0; 2]),
        ]
    };
    let handover = vec![Handover::linear(0.0, 0.5); 4];
    let starts = |places: usize| {
        let cluster = SimCluster::new(replicas(places), handover.clone());
        let report = simulate(&cluster, &two_at_once(11.0), &mut ShortestWork, Bounds::default()).unwrap();
        report.served.iter().map(|served| served.prefill_start).collect::<Vec<_>>()
    };
    assert_eq!(starts(0), [0.0, 1.0]);
    assert_eq!(starts(2), [0.0, 1.0]);
    assert_eq!(starts(1), [0.0, 1.5], "a second of prompt, half a second of hand-over");
}

#[test]
fn a_cache_leaves_between_two_chunks() {
    let replicas = vec![
        SimReplica::simple(Role::Prefill, 0, 0.01, vec![1.0; 2]),
        SimReplica::simple(Role::Decode, 2, 0.01, vec![1.0; 3]),
    ];
    let cluster = SimCluster::new(replicas, vec![Handover::default(); 4]);
    let report = simulate(&cluster, &two_at_once(11.0), &mut ShortestWork, Bounds::default()).unwrap();
    // The second prompt is a single chunk, and nobody waits for the one after it.
    let waits: Vec<f64> = report.served.iter().map(|s| s.decode_start - s.first_token).collect();
    assert_close(waits[0], 1.0, 1e-9);
    assert!(waits[1].abs() < 1e-9, "{waits:?}");
}

#[test]
fn prompts_on_a_mixed_replica_take_turns() {
    let cluster = SimCluster::without_handover(vec![SimReplica::simple(Role::Mixed, 2, 0.01, vec![1.0; 3])]);
    let report = simulate(&cluster, &two_at_once(2.0), &mut ShortestWork, Bounds::default()).unwrap();
    for served in &report.served {
        assert_close(served.first_token, 2.0, 1e-6);
    }
}

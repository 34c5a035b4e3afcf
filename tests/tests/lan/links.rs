//! Shaped links: that plain TCP measures what was asked for. These tests look at the clock, since time is what they are
//! about; each looks a few times before it fails, because the machine may be busy.

use std::time::Duration;

use tests::lan::{Host, Lan, LinkShape};

use crate::traffic::{Stream, goodput, round_trip};

/// Rates that are asked for, in megabits per second of goodput.
const RATES: [f64; 3] = [920.0, 100.0, 20.0];

/// Round trips that are asked for, in microseconds.
const ROUND_TRIPS: [u64; 3] = [300, 2000, 10_000];

/// How far a measured rate may be from what was asked for.
const RATE_TOLERANCE: f64 = 0.07;

fn rate_fits(measured: f64, asked: f64) -> bool {
    (measured / asked - 1.0).abs() <= RATE_TOLERANCE
}

fn time_fits(measured: Duration, asked: Duration) -> bool {
    measured.abs_diff(asked) <= Duration::from_micros(200) + asked.mul_f64(0.1)
}

/// How often it is measured until it fits: whoever else uses the machine takes packets' time.
const ATTEMPTS: usize = 3;

/// Measures until it fits, a few times at most.
fn measured<T>(
    what: &str,
    mut measure: impl FnMut() -> T,
    fits: impl Fn(&T) -> bool,
    show: impl Fn(&T) -> String,
) -> T {
    let mut misses = Vec::new();
    for _ in 0..ATTEMPTS {
        let found = measure();
        if fits(&found) {
            return found;
        }
        misses.push(show(&found));
    }
    panic!("{what}: {}", misses.join(", then "));
}

fn check_rate(what: &str, asked: f64, measure: impl FnMut() -> f64) -> f64 {
    measured(what, measure, |&rate| rate_fits(rate, asked), |rate| format!("{rate:.1} Mbit/s"))
}

fn check_time(what: &str, asked: Duration, measure: impl FnMut() -> Duration) -> Duration {
    measured(what, measure, |&time| time_fits(time, asked), |time| format!("{time:?}"))
}

#[test]
fn a_link_has_the_goodput_and_the_round_trip_that_were_asked_for() {
    let Some(lan) = Lan::with_hosts(&["a", "b"]).build_or_skip().unwrap() else { return };
    let (a, b) = (lan.host("a"), lan.host("b"));
    println!("asked Mbit/s | ms -> measured Mbit/s | ms");
    for rate in RATES {
        for micros in ROUND_TRIPS {
            let asked = Duration::from_micros(micros);
            lan.shape("a", "b", LinkShape::new(rate, asked)).unwrap();
            let what = format!("{rate} Mbit/s, {asked:?}");
            let time = check_time(&what, asked, || round_trip(a, b, 1));
            let goodput = check_rate(&what, rate, || goodput(a, b));
            println!(
                "{rate:>5} | {:>4} -> {goodput:>5.1} | {:.3}",
                micros as f64 / 1e3,
                time.as_secs_f64() * 1e3
            );
        }
    }
    println!("frames forwarded and dropped: {:?}", lan.forwarded_and_dropped());
}

#[test]
fn a_message_takes_its_bytes_over_the_rate() {
    let Some(lan) = Lan::with_hosts(&["a", "b"]).build_or_skip().unwrap() else { return };
    lan.shape("a", "b", LinkShape::new(20.0, Duration::from_millis(2))).unwrap();
    // A burst of HTB alone would let it through at once.
    let bytes = 32768;
    let asked = Duration::from_millis(2) + Duration::from_secs_f64(bytes as f64 * 8.0 / 20e6);
    check_time("32 kB over 20 Mbit/s", asked, || round_trip(lan.host("a"), lan.host("b"), bytes));
}

#[test]
fn the_directions_of_a_link_can_differ() {
    let Some(lan) = Lan::with_hosts(&["a", "b"]).build_or_skip().unwrap() else { return };
    let (a, b) = (lan.host("a"), lan.host("b"));
    lan.shape_one_way("a", "b", LinkShape::new(100.0, Duration::from_millis(1))).unwrap();
    lan.shape_one_way("b", "a", LinkShape::new(20.0, Duration::from_millis(3))).unwrap();
    check_time("half of 1 ms and half of 3 ms", Duration::from_millis(2), || round_trip(a, b, 1));
    check_rate("a to b", 100.0, || goodput(a, b));
    check_rate("b to a", 20.0, || goodput(b, a));
}

#[test]
fn the_links_of_a_host_share_its_network_card() {
    let Some(lan) = Lan::e2llm(3).build_or_skip().unwrap() else { return };
    let (h1, h2, h3) = (lan.host("h1"), lan.host("h2"), lan.host("h3"));
    let both = |pairs: [(&Host, &Host); 2]| {
        let streams = pairs.map(|(from, to)| Stream::begin(from, to));
        streams.map(Stream::finish).iter().sum::<f64>()
    };
    check_time("one link", LinkShape::E2LLM.round_trip, || round_trip(h1, h2, 1));
    check_rate("one link", 920.0, || goodput(h1, h2));
    check_rate("one sender, two receivers", 920.0, || both([(h1, h2), (h1, h3)]));
    check_rate("two senders, one receiver", 920.0, || both([(h2, h1), (h3, h1)]));
}

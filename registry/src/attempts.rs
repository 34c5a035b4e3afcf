//! Holds back hosts that try too often. Secrets are too long to be found by trying; this keeps a flood from the disk and the
//! log. Whoever is held back learns when to come again.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Hosts that are counted. When there are more, those whose time is over are forgotten; if none is, nobody new is let in.
const MOST_HOSTS: usize = 1024;

/// At most so many attempts of one host in a period.
#[derive(Debug)]
pub(crate) struct Attempts {
    most: u32,
    period: Duration,
    hosts: Mutex<HashMap<IpAddr, Count>>,
}

#[derive(Debug, Clone, Copy)]
struct Count {
    attempts: u32,
    since: Instant,
}

impl Attempts {
    pub(crate) fn new(most: u32, period: Duration) -> Self {
        Self { most, period, hosts: Mutex::default() }
    }

    /// Counts an attempt.
    pub(crate) fn count(&self, host: IpAddr, now: Instant) {
        let mut hosts = self.hosts();
        self.make_room(&mut hosts, now);
        if hosts.len() >= MOST_HOSTS && !hosts.contains_key(&host) {
            return;
        }
        let count = hosts.entry(host).or_insert(Count { attempts: 0, since: now });
        if self.is_over(count, now) {
            *count = Count { attempts: 0, since: now };
        }
        count.attempts += 1;
    }

    /// How long a host has to wait, if it has to.
    pub(crate) fn wait(&self, host: IpAddr, now: Instant) -> Option<Duration> {
        let mut hosts = self.hosts();
        self.make_room(&mut hosts, now);
        match hosts.get(&host) {
            Some(count) if !self.is_over(count, now) && count.attempts >= self.most => {
                Some(self.period.saturating_sub(now.saturating_duration_since(count.since)))
            }
            None if hosts.len() >= MOST_HOSTS => Some(self.period),
            _ => None,
        }
    }

    fn is_over(&self, count: &Count, now: Instant) -> bool {
        now.saturating_duration_since(count.since) >= self.period
    }

    fn make_room(&self, hosts: &mut HashMap<IpAddr, Count>, now: Instant) {
        if hosts.len() >= MOST_HOSTS {
            hosts.retain(|_, count| !self.is_over(count, now));
        }
    }

    fn hosts(&self) -> std::sync::MutexGuard<'_, HashMap<IpAddr, Count>> {
        // The map is whole after every statement.
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn host(number: u32) -> IpAddr {
        Ipv4Addr::from(number).into()
    }

    #[test]
    fn a_host_that_tries_too_often_waits_and_others_do_not() {
        let attempts = Attempts::new(3, Duration::from_secs(10));
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        for _ in 0..3 {
            assert_eq!(attempts.wait(host(1), at(0)), None);
            attempts.count(host(1), at(0));
        }
        assert_eq!(attempts.wait(host(1), at(4)), Some(Duration::from_secs(6)));
        assert_eq!(attempts.wait(host(2), at(4)), None);
        assert_eq!(attempts.wait(host(1), at(10)), None);
        attempts.count(host(1), at(10));
        assert_eq!(attempts.wait(host(1), at(11)), None, "a new period begins anew");
    }

    #[test]
    fn a_flood_from_many_hosts_takes_no_more_memory() {
        let attempts = Attempts::new(3, Duration::from_secs(10));
        let start = Instant::now();
        for number in 0..3 * MOST_HOSTS as u32 {
            attempts.count(host(number), start);
        }
        assert_eq!(attempts.hosts().len(), MOST_HOSTS);
        assert!(attempts.wait(host(9_999_999), start).is_some());
        assert_eq!(attempts.wait(host(9_999_999), start + Duration::from_secs(10)), None);
    }
}

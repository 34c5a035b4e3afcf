//! Cutting hosts and pairs off, and back.

use std::io::{ErrorKind, Read as _, Write as _};
use std::time::Duration;

use tests::lan::{Lan, LinkShape};

use crate::traffic::{connect, silent, talk};

#[test]
fn a_cut_pair_cannot_talk_while_others_can_and_is_joined_again() {
    let Some(lan) = Lan::with_hosts(&["a", "b", "c"]).build_or_skip().unwrap() else { return };
    let (a, b, c) = (lan.host("a"), lan.host("b"), lan.host("c"));
    assert!(talk(a, b, b.address()));

    lan.cut_pair("a", "b").unwrap();
    for (from, to) in [(a, b), (b, a)] {
        assert!(silent(from, to, to.address()) && silent(from, to, to.address6()));
    }
    assert!(talk(a, c, c.address()) && talk(c, b, b.address()));

    lan.heal().unwrap();
    assert!(talk(a, b, b.address()) && talk(b, a, a.address6()));
}

#[test]
fn a_host_that_is_cut_off_reaches_nobody() {
    let Some(lan) = Lan::with_hosts(&["a", "b", "c"]).build_or_skip().unwrap() else { return };
    let (a, b, c) = (lan.host("a"), lan.host("b"), lan.host("c"));
    lan.cut("b").unwrap();
    assert!(silent(a, b, b.address()) && silent(b, c, c.address()));
    assert!(talk(a, c, c.address()));
    lan.heal().unwrap();
    assert!(talk(a, b, b.address()) && talk(b, c, c.address()));
}

#[test]
fn a_one_way_cut_loses_one_direction_of_a_shaped_link() {
    let Some(lan) = Lan::with_hosts(&["a", "b"]).build_or_skip().unwrap() else { return };
    lan.shape("a", "b", LinkShape::new(100.0, Duration::from_millis(2))).unwrap();
    let (mut near, mut far) = connect(lan.host("a"), lan.host("b"), lan.host("b").address());
    let mut byte = [0];
    for end in [&near, &far] {
        end.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    }
    lan.cut_one_way("a", "b").unwrap();
    near.write_all(b"a").unwrap();
    assert_eq!(far.read(&mut byte).unwrap_err().kind(), ErrorKind::WouldBlock);
    far.write_all(b"b").unwrap();
    near.read_exact(&mut byte).unwrap();
    assert_eq!(&byte, b"b");

    // An open connection goes on where it was; TCP sends again by itself.
    lan.heal().unwrap();
    far.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    far.read_exact(&mut byte).unwrap();
    assert_eq!(&byte, b"a");
}
